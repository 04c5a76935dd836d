"""Distributions over the trees of a batch of sentences, with torch-struct's names.

    log p(tree | sentence) = log weight(tree) - log Z

Argmax, topk, sample, entropy and kl are over derivations: skeletal trees with their states and, in a CP form,
a rank index at every binary node (over skeletal trees they are intractable). With unary rules a derivation has a
top and a bottom state for each span, and what happens between them, any number of unary rules or none, is one
step of it. `log_prob` takes derivations or skeletal trees.
"""

from collections.abc import Sequence
from functools import cached_property

import torch
from nltk.tree import Tree
from torch import Tensor

from lvpcfg.chart.decode.best import Best
from lvpcfg.chart.decode.decode import derivations
from lvpcfg.chart.derivations import Derivation, Node, Skeletal, only
from lvpcfg.chart.fast.algebra import MAX, Expectation, Log, Sample
from lvpcfg.chart.fast.build import dense, form
from lvpcfg.chart.fast.cp import CPForm
from lvpcfg.chart.fast.inside import AnyRules, Chart
from lvpcfg.chart.fast.marginals import Marginals, marginals
from lvpcfg.chart.fast.outside import Outside
from lvpcfg.chart.fast.partition import LOGARITHMIC, Problem, log_partition, solve, total
from lvpcfg.chart.fast.sample import Sampler
from lvpcfg.chart.semirings import require_nonnegative, safe_log
from lvpcfg.errors import InputError, show
from lvpcfg.grammar.model import Model
from lvpcfg.trees.binarise import binarise
from lvpcfg.trees.lexicon import Lexicon
from lvpcfg.trees.normalise import TOP, normalise
from lvpcfg.trees.walk import is_preterminal

WIDEST, WIDEST_FLOAT32 = 700, 80  # log-potentials that exp can hold beside the largest


