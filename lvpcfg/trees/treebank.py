"""A whole treebank as arrays, which estimators use.

All nodes of all skeletal trees stand in one list, tree after tree, each tree in preorder; a
child is an index into that list. Symbols are numbered interminals first, then preterminals
(N = I + P in the papers); a label that serves as both is two symbols.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import torch
from nltk.tree import Tree
from torch import Tensor
from tqdm import tqdm

from lvpcfg.errors import InputError
from lvpcfg.trees.binarisation import RIGHT, Binarisation
from lvpcfg.trees.binarise import binarise
from lvpcfg.trees.brackets import garbage_collection_paused
from lvpcfg.trees.normalise import TOP, normalise
from lvpcfg.trees.walk import is_preterminal, preorder, trees_of


@dataclass(frozen=True)
class Symbols:
    """The nonterminals: `interminals` rewrite to symbols, `preterminals` to words."""

    interminals: tuple[str, ...]
    preterminals: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return self.interminals + self.preterminals

    def __len__(self) -> int:
        return len(self.interminals) + len(self.preterminals)


@dataclass(frozen=True, eq=False)
class Treebank:
    """Nodes of all trees as int64 tensors; -1 where a node has no such child.

    A node is binary (`left` and `right`), unary (`left` alone) or lexical (neither); `rule` is its
    row in `binary_rules`, `unary_rules` or `lexical_rules`. Spans are word positions
    start <= i < end within the sentence.
    """

    symbols: Symbols
    words: tuple[str, ...]  # the vocabulary, in the order of first occurrence
    binarisation: Binarisation
    symbol: Tensor  # [nodes]
    left: Tensor  # [nodes]
    right: Tensor  # [nodes]
    start: Tensor  # [nodes]
    end: Tensor  # [nodes]
    rule: Tensor  # [nodes]
    binary_rules: Tensor  # [rules, 3]: parent, left, right
    unary_rules: Tensor  # [rules, 2]: parent, child
    lexical_rules: Tensor  # [rules, 2]: preterminal, word
    roots: Tensor  # [trees + 1]: where each tree begins, and the number of nodes

    def __len__(self) -> int:
        return len(self.roots) - 1

    @property
    def is_binary(self) -> Tensor:
        return self.right >= 0

    @property
    def is_unary(self) -> Tensor:
        return (self.left >= 0) & (self.right < 0)

    @property
    def is_lexical(self) -> Tensor:
        return self.left < 0

    @property
    def lengths(self) -> Tensor:
        """[trees]: words in each sentence."""
        return self.end[self.roots[:-1]]

    def part(self, trees: Tensor) -> tuple["Treebank", Tensor]:
        """Some trees, with the symbols, rules and words of all; and which of all nodes are theirs."""
        first, sizes = self.roots[trees], self.roots[trees + 1] - self.roots[trees]
        roots = torch.nn.functional.pad(sizes.cumsum(0), (1, 0))
        moved = torch.repeat_interleave(first - roots[:-1], sizes)
        nodes = torch.arange(len(moved)) + moved
        columns = {name: getattr(self, name)[nodes] for name in ("symbol", "start", "end", "rule")}
        for name in ("left", "right"):
            child = getattr(self, name)[nodes]
            columns[name] = torch.where(child < 0, child, child - moved)
        return replace(self, roots=roots, **columns), nodes

    def to_trees(self) -> list[Tree]:
        """The binarised skeletal trees, TOP on each: the arrays hold all of them."""
        names, columns = self.symbols.names, (self.symbol, self.left, self.right, self.rule)
        symbol, left, right, rule = (column.tolist() for column in columns)
        word = self.lexical_rules[:, 1].tolist()
        nodes: list[Tree] = [None] * len(symbol)
        for i in range(len(symbol) - 1, -1, -1):  # children stand behind their parents
            if left[i] < 0:
                children = [self.words[word[rule[i]]]]
            else:
                children = [nodes[child] for child in (left[i], right[i]) if child >= 0]
            nodes[i] = Tree(names[symbol[i]], children)
        tops = [nodes[root] for root in self.roots[:-1].tolist()]
        return [tree if tree.label() == TOP and not is_preterminal(tree) else Tree(TOP, [tree]) for tree in tops]


def build_treebank(trees: Iterable[Tree], scheme: Binarisation = RIGHT, progress: bool = False) -> Treebank:
    """Normalises and binarises raw trees into one `Treebank`. Trees that have only traces are left out."""
    nodes = _Nodes()
    with garbage_collection_paused():
        for tree in tqdm(
            trees_of("a treebank", trees),
            desc="binarising",
            unit="tree",
            disable=None if progress else True,
            leave=False,
        ):
            normal = normalise(tree)
            if normal is not None:
                nodes.add(_below_top(binarise(normal, scheme)))
    if len(nodes.roots) == 1:
        raise InputError("there is no tree with words in the treebank: a grammar needs at least one.")
    symbols, number = _sorted_symbols(nodes.interminals, nodes.preterminals)
    symbol = number[torch.tensor(nodes.symbol)]
    left, right, word = (torch.tensor(column) for column in (nodes.left, nodes.right, nodes.word))
    rule = torch.full_like(symbol, -1)

    def distinct(at: Tensor, *parts: Tensor) -> Tensor:
        """The different rules of the nodes `at`, sorted; each node learns its row."""
        rows = torch.stack([part[at] for part in parts], dim=1)
        unique, index = np.unique(rows.numpy(), axis=0, return_inverse=True)
        rule[at] = torch.from_numpy(index.reshape(-1))
        return torch.from_numpy(unique)

    return Treebank(
        symbols=symbols,
        words=tuple(nodes.vocabulary),
        binarisation=scheme,
        symbol=symbol,
        left=left,
        right=right,
        start=torch.tensor(nodes.start),
        end=torch.tensor(nodes.end),
        binary_rules=distinct(right >= 0, symbol, symbol[left], symbol[right]),
        unary_rules=distinct((left >= 0) & (right < 0), symbol, symbol[left]),
        lexical_rules=distinct(left < 0, symbol, word),
        rule=rule,
        roots=torch.tensor(nodes.roots),
    )


class _Nodes:
    """The columns of a `Treebank` as they grow."""

    def __init__(self) -> None:
        self.interminals: dict[str, int] = {}
        self.preterminals: dict[str, int] = {}
        self.vocabulary: dict[str, int] = {}
        self.symbol: list[int] = []  # preterminals as -1 - number, until all interminals are known
        self.left: list[int] = []
        self.right: list[int] = []
        self.start: list[int] = []
        self.end: list[int] = []
        self.word: list[int] = []
        self.roots = [0]

    def add(self, tree: Tree) -> None:
        nodes, first, position = preorder(tree), self.roots[-1], 0
        for node in nodes:
            if is_preterminal(node):
                self.symbol.append(-1 - self.preterminals.setdefault(node.label(), len(self.preterminals)))
                self.word.append(self.vocabulary.setdefault(node[0], len(self.vocabulary)))
                self.start.append(position)
                position += 1
                self.end.append(position)
            else:
                self.symbol.append(self.interminals.setdefault(node.label(), len(self.interminals)))
                self.word.append(-1)
                self.start.append(position)
                self.end.append(-1)
        self.left.extend([-1] * len(nodes))
        self.right.extend([-1] * len(nodes))
        finished: list[int] = []  # constituents with no parent yet, the leftmost on top
        for here in range(first + len(nodes) - 1, first - 1, -1):
            if self.word[here] < 0:
                self.left[here] = last = finished.pop()
                if len(nodes[here - first]) == 2:
                    self.right[here] = last = finished.pop()
                self.end[here] = self.end[last]
            finished.append(here)
        self.roots.append(first + len(nodes))


def _below_top(tree: Tree) -> Tree:
    """TOP over one child is no symbol: the root distribution takes its place."""
    return tree[0] if len(tree) == 1 and isinstance(tree[0], Tree) else tree


def _sorted_symbols(interminals: Iterable[str], preterminals: Iterable[str]) -> tuple[Symbols, Tensor]:
    """Symbols in alphabetical order, and the new number of each old one (negative: from the end)."""
    inner, outer = list(interminals), list(preterminals)
    symbols = Symbols(tuple(sorted(inner)), tuple(sorted(outer)))
    inner_number = {name: i for i, name in enumerate(symbols.interminals)}
    outer_number = {name: len(inner) + i for i, name in enumerate(symbols.preterminals)}
    numbers = [inner_number[name] for name in inner] + [outer_number[name] for name in reversed(outer)]
    return symbols, torch.tensor(numbers, dtype=torch.int64)
