"""Features of the nodes of skeletal trees: inside features phi, of what is below; outside features psi, of the rest.

Cohen, Stratos, Collins, Foster & Ungar 2013, section 4. A feature is a named function from all nodes of a treebank to a
value each: a whole number, -1 where there is none. Values of nodes of different symbols are different features. Add one
with `inside_feature` or `outside_feature`:

    @lvpcfg.inside_feature("width of the left child")
    def left_width(nodes):
        return nodes.of(nodes.left, nodes.length)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Int64
from torch import Tensor

from lvpcfg.errors import InputError, show
from lvpcfg.trees.heads import head_words
from lvpcfg.trees.lexicon import Lexicon
from lvpcfg.trees.treebank import Treebank

RARE = 5  # words that occur no more often are told apart by their classes alone


@dataclass(frozen=True, eq=False)
class Values:
    """The value of each node, -1 for none, and how to write down that of one node."""

    number: Int64[Tensor, "nodes"]
    text: Callable[[int], str]


Feature = Callable[["Nodes"], "Values | Int64[Tensor, 'nodes']"]
INSIDE: dict[str, Feature] = {}
OUTSIDE: dict[str, Feature] = {}


def inside_feature(name: str) -> Callable[[Feature], Feature]:
    """Registers a function of what is below nodes under a name, as a decorator."""
    return _register(INSIDE, name)


def outside_feature(name: str) -> Callable[[Feature], Feature]:
    """Registers a function of what is around nodes under a name, as a decorator."""
    return _register(OUTSIDE, name)


def _register(features: dict[str, Feature], name: str) -> Callable[[Feature], Feature]:
    def decorate(function: Feature) -> Feature:
        if features.setdefault(name, function) is not function:
            raise InputError(f"there is a feature {show(name)} already: choose another name.")
        return function

    return decorate


def values_of(names: Sequence[str] | None, features: dict[str, Feature], nodes: "Nodes") -> dict[str, Values]:
    """Those of the features of these names; of all, where none are named."""
    for name in names or ():
        if name not in features:
            raise InputError(f"there is no feature {show(name)}: expected some of {', '.join(features)}.")
    found = {}
    for name in features if names is None else names:
        values = features[name](nodes)
        values = values if isinstance(values, Values) else nodes.numbers(values)
        if not isinstance(values.number, torch.Tensor):
            raise InputError(
                f"the feature {show(name)} is {show(values.number)}: expected a tensor, a value for each node."
            )
        if values.number.shape != nodes.symbol.number.shape:
            raise InputError(
                f"the feature {show(name)} has {tuple(values.number.shape)} values: expected one for each of "
                f"{len(nodes.symbol.number)} nodes."
            )
        found[name] = values
    return found


def joined(*parts: Values) -> Values:
    """One value for several; none, where one of them is missing."""
    number, known = parts[0].number, parts[0].number >= 0
    for part in parts[1:]:
        known = known & (part.number >= 0)
        number = torch.unique(number * (int(part.number.max()) + 2) + part.number, return_inverse=True)[1]
    return Values(torch.where(known, number, -1), lambda node: ", ".join(part.text(node) for part in parts))


@dataclass(frozen=True, eq=False)
class Nodes:
    """All nodes of a treebank, for features to look at."""

    treebank: Treebank
    lexicon: Lexicon

    # Other nodes, -1 where there is none

    @property
    def left(self) -> Int64[Tensor, "nodes"]:
        """The left child, or the only one."""
        return self.treebank.left

    @property
    def right(self) -> Int64[Tensor, "nodes"]:
        return self.treebank.right

    @cached_property
    def parent(self) -> Int64[Tensor, "nodes"]:
        parent = torch.full_like(self.left, -1)
        for child in (self.left, self.right):
            has = child >= 0
            parent[child[has]] = has.nonzero().squeeze(1)
        return parent

    @cached_property
    def head(self) -> Int64[Tensor, "nodes"]:
        """The preterminal of the head word."""
        return head_words(self.treebank)

    @cached_property
    def other_head(self) -> Int64[Tensor, "nodes"]:
        """The head of the first node above that has another one."""
        found, above = torch.full_like(self.head, -1), self.parent
        while bool((above >= 0).any()):
            head = torch.where(above >= 0, self.head[above], -1)
            other = (above >= 0) & (head != self.head)
            found = torch.where(other, head, found)
            above = torch.where(other | (above < 0), -1, self.parent[above])
        return found

    # Values

    def of(self, others: Int64[Tensor, "nodes"], values: Values) -> Values:
        """The values of other nodes; none, where there is no other node."""
        number = torch.where(others >= 0, values.number[others], -1)
        return Values(number, lambda node: values.text(int(others[node])))

    def numbers(self, number: Int64[Tensor, "nodes"]) -> Values:
        return Values(number, lambda node: str(int(number[node])))

    def of_phrases(self, values: Values) -> Values:
        """None at preterminals."""
        return Values(torch.where(self.treebank.is_lexical, -1, values.number), values.text)

    @cached_property
    def symbol(self) -> Values:
        symbol, names = self.treebank.symbol, self.treebank.symbols.names
        return Values(symbol, lambda node: names[symbol[node]])

    @cached_property
    def side(self) -> Int64[Tensor, "nodes"]:
        """0 for a left or only child, 1 for a right one."""
        side = torch.where(self.parent >= 0, 0, -1)
        side[self.right[self.right >= 0]] = 1
        return side

    @cached_property
    def rule(self) -> Values:
        """The rule below a phrase."""
        bank, binary = self.treebank, len(self.treebank.binary_rules)
        number = torch.where(bank.is_binary, bank.rule, torch.where(bank.is_unary, bank.rule + binary, -1))

        def text(node: int) -> str:
            children = (child for child in (int(bank.left[node]), int(bank.right[node])) if child >= 0)
            return f"{self.symbol.text(node)} -> {' '.join(map(self.symbol.text, children))}"

        return Values(number, text)

    @cached_property
    def rule_above(self) -> Values:
        """The rule of the parent, in which the node is marked."""
        rule, side = self.of(self.parent, self.rule), self.side

        def text(node: int) -> str:
            parent, *children = rule.text(node).replace("-> ", "").split(" ")
            children[int(side[node])] += "*"
            return f"{parent} -> {' '.join(children)}"

        return Values(joined(rule, self.numbers(side)).number, text)

    @cached_property
    def two_rules_above(self) -> Values:
        return joined(self.rule_above, self.of(self.parent, self.rule_above))

    @cached_property
    def word(self) -> Values:
        """The word of a preterminal; of a rare one its class."""
        bank, lexicon = self.treebank, self.lexicon
        leaves = bank.is_lexical.nonzero().squeeze(1)
        word = bank.lexical_rules[bank.rule[leaves], 1]
        rare = (torch.bincount(word)[word] <= RARE).tolist()
        first = (bank.start[leaves] == 0).tolist()
        entry = torch.full_like(self.left, -1)
        entry[leaves] = torch.tensor(
            [
                lexicon.unknown(bank.words[number], begins) if is_rare else number
                for number, begins, is_rare in zip(word.tolist(), first, rare, strict=True)
            ]
        )
        names = (*lexicon.words, *lexicon.classes, "<unknown>")
        return Values(entry, lambda node: names[entry[node]])

    @cached_property
    def length(self) -> Values:
        """The number of words below."""
        return self.numbers(self.treebank.end - self.treebank.start)


# Inside


@inside_feature("rule")
def rule(nodes: Nodes) -> Values:
    return nodes.rule


@inside_feature("left child")
def left_child(nodes: Nodes) -> Values:
    return nodes.of(nodes.left, nodes.symbol)


@inside_feature("right child")
def right_child(nodes: Nodes) -> Values:
    return nodes.of(nodes.right, nodes.symbol)


@inside_feature("rule and left rule")
def left_rule(nodes: Nodes) -> Values:
    return joined(nodes.rule, nodes.of(nodes.left, nodes.rule))


@inside_feature("rule and right rule")
def right_rule(nodes: Nodes) -> Values:
    return joined(nodes.rule, nodes.of(nodes.right, nodes.rule))


@inside_feature("head tag")
def head_tag(nodes: Nodes) -> Values:
    return nodes.of_phrases(nodes.of(nodes.head, nodes.symbol))


@inside_feature("length")
def length(nodes: Nodes) -> Values:
    return nodes.of_phrases(nodes.length)


@inside_feature("word")
def word(nodes: Nodes) -> Values:
    return nodes.word


# Outside


@outside_feature("rule above")
def rule_above(nodes: Nodes) -> Values:
    return nodes.rule_above


@outside_feature("two rules above")
def two_rules_above(nodes: Nodes) -> Values:
    return nodes.two_rules_above


@outside_feature("three rules above")
def three_rules_above(nodes: Nodes) -> Values:
    return joined(nodes.rule_above, nodes.of(nodes.parent, nodes.two_rules_above))


@outside_feature("parent")
def parent(nodes: Nodes) -> Values:
    return nodes.of(nodes.parent, nodes.symbol)


@outside_feature("parent and grandparent")
def grandparent(nodes: Nodes) -> Values:
    above = nodes.of(nodes.parent, nodes.symbol)
    return joined(above, nodes.of(nodes.parent, above))


@outside_feature("other head tag")
def other_head_tag(nodes: Nodes) -> Values:
    return nodes.of(nodes.other_head, nodes.symbol)


@outside_feature("words to the left")
def words_to_the_left(nodes: Nodes) -> Values:
    return nodes.numbers(nodes.treebank.start)


@outside_feature("words to the right")
def words_to_the_right(nodes: Nodes) -> Values:
    bank = nodes.treebank
    return nodes.numbers(torch.repeat_interleave(bank.lengths, bank.roots[1:] - bank.roots[:-1]) - bank.end)
