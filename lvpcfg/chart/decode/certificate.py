"""How wrong a compressed grammar can be, for a sentence: intervals for what the exact grammar says of it.

They are computed from the compressed grammar and its envelope alone: over the forest in which the sentence was parsed,
or over its whole chart, from two grammars of tensors between which the exact one is.

A tree A is the best one of the exact grammar by max-rule for sure, if it is still the best when its own rules are
worth as little as they can be, and all others as much as they can be:

    score(A) - score(B) >= sum over A - B of log q_low  -  sum over B - A of log q_high        for every tree B

What A and B have in common cancels, and so does Z, since all trees of a sentence have as many parts.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from lvpcfg.chart.decode.coarse_to_fine import CoarseToFine
from lvpcfg.chart.decode.decode import as_lists, best_edges, by_level, chosen_trees, trees_of
from lvpcfg.chart.decode.decoded import Decoded, Wanted
from lvpcfg.chart.decode.loss import whole_charts
from lvpcfg.chart.derivations import Skeletal, Skeleton
from lvpcfg.chart.fast.build import form
from lvpcfg.chart.fast.inside import FastForm
from lvpcfg.chart.forest.arrays import take, true_indices
from lvpcfg.chart.forest.brackets import ROUNDING, BracketRules, Brackets
from lvpcfg.chart.forest.forest import Forest, Posteriors
from lvpcfg.chart.forest.observed import ObservedTrees, RuleNumbers
from lvpcfg.chart.forest.prune import Nodes
from lvpcfg.chart.forest.pruning import words_of
from lvpcfg.chart.stages import Stages
from lvpcfg.grammar.coarse import CoarseGrammar
from lvpcfg.grammar.envelope import Bracketed
from lvpcfg.grammar.grammar import Grammar
from lvpcfg.grammar.rule_cp import RuleCP
from lvpcfg.options import PRODUCT

Bounds = tuple[Float64[Tensor, "some"], Float64[Tensor, "some"]]  # from below and from above


class Certifier:
    """For sentences whose words are worth `words` [words, tag states] in float64, all of them end to end."""

    def __init__(self, known: Bracketed) -> None:
        self.known, self.rules = known, BracketRules(known)

    def brackets(
        self,
        words: Float64[Tensor, "words tag_states"],
        lengths: Int64[Tensor, "sentences"],
        forest: Forest,
        nodes: Nodes,
    ) -> Brackets:
        """Of a forest over all sentences."""
        word, symbol = words_of(forest, nodes, lengths), take(nodes.symbol, forest.leaves)
        return Brackets(self.rules, forest, self.rules.fine.leaf(words, word, symbol), lengths)

    def of_trees(
        self,
        trees: Sequence[Skeleton],
        words: Float64[Tensor, "words tag_states"],
        lengths: Int64[Tensor, "trees"],
    ) -> Bounds:
        """Of log p of a tree of each sentence; -inf for what is no tree of the grammar."""
        low, high = (torch.full((len(trees),), -torch.inf, dtype=torch.float64, device=words.device) for _ in "lh")
        observed = ObservedTrees.of([Skeletal(tuple(tree)) for tree in trees], self.rules.fine, self._numbers)
        if observed is not None:
            word = words_of(observed.forest, observed.nodes, lengths)
            symbol = take(observed.nodes.symbol, observed.forest.leaves)
            leaf = self.rules.fine.leaf(words, word, symbol)
            bounds = Brackets(self.rules, observed.forest, leaf, take(lengths, observed.sentences)).log_z
            for into, bound in zip((low, high), bounds, strict=True):
                into.index_copy_(0, observed.sentences, bound)
        return low, high

    def of_charts(self, words: Float64[Tensor, "words tag_states"], lengths: Int64[Tensor, "sentences"]) -> Bounds:
        """Of log Z of whole charts."""
        most = int(torch.bincount(self.known.centre.binary_rules[:, 0], minlength=1).amax())
        operations = lengths * most * max(self.known.centre.binary.state_counts) ** 2 + 64
        margin = ROUNDING * operations * 4 * lengths.double()
        low, high = (whole_charts(one, words, lengths) for one in self._forms)
        return low - margin, high + margin

    @cached_property
    def _numbers(self) -> RuleNumbers:
        return RuleNumbers(self.rules.fine)

    @cached_property
    def _forms(self) -> tuple[FastForm, FastForm]:
        """Of the grammars below and above."""
        centre, terms = self.known.centre, self.known.terms
        rules = centre.binary.written_out()
        around = torch.zeros_like(rules.values)
        if terms is not None and isinstance(centre.binary, RuleCP):
            none = torch.zeros_like(centre.binary.values)
            around = replace(centre.binary, values=none, u=terms.u, v=terms.v, w=terms.w).written_out().values
        low, high = (
            form(replace(centre, binary=rules.with_tensors({"values": values.clamp_min(0)})), fixed=True)
            for values in (rules.values - around, rules.values + around)
        )
        return low, high


SURE = {torch.float32: 1e-3, torch.float64: 1e-9}  # nats of a part of a tree, for the rounding of an exact parser
CLEAR = -60.0  # of a part of a tree: an exact parser in float32 takes what is much less for impossible
FLOOR = 1e-250  # of what is possible at the most: less may have underflowed


class CertifiedCoarseToFine(CoarseToFine):
    """Max-rule trees of the exact grammar: by a compressed one where these are the same for sure."""

    def __init__(self, exact: Grammar, coarse: CoarseGrammar, stages: Stages, certifier: Certifier) -> None:
        super().__init__([exact], coarse, PRODUCT, stages)
        self.certifier, self.sure = certifier, SURE[exact.root.dtype]
        self.certified = self.uncertified = 0

    def _parse(self, words: Sequence[Tensor], lengths: Tensor, forest: Forest, kept: Nodes, wanted: Wanted) -> Decoded:
        """log Z of certified sentences is not computed: it is nan."""
        with self.stages.stage("brackets"):
            brackets = self.certifier.brackets(words[0].double(), lengths, forest, kept)
            chosen, sure = self._best(brackets, forest, kept)
        with self.stages.stage("decode"):
            found = trees_of(forest, kept, chosen_trees(forest, chosen, brackets.margin), lengths)
        trees, log_z = as_lists(found), torch.full_like(lengths, torch.nan, dtype=torch.float64)
        others = true_indices(~sure)
        self.certified += len(lengths) - len(others)
        self.uncertified += len(others)
        if len(others):
            decoded = super()._parse(*_part(words, lengths, forest, kept, others), wanted)
            log_z.index_copy_(0, others, decoded.log_z)
            for number, some in zip(others.tolist(), decoded.trees, strict=True):
                trees[number] = some
        return Decoded(trees, log_z)

    def _best(self, brackets: Brackets, forest: Forest, kept: Nodes) -> tuple[Tensor, Tensor]:
        """The edges of likely trees, [nodes + 2], and for each sentence whether its tree is the best for sure."""
        bounds = brackets.posteriors
        sentence = torch.cat([kept.sentence, torch.arange(len(forest.tops), device=kept.sentence.device)])
        share = take(bounds.share, sentence)
        high, high_leaves = self._worths(forest, kept, bounds.high.clamp_min(FLOOR), bounds.high_nodes.clamp_min(FLOOR))
        low, low_leaves = self._worths(forest, kept, bounds.low * take(share, forest.parent), bounds.low_nodes * share)
        # Something between the two, also where the low one is nothing.
        middle, middle_leaves = (
            (up + torch.maximum(down, up - 100)) / 2 for up, down in ((high, low), (high_leaves, low_leaves))
        )
        chosen, _ = best_edges(forest, middle, middle_leaves)
        in_tree, edges = _of_trees(forest, chosen)
        again, worth = best_edges(
            forest,
            torch.where(edges, torch.where(low > CLEAR, low - self.sure, -torch.inf), high),
            torch.where(take(in_tree, forest.leaves), low_leaves - self.sure, high_leaves),
        )
        other = true_indices(in_tree & (again != chosen)[: forest.nodes])
        sure = bounds.known & (take(worth, forest.tops) > -torch.inf)
        return chosen, sure.index_fill(0, take(sentence, other), False)

    def _worths(self, forest: Forest, kept: Nodes, edges: Tensor, nodes: Tensor) -> tuple[Tensor, Tensor]:
        none = nodes.new_zeros(2)
        return self.decoder.worths(
            PRODUCT, forest, kept, Posteriors(none, none, torch.cat([nodes, none]), edges, Counter())
        )


def _of_trees(forest: Forest, chosen: Int64[Tensor, "nodes_and_2"]) -> tuple[Tensor, Tensor]:
    """Which nodes and which edges are in the trees of chosen edges."""
    nodes = torch.zeros(forest.nodes + 2, dtype=torch.bool, device=chosen.device).index_fill_(0, forest.tops, True)
    edges = torch.zeros(len(forest.rule), dtype=torch.bool, device=chosen.device)
    for here in reversed(by_level(forest)):
        parent = take(forest.parent, here)
        some = here[take(nodes, parent) & (take(chosen, parent) == here)]
        edges.index_fill_(0, some, True)
        for children in (forest.left, forest.right):
            nodes.index_fill_(0, take(children, some), True)
    return nodes[: forest.nodes], edges


def _part(
    words: Sequence[Tensor], lengths: Tensor, forest: Forest, kept: Nodes, some: Int64[Tensor, "some"]
) -> tuple[list[Tensor], Tensor, Forest, Nodes]:
    """What belongs to some of the sentences."""
    device = lengths.device
    chosen = torch.zeros(len(lengths), dtype=torch.bool, device=device).index_fill_(0, some, True)
    used = torch.cat([take(chosen, kept.sentence), chosen])
    part = forest.restricted(true_indices(take(used, forest.parent)), used, take(forest.tops, some))
    columns = {name: take(column, part.nodes[: len(part.nodes) - len(some)]) for name, column in vars(kept).items()}
    columns["sentence"] = take(chosen.long().cumsum(0) - 1, columns["sentence"])
    of_words = torch.repeat_interleave(chosen, lengths)
    return [each[of_words] for each in words], take(lengths, some), part.forest, Nodes(**columns)
