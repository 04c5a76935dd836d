"""Distributions over the trees of a batch of sentences, with torch-struct's names.

    log p(tree | sentence) = log weight(tree) - log Z

Argmax, topk, sample, entropy and kl are over derivations: skeletal trees with their states and, in a CP form, a rank
index at every binary node. (Over skeletal trees they are intractable.) With unary rules, a derivation has a top and a
bottom state for each span; the chain of unary rules between them is one step. `log_prob` takes derivations or skeletal
trees.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from jaxtyping import Float, Int
from nltk.tree import Tree
from torch import Tensor
from torch.distributions import register_kl

from lvpcfg.chart import textbook
from lvpcfg.chart.derivations import Allowed, Derivation, Node, Skeletal, only
from lvpcfg.chart.fast.as_textbook import as_textbook
from lvpcfg.chart.fast.build import dense_form, form
from lvpcfg.chart.fast.cp import CPForm
from lvpcfg.chart.fast.inside import Chart, FastForm
from lvpcfg.chart.fast.marginals import Marginals, marginals
from lvpcfg.chart.fast.partition import Problem, log_partition, solve
from lvpcfg.chart.fast.sample import Sampler
from lvpcfg.chart.kbest import KBest
from lvpcfg.chart.lanes import Rules
from lvpcfg.chart.marks import MarkedChart
from lvpcfg.chart.semirings import (
    Log,
    Sampled,
    Semiring,
    Signed,
    require_nonnegative,
    safe_log,
)
from lvpcfg.chart.textbook import CFG
from lvpcfg.errors import InputError, show
from lvpcfg.grammar.model import Model
from lvpcfg.sequence.distribution import HMMDistribution as HMMDistribution
from lvpcfg.structures import Structures, checked_lengths, expect_number, exponentials, largest, remembered
from lvpcfg.trees.binarise import binarise
from lvpcfg.trees.lexicon import Lexicon
from lvpcfg.trees.normalise import TOP, normalise
from lvpcfg.trees.sentences import sentences_of
from lvpcfg.trees.spelling import Tokens
from lvpcfg.trees.walk import is_preterminal


class TreeDistribution(Structures):
    """The trees of a batch of sentences under one grammar.

    `form` is a form of the fast engine, or a textbook grammar, which may have parameters for each sentence. `leaf` is
    the weight of each word under each state of the preterminals. `lengths` are needed if some sentences are shorter.
    `symbol` maps states to symbols, for skeletal trees; without it every state is a symbol. `constant` is the
    log of a factor of every tree's weight that the parameters leave out.

    The partition and log_prob have first derivatives, all other numbers derivatives of any order. The fast engine
    computes whatever it can.
    """

    _what = "trees"
    _total = staticmethod(textbook.log_partition)

    def __init__(
        self,
        form: FastForm | CFG,
        leaf: Float[Tensor, "length batch word_states"],
        lengths: Sequence[int] | Tensor | None = None,
        symbol: Sequence[int] | None = None,
        constant: Float[Tensor, "batch"] | None = None,
    ) -> None:
        super().__init__(form, leaf, lengths, constant)
        self.symbol = list(range(form.root.shape[-1])) if symbol is None else list(symbol)

    @remembered
    def marginals(self) -> Marginals:
        """Posteriors of all spans and states; differentiable."""
        if isinstance(self.form, CFG) or self._differentiable:
            found = self._textbook_marginals()
        else:
            found = marginals(self._plain(self.form), self.leaf.detach(), self.lengths)
        return found if self.constant is None else replace(found, log_z=found.log_z + self.constant.detach())

    @remembered
    def argmax(self) -> list[Derivation]:
        """The best derivation of each sentence. It has no nodes if the sentence is impossible."""
        require_nonnegative(self._everything(), "argmax")
        return [some[0] if some else Derivation(()) for some in self._best(1)]

    def topk(self, k: int) -> list[list[Derivation]]:
        """The k best derivations of each sentence, best first; fewer if there are fewer."""
        expect_number("topk", k)
        require_nonnegative(self._everything(), "topk")
        return self._best(k)

    def sample(  # type: ignore[override]
        self, samples: int | Sequence[int] = 1, generator: torch.Generator | None = None
    ) -> list[list[Derivation]]:
        """Derivations of each sentence, drawn independently. `samples` is their number, 5, or a shape, (5,)."""
        number = self._samples(samples)
        if isinstance(self.form, CFG):
            return self._drawn_in_logarithms(number, generator)
        form = self._plain(self.form)
        form = form.unsorted
        problem = Problem(form.to(torch.float64), self.leaf.detach().to(torch.float64), self.lengths)
        drawn: list[list[Derivation]] = [[] for _ in range(self.leaf.shape[1])]
        with torch.no_grad():
            for solution in solve(problem):
                if isinstance(solution.chart, Chart):
                    trees = Sampler(solution.chart, number, generator).skeletons()
                    found = [[Derivation(tuple(nodes)) for nodes in some] for some in trees]
                else:  # float64 is not enough
                    part = problem.part(solution.sentences)
                    rest = TreeDistribution(part.form, part.leaf, part.lengths)
                    found = rest._drawn_in_logarithms(number, generator)
                for sentence, derivations in zip(solution.sentences.tolist(), found, strict=True):
                    drawn[sentence] = derivations
        return drawn

    def log_prob(self, trees: Sequence[Derivation | Skeletal]) -> Float[Tensor, "batch"]:  # type: ignore[override]
        """log p(tree | sentence) of one tree for each sentence; differentiable. -inf for impossible trees."""
        if len(trees) != self.leaf.shape[1]:
            raise InputError(
                f"log_prob of {len(trees)} trees: expected one for each of {self.leaf.shape[1]} sentences."
            )
        sizes = [self.leaf.shape[0]] * len(trees) if self.lengths is None else self.lengths.tolist()
        for number, (tree, size) in enumerate(zip(trees, sizes, strict=True), 1):
            if not isinstance(tree, Derivation | Skeletal):
                raise InputError(
                    f"tree {number} is {show(tree)}: expected a derivation or a skeletal tree, as `skeletal` makes one."
                )
            if tree.nodes and tree.nodes[0].width > size:
                raise InputError(f"tree {number} has {tree.nodes[0].width} words: expected the {size} of its sentence.")
        weight = self.log_weight(trees)
        return torch.where(weight > -torch.inf, weight - self._log_z(), -torch.inf)

    def log_weight(self, trees: Sequence[Derivation | Skeletal]) -> Float[Tensor, "batch"]:
        """log of the weight of one tree for each sentence, without the constant; differentiable."""
        weight = self._log_z(only(trees, self.symbol, self.leaf))
        if isinstance(self.form, CPForm) and any(isinstance(tree, Derivation) for tree in trees):
            # These are one term at each node, and not all of them.
            each = [
                self._weight(self.form, tree.nodes, sentence) if isinstance(tree, Derivation) else weight[sentence]
                for sentence, tree in enumerate(trees)
            ]
            weight = torch.stack(each)
        return weight

    def part(self, sentences: Int[Tensor, "some"]) -> "TreeDistribution":
        """The distribution over the trees of some sentences."""
        if isinstance(self.form, CFG):
            raise InputError("a distribution with parameters for each sentence cannot be divided.")
        lengths, constant = (x if x is None else x.index_select(0, sentences) for x in (self.lengths, self.constant))
        return TreeDistribution(self.form, self.leaf.index_select(1, sentences), lengths, self.symbol, constant)

    def _plain(self, form: FastForm) -> FastForm:
        return form.with_tensors([tensor.detach() for tensor in form.tensors])

    def _log_z(self, allowed: Allowed | None = None) -> Tensor:
        """Of all trees or of those that are allowed, without the constant."""
        if not isinstance(self.form, CFG):
            return log_partition(self.form, self.leaf, self.lengths, allowed)[0]
        semiring, grammar, words = self._for_sums()
        weights = None if allowed is None else textbook.only_allowed(semiring, words, allowed)
        return semiring.unconvert(textbook.inside(semiring, grammar, words, self.lengths, weights)[0])

    def _textbook_marginals(self) -> Marginals:
        semiring, grammar, words = self._for_sums()
        log_z, top, bottom = textbook.marginals(grammar, words, self.lengths, semiring)
        sign = (log_z > -torch.inf).to(log_z.dtype)
        if semiring is Signed:
            with torch.no_grad():
                sign = textbook.inside(semiring, grammar, words, self.lengths)[0][0].sign()
        return Marginals(log_z, sign, top.to(self.leaf.dtype), bottom.to(self.leaf.dtype))

    def _textbook(self) -> tuple[CFG, Tensor]:
        """The grammar and the words, in ordinary numbers, for textbook charts."""
        if self._differentiable:  # computed anew, so that no two results share a graph
            return self._converted()
        key = "textbook", False
        if key not in self._known:
            self._known[key] = self._converted()
        grammar, words = self._known[key]
        return grammar, words

    def _converted(self) -> tuple[CFG, Tensor]:
        grammar = self.form if isinstance(self.form, CFG) else as_textbook(self.form, by_rule=False)
        return grammar.change(torch.Tensor.double), self.leaf.transpose(0, 1).double()

    def _for_sums(self) -> tuple[Semiring, CFG, Tensor]:
        if any(bool((tensor < 0).any()) for tensor in self._everything()):
            return Signed, *self._textbook()
        return Log, *self._in_logarithms()

    def _best(self, k: int) -> list[list[Derivation]]:
        with torch.no_grad():
            grammar, words = self._in_logarithms()
        return [_as_derivations(some) for some in KBest(grammar, words, self.lengths, k).derivations]

    def _drawn_in_logarithms(self, samples: int, generator: torch.Generator | None) -> list[list[Derivation]]:
        with torch.no_grad():
            grammar, words = self._in_logarithms()
        terms = self.form.lanes if isinstance(self.form, CPForm) else 0
        chart = MarkedChart(Sampled(generator), grammar, words, self.lengths, terms)
        drawn = [_as_derivations(chart.derivations(last=number + 1 == samples)) for number in range(samples)]
        return [list(of_sentence) for of_sentence in zip(*drawn, strict=True)]

    def _weight(self, form: CPForm, nodes: Sequence[Node], sentence: int) -> Tensor:
        """log of the product of the factors that a derivation of a CP form uses."""
        u, inner, outer = form.weights
        both = torch.cat([inner, outer])  # [states, 2 rank]
        rank = len(u)
        factors = [form.root[nodes[0].top]] if nodes else [self.leaf.new_zeros(())]
        waiting: list[tuple[int, int]] = []  # rank above and side, for nodes to come
        for node in nodes:
            if waiting:
                above, side = waiting.pop()
                factors.append(both[node.top, above + side * rank])
            if form.closure is not None and form.promotion is not None:
                step = form.closure if node.split else form.promotion
                first = 0 if node.split else form.interminals
                if node.top < form.interminals:
                    factors.append(step[node.bottom - first, node.top])
            if node.split:
                assert node.rank is not None
                factors.append(u[node.rank, node.bottom])
                waiting += [(node.rank, 1), (node.rank, 0)]
            else:
                factors.append(self.leaf[node.start, sentence, node.bottom - form.interminals])
        return safe_log(torch.stack(factors).to(torch.float64)).sum()


register_kl(TreeDistribution, TreeDistribution)(TreeDistribution.kl)


class SentCFG(TreeDistribution):
    """A dense PCFG given by log-potentials, as torch-struct's: terms [batch, length, T], -inf for what is impossible.

    Rules and roots are shared by the batch, [NT, NT + T, NT + T] and [NT], or those of each sentence, with `batch` in
    front. Shared ones are faster. Where float32 could not hold the smallest and the largest potentials together, all
    is computed in float64.
    """

    def __init__(
        self, terms: Tensor, rules: Tensor, roots: Tensor, lengths: Sequence[int] | Tensor | None = None
    ) -> None:
        for name, given in (("terms", terms), ("rules", rules), ("roots", roots)):
            if not isinstance(given, Tensor) or not given.is_floating_point():
                raise InputError(
                    f"{name} are {show(given)}: expected a tensor of log-potentials, floating-point numbers."
                )
            if given.device != terms.device:
                raise InputError(f"{name} are on {given.device} and terms on {terms.device}: expected one device.")
        dtype = torch.promote_types(torch.promote_types(terms.dtype, rules.dtype), roots.dtype)
        terms, rules, roots = terms.to(dtype), rules.to(dtype), roots.to(dtype)
        if terms.dim() != 3 or rules.dim() not in (3, 4) or roots.dim() not in (1, 2):
            shapes = [tuple(x.shape) for x in (terms, rules, roots)]
            raise InputError(
                f"terms, rules and roots have the shapes {shapes}: expected [batch, length, T], "
                "[(batch,) NT, NT + T, NT + T] and [(batch,) NT]."
            )
        (batch, length, outer), inner = terms.shape, roots.shape[-1]
        for name, given, shape in (("rules", rules, (inner, inner + outer, inner + outer)), ("roots", roots, (inner,))):
            expected = shape if given.dim() == len(shape) else (batch, *shape)
            if given.shape != expected:
                raise InputError(f"{name} have the shape {tuple(given.shape)}: expected {expected}.")
        if not (batch and length and outer and inner):
            shapes = [tuple(x.shape) for x in (terms, rules, roots)]
            raise InputError(f"terms, rules and roots have the shapes {shapes}: expected no dimension of size 0.")
        lengths = checked_lengths(lengths, batch, length, terms.device)
        # Every tree of n words has n - 1 binary rules, so a factor of all rules is a factor of all trees.
        rule, root = largest(rules.flatten(-3), -1), largest(roots, -1)
        others = rules - rule.unsqueeze(-1).unsqueeze(-1), roots - root
        (leaf, weights, tops), constant = exponentials(terms, *others, lengths=lengths)
        sizes = torch.as_tensor(length if lengths is None else lengths, device=terms.device)
        constant = constant + (sizes - 1) * rule.squeeze(-1) + root.squeeze(-1)
        tops = torch.nn.functional.pad(tops, (0, outer))
        shared = rules.dim() == 3 and roots.dim() == 1
        form = dense_form(tops, weights) if shared else CFG(tops, (Rules.from_tensor(weights),))
        super().__init__(form, leaf.transpose(0, 1), lengths, constant=constant)


def _as_derivations(trees: Sequence[Sequence[Node] | None]) -> list[Derivation]:
    return [Derivation(tuple(tree or ())) for tree in trees]


class ModelTrees(TreeDistribution):
    """The trees of some sentences, of any lengths, under a model."""

    def __init__(self, model: Model, sentences: Iterable[Iterable[str]]) -> None:
        grammar = model.grammar
        tokens, lengths = encoded(model.lexicon, sentences, grammar.root.device)
        leaf = grammar.lexical.values_of(tokens).transpose(0, 1)
        self.model = model
        super().__init__(form(grammar), leaf, lengths, grammar.symbol_of_state.tolist())

    def skeletal(self, tree: Tree) -> Skeletal:
        """A treebank tree as the skeletal tree that this model gives a probability to."""
        return skeletal(self.model, tree)


def encoded(
    lexicon: Lexicon, sentences: Iterable[Iterable[str]], device: torch.device
) -> tuple[Tokens, Int[Tensor, "batch"] | None]:
    """The words, [batch, length], and the lengths of sentences, if they differ."""
    sentences = sentences_of(sentences)
    if not sentences:
        raise InputError("a distribution over trees needs sentences of a word or more.")
    lengths = [len(words) for words in sentences]
    tokens = lexicon.tokens(sentences).padded(lengths).to(device)
    return tokens, torch.tensor(lengths, device=device) if len({*lengths}) > 1 else None


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