class TreeDistribution:
    """The trees of a batch of sentences under one grammar.

    `leaf` is [length, batch, preterminal states]: what each word is worth under each state. `lengths`, [batch], says
    how long the sentences are where some are shorter. `symbol` maps states to symbols, for skeletal trees; without
    it every state is a symbol. `constant`, [batch], is the log of a factor of every tree's weight that the
    parameters leave out.
    """

    def __init__(
        self,
        form: AnyRules,
        leaf: Tensor,
        lengths: Tensor | None = None,
        symbol: Sequence[int] | None = None,
        constant: Tensor | None = None,
    ) -> None:
        if lengths is not None:
            lengths = torch.as_tensor(lengths, device=leaf.device)
            if lengths.shape != leaf.shape[1:2] or lengths.is_floating_point():
                raise InputError(f"lengths are {lengths.tolist()}: expected a whole number for each sentence.")
            if not bool(((lengths >= 1) & (lengths <= leaf.shape[0])).all()):
                raise InputError(f"lengths are {lengths.tolist()}: expected 1 to {leaf.shape[0]} words.")
        self.form, self.leaf, self.lengths = form, leaf, lengths
        self.symbol = list(range(form.root.shape[-1])) if symbol is None else list(symbol)
        self.constant = constant

    @cached_property
    def partition(self) -> Tensor:
        """log Z of each sentence, [batch]; differentiable. (log |Z| where parameters are signed.)"""
        log_z, _ = log_partition(self.form, self.leaf, self.lengths)
        return log_z if self.constant is None else log_z + self.constant

    @cached_property
    def marginals(self) -> Marginals:
        """Posteriors of all spans and states."""
        return marginals(self._plain, self.leaf.detach(), self.lengths)

    @cached_property
    def argmax(self) -> list[Derivation]:
        """The best derivation of each sentence; one without nodes where there is none."""
        require_nonnegative(self._everything(), "argmax")
        return [one[0] if one else Derivation(()) for one in self._best(1)]

    def topk(self, k: int) -> list[list[Derivation]]:
        """The k best derivations of each sentence, best first; fewer where there are fewer."""
        _expect_number("topk", k)
        require_nonnegative(self._everything(), "topk")
        return self._best(k)

    def sample(self, samples: int = 1, generator: torch.Generator | None = None) -> list[list[Derivation]]:
        """Derivations drawn at random, independently, as many as asked for of each sentence."""
        _expect_number("sample", samples)
        require_nonnegative(self._everything(), "sample")
        form = self._plain.unsorted if isinstance(self._plain, CPForm) else self._plain
        problem = Problem(form.to(torch.float64), self.leaf.detach().to(torch.float64), self.lengths)
        drawn: list[list[Derivation]] = [[] for _ in range(self.leaf.shape[1])]
        with torch.no_grad():
            for solution in solve(problem):
                if solution.level == LOGARITHMIC:
                    found = self._drawn_in_logarithms(problem.part(solution.sentences), samples, generator)
                else:
                    trees = Sampler(solution.chart, samples, generator).skeletons()
                    found = [[Derivation(tuple(nodes)) for nodes in some] for some in trees]
                for sentence, some in zip(solution.sentences.tolist(), found, strict=True):
                    drawn[sentence] = some
        return drawn

    def _drawn_in_logarithms(
        self, problem: Problem, samples: int, generator: torch.Generator | None
    ) -> list[list[Derivation]]:
        """One chart for each sample: the last resort, where float64 underflows."""
        leaf = problem.leaf.repeat_interleave(samples, 1)
        lengths = None if problem.lengths is None else problem.lengths.repeat_interleave(samples, 0)
        drawn = TreeDistribution(problem.form, leaf, lengths)._derived(Sample(generator))
        return [drawn[i : i + samples] for i in range(0, len(drawn), samples)]

    @cached_property
    def entropy(self) -> Tensor:
        """Of the distribution over derivations, [batch]; differentiable. 0 for a sentence without any."""
        log_z, expected = self._expected("entropy", [safe_log(x) for x in self._everything()])
        return torch.where(log_z > -torch.inf, log_z - expected, 0)

    def kl(self, other: "TreeDistribution") -> Tensor:
        """sum over derivations of p log (p / q), [batch], p being this distribution; differentiable.

        `other` has the same form over the same sentences, and gives weight to whatever this one does. 0 for a
        sentence without derivations.
        """
        mine, others = self._everything(), other._everything()
        if [x.shape for x in mine] != [x.shape for x in others]:
            raise InputError("kl needs two grammars of the same form over the same sentences.")
        if any(bool(((p > 0) & (q == 0)).any()) for p, q in zip(mine, others, strict=True)):
            raise InputError("kl is infinite: the other grammar has zeros where this one has none.")
        ratios = [torch.where(p > 0, safe_log(p) - safe_log(q), 0) for p, q in zip(mine, others, strict=True)]
        log_z, expected = self._expected("kl", ratios)
        other_log_z, _ = log_partition(other.form, other.leaf, other.lengths)
        return torch.where(log_z > -torch.inf, expected - log_z + other_log_z, 0)

    def log_prob(self, trees: Sequence[Derivation | Skeletal]) -> Tensor:
        """log p(tree | sentence) of one tree for each sentence, [batch]; differentiable. -inf for what is no tree."""
        if len(trees) != self.leaf.shape[1]:
            raise InputError(
                f"log_prob of {len(trees)} trees: expected one for each of {self.leaf.shape[1]} sentences."
            )
        if isinstance(self.form, CPForm) and any(isinstance(tree, Derivation) for tree in trees):
            weight = torch.stack([self._weight(tree.nodes, sentence) for sentence, tree in enumerate(trees)])
        else:
            weight, _ = log_partition(self.form, self.leaf, self.lengths, only(trees, self.symbol, self.leaf))
        log_z, _ = log_partition(self.form, self.leaf, self.lengths)
        return torch.where(weight > -torch.inf, weight - log_z, -torch.inf)

    @property
    def _plain(self) -> AnyRules:
        return self.form.with_tensors([tensor.detach() for tensor in self.form.tensors])

    def _everything(self) -> list[Tensor]:
        return [self.leaf, *self.form.tensors]

    def _best(self, k: int) -> list[list[Derivation]]:
        best = Best(self._chart(MAX), k)
        return [[Derivation(tuple(nodes)) for nodes in best.skeletons(b)] for b in range(self.leaf.shape[1])]

    def _chart(self, algebra: Log) -> Chart:
        tensors = [algebra.value(tensor.detach().to(torch.float64)) for tensor in self.form.tensors]
        leaf = algebra.value(self.leaf.detach().to(torch.float64))
        return Chart(self.form.with_tensors(tensors), leaf, algebra, self.lengths)

    def _derived(self, algebra: Log) -> list[Derivation]:
        """The derivation of each sentence that its value in the algebra is the weight of."""
        chart = self._chart(algebra)
        gradient = (chart.log_z > -torch.inf).to(chart.log_z.dtype)
        return [Derivation(tuple(tree or ())) for tree in derivations(chart, Outside(chart, gradient))]

    def _expected(self, what: str, functions: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """log Z and the expectation of the sum of a function of the parameters a derivation uses."""
        require_nonnegative(self._everything(), what)
        algebra = Expectation()
        both = [torch.stack([x, f]).to(torch.float64) for x, f in zip(self._everything(), functions, strict=True)]
        leaf, *tensors = (algebra.value(x) for x in both)
        log_z, expected = total(self.form.with_tensors(tensors), leaf, algebra, self.lengths).unbind(0)
        return log_z, expected

    def _weight(self, nodes: Sequence[Node], sentence: int) -> Tensor:
        """log of the product of the factors that a derivation of a CP form uses."""
        u, inner, outer = self.form.weights
        both = torch.cat([inner, outer])  # [states, 2 rank]
        rank = len(u)
        factors = [self.form.root[nodes[0].top]] if nodes else [self.leaf.new_zeros(())]
        waiting: list[tuple[int, int]] = []  # rank above and side, for nodes to come
        for node in nodes:
            if waiting:
                above, side = waiting.pop()
                factors.append(both[node.top, above + side * rank])
            if self.form.closure is not None and self.form.promotion is not None:
                step = self.form.closure if node.split else self.form.promotion
                first = 0 if node.split else self.form.interminals
                if node.top < self.form.interminals:
                    factors.append(step[node.bottom - first, node.top])
            if node.split:
                assert node.rank is not None
                factors.append(u[node.rank, node.bottom])
                waiting += [(node.rank, 1), (node.rank, 0)]
            else:
                factors.append(self.leaf[node.start, sentence, node.bottom - self.form.interminals])
        return safe_log(torch.stack(factors).to(torch.float64)).sum()


class SentCFG(TreeDistribution):
    """A dense PCFG given by log-potentials, as torch-struct's, with the rules shared by the batch.

    terms [batch, length, T], rules [NT, NT + T, NT + T], roots [NT]; -inf for what is impossible. Potentials that
    float32 could not hold beside the largest are computed with in float64.
    """

    def __init__(self, terms: Tensor, rules: Tensor, roots: Tensor, lengths: Tensor | None = None) -> None:
        if terms.dim() != 3 or rules.dim() != 3 or roots.dim() != 1:
            shapes = [tuple(x.shape) for x in (terms, rules, roots)]
            raise InputError(
                f"terms, rules and roots have the shapes {shapes}: expected [batch, length, T], "
                "[NT, NT + T, NT + T] and [NT], the rules being shared by the batch."
            )
        (batch, length, outer), inner = terms.shape, len(roots)
        if rules.shape != (inner, inner + outer, inner + outer):
            expected = (inner, inner + outer, inner + outer)
            raise InputError(f"rules have the shape {tuple(rules.shape)}: expected {expected}.")
        # Every tree of n words has n - 1 binary rules, so a factor of all rules is a factor of all trees.
        word, rule, root = _largest(terms, -1), _largest(rules.flatten(), -1), _largest(roots, -1)
        sizes = torch.as_tensor([length] * batch if lengths is None else lengths, device=terms.device)
        within = torch.arange(length, device=terms.device) < sizes.unsqueeze(1)
        constant = (word.squeeze(-1) * within).sum(1) + (sizes - 1) * rule + root
        parts = [terms - word, rules - rule, roots - root]
        least = min(float(part.detach().masked_fill(part == -torch.inf, 0).min()) for part in parts)
        if least < -WIDEST:
            raise InputError(f"log-potentials differ by {-least:.0f}: expected {WIDEST} at the most, or -inf.")
        if least < -WIDEST_FLOAT32:
            parts = [part.to(torch.float64) for part in parts]
        leaf, weights, tops = (part.exp() for part in parts)
        form = dense(torch.cat([tops, tops.new_zeros(outer)]), weights)
        super().__init__(form, leaf.transpose(0, 1), lengths, constant=constant.to(torch.float64))


def _expect_number(what: str, number: int) -> None:
    if type(number) is not int or number < 1:
        raise InputError(f"{what} of {show(number)}: expected 1, 2, ...")


def _largest(x: Tensor, dimension: int) -> Tensor:
    largest = x.detach().amax(dimension, keepdim=True)
    return torch.where(largest > -torch.inf, largest, 0)


class ModelTrees(TreeDistribution):
    """The trees of some sentences, of any lengths, under a model."""

    def __init__(self, model: Model, sentences: Sequence[Sequence[str]]) -> None:
        grammar = model.grammar
        entries, lengths = encoded(model.lexicon, sentences, grammar.root.device)
        leaf = grammar.lexical.lookup(entries).transpose(0, 1)
        self.model = model
        super().__init__(form(grammar), leaf, lengths, grammar.symbol_of_state.tolist())

    def skeletal(self, tree: Tree) -> Skeletal:
        """A treebank tree as the skeletal tree that this model gives a probability to."""
        return skeletal(self.model, tree)


def encoded(lexicon: Lexicon, sentences: Sequence[Sequence[str]], device: torch.device) -> tuple[Tensor, Tensor | None]:
    """The entries of words, [batch, length], and the lengths of sentences, [batch], if they differ."""
    if not sentences or not all(sentences):
        raise InputError("a distribution over trees needs sentences of a word or more.")
    lengths = [len(words) for words in sentences]
    entries = [[*lexicon.encode(words), *[0] * (max(lengths) - len(words))] for words in sentences]
    mixed = len(set(lengths)) > 1
    return torch.tensor(entries, device=device), torch.tensor(lengths, device=device) if mixed else None


def skeletal(model: Model, tree: Tree) -> Skeletal:
    """A treebank tree as the skeletal tree that a model gives a probability to."""
    symbols, nodes = model.grammar.symbols, []
    inner = {name: i for i, name in enumerate(symbols.interminals)}
    outer = {name: len(inner) + i for i, name in enumerate(symbols.preterminals)}

    def number(node: Tree) -> int:
        names = outer if is_preterminal(node) else inner
        if node.label() not in names:
            raise InputError(f"the model has no symbol {node.label()!r}.")
        return names[node.label()]

    top = binarise(normalise(tree), model.binarisation)
    # TOP over one child is no symbol, unless the grammar has unary rules for it, as one of Berkeley's does.
    above = len(top) > 1 or inner.get(TOP) in model.grammar.unary_rules[:, 0].tolist()
    waiting = [(0, top if above else top[0])]
    while waiting:
        start, node = waiting.pop()
        width, bottom = len(node.leaves()), node
        while len(bottom) == 1 and not is_preterminal(bottom):
            bottom = bottom[0]
        split = 0 if is_preterminal(bottom) else len(bottom[0].leaves())
        nodes.append(Node(start, width, number(node), number(bottom), split))
        if split:
            waiting += [(start + split, bottom[1]), (start, bottom[0])]
    return Skeletal(tuple(nodes))
