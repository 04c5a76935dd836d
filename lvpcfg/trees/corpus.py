"""The embedded treebank: Penn-style trees drawn from a feature grammar, features erased.

`corpus.grammar` beside this file is a hand-written grammar of a small English with agreement,
subcategorisation, attachment preferences, coordination of like with like and relative clauses.
The trees show none of its features, so a treebank PCFG cannot tell "saw the man with the telescope"
from "saw the man with the beard"; a grammar with latent states can.

The same trees come out everywhere: the only source of chance is `random.Random(seed).random()`,
whose sequence Python promises not to change, and all weights are whole numbers.
"""

import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import pairwise
from random import Random
from typing import TypeVar

from nltk.tree import Tree

from lvpcfg.errors import expect
from lvpcfg.trees.normalise import TRACE_TAG
from lvpcfg.trees.walk import preorder, rebuild, tagged_words

SEED = 1
SIZES = {"train": 2000, "dev": 250, "test": 250}
LONGEST = 40
COINED = 15  # one in so many words of an open class is coined on the spot

_Drawn = TypeVar("_Drawn")
Features = tuple[str, ...]
Category = tuple[str, Features]
Weighted = list[tuple[str, int]]


def corpus(split: str, features: bool = False) -> list[Tree]:
    """The trees of "train", "dev" or "test".

    With `features`, labels have the features that are otherwise erased: NP~SBJ.sg.person in place of NP-SBJ.
    """
    expect("the split of the embedded corpus", split, tuple(SIZES))
    show = _with_features if features else _without_features
    return [rebuild(tree, lambda node, children: Tree(show(node.label()), children)) for tree in _sample()[split]]


@dataclass(frozen=True)
class _Rule:
    weight: int
    left: Features  # values, and ?variables
    right: tuple[Category | Tree, ...]  # a Tree is a fixed word under its tag


@dataclass(frozen=True)
class _FeatureGrammar:
    variables: dict[str, Weighted]
    rules: dict[str, list[_Rule]]
    words: dict[Category, Weighted]
    endings: dict[Category, Weighted]


@cache
def _sample() -> dict[str, list[Tree]]:
    sampler = _Sampler(_read(files(__package__).joinpath("corpus.grammar").read_text("utf-8")), Random(SEED))
    return {split: [sampler.sentence() for _ in range(size)] for split, size in SIZES.items()}


class _Sampler:
    def __init__(self, grammar: _FeatureGrammar, random: Random) -> None:
        self.grammar, self.random = grammar, random
        self.found: dict[Category, list[tuple[tuple[_Rule, dict[str, str]], int]]] = {}

    def sentence(self) -> Tree:
        while True:
            tree = Tree("", list(self.expand("ROOT", ())[0]))
            spoken = [word for word, tag in tagged_words(tree) if tag != TRACE_TAG]
            if len(spoken) <= LONGEST:
                return _spelled(tree)

    def expand(self, name: str, features: Features) -> list[Tree]:
        if name not in self.grammar.rules:
            return [self.preterminal(name, features)]
        rule, bound = self.draw(self.fitting(name, features))
        binding = dict(bound)
        children: list[Tree] = []
        for item in rule.right:
            if isinstance(item, Tree):
                children.append(Tree(item.label(), [binding.get(item[0], item[0])]))
                continue
            for value in item[1]:
                if value.startswith("?") and value not in binding:
                    binding[value] = self.draw(self.grammar.variables[value])
            children += self.expand(item[0], tuple(binding.get(value, value) for value in item[1]))
        return children if name.startswith("_") else [Tree(_joined(name, features), children)]

    def fitting(self, name: str, features: Features) -> list[tuple[tuple[_Rule, dict[str, str]], int]]:
        """The rules whose left-hand side agrees with the features, what it binds, and their weights."""
        if (name, features) not in self.found:
            bound = [(rule, _bind(rule.left, features)) for rule in self.grammar.rules[name]]
            self.found[name, features] = [
                ((rule, binding), rule.weight) for rule, binding in bound if binding is not None
            ]
        return self.found[name, features]

    def preterminal(self, name: str, features: Features) -> Tree:
        if name == "noun":
            number, noun_class = features
            lemma = self.word(name, (noun_class,))
            word, tag = (lemma.partition("/")[0], "NN") if number == "sg" else (_plural(lemma), "NNS")
        elif name == "verb":
            tag, verb_class = features
            word = _conjugated(self.word(name, (verb_class,)), tag)
        else:
            word, tag = self.word(name, features), "JJ" if name == "adj" else name
        return Tree(_joined(tag, features), [word])

    def word(self, name: str, features: Features) -> str:
        if (name, features) in self.grammar.endings and self.random.random() * COINED < 1:
            stem = self.word("syllable", ()) + self.word("syllable", ())
            word = stem + self.draw(self.grammar.endings[name, features])
            return word.capitalize() if name == "NNP" else word
        return self.draw(self.grammar.words[name, features])

    def draw(self, weighted: list[tuple[_Drawn, int]]) -> _Drawn:
        ticket = int(self.random.random() * sum(weight for _, weight in weighted))
        for value, weight in weighted:
            ticket -= weight
            if ticket < 0:
                return value
        raise AssertionError("random() is below 1")


def _bind(left: Features, features: Features) -> dict[str, str] | None:
    """What the variables on the left stand for, or None where the features do not agree."""
    if len(left) != len(features):
        return None
    binding: dict[str, str] = {}
    for pattern, value in zip(left, features, strict=True):
        if pattern.startswith("?"):
            if binding.setdefault(pattern, value) != value:
                return None
        elif pattern != value:
            return None
    return binding


def _read(text: str) -> _FeatureGrammar:
    grammar = _FeatureGrammar({}, {}, {}, {})
    for line in text.split("\n"):
        if not line or line.startswith("#"):
            continue
        head, *rest = line.split()
        if rest[:1] == ["="]:
            grammar.variables[head] = _weighted(rest[1:])
        elif head == "ending":
            grammar.endings[_category(rest[0].rstrip(":"))] = _weighted(rest[1:])
        elif head.isdecimal():
            name, features = _category(rest[0])
            items = tuple(
                Tree(item.partition(":")[0], [item.partition(":")[2]]) if ":" in item else _category(item)
                for item in rest[2:]  # behind the arrow
            )
            grammar.rules.setdefault(name, []).append(_Rule(int(head), features, items))
        else:
            grammar.words[_category(head.rstrip(":"))] = _weighted(rest)
    return grammar


def _category(text: str) -> Category:
    name, _, features = text.rstrip("}").partition("{")
    return name, tuple(features.split(",")) if features else ()


def _weighted(items: list[str]) -> Weighted:
    """`word*weight`, or words alone, commonest first: then the weights fall off as in Zipf's law."""
    if not any("*" in item for item in items):
        return [(item, 1 + 120 // (rank + 2)) for rank, item in enumerate(items)]
    return [(item.partition("*")[0], int(item.partition("*")[2] or 1)) for item in items]


def _joined(name: str, features: Features) -> str:
    return f"{name}{{{','.join(features)}}}"


def _without_features(label: str) -> str:
    return re.split(r"[/{]", label)[0]


def _with_features(label: str) -> str:
    """NP-SBJ{sg,person} -> NP~SBJ.sg.person: nothing in it is taken for a function tag."""
    if label.startswith("-"):
        return label
    category, *marks = [part for part in re.split(r"[-/{},]", label) if part] or [label]
    return "~".join([category, ".".join(marks)]) if marks else category


def _spelled(tree: Tree) -> Tree:
    """Capitalises the first word, and writes "an" before a vowel."""
    leaves = [node for node in preorder(tree) if isinstance(node[0], str) and node.label() != TRACE_TAG]
    for node, following in pairwise(leaves):
        if node[0] == "a" and following[0][0] in "aeiou":
            node[0] = "an"
    first = next(node for node in leaves if node[0][0].isalpha())
    first[0] = first[0][0].upper() + first[0][1:]
    return tree


def _plural(lemma: str) -> str:
    singular, _, plural = lemma.partition("/")
    return plural or _with_s(singular)


def _with_s(word: str) -> str:
    if re.search(r"[^aeiou]y$", word):
        return word[:-1] + "ies"
    return word + ("es" if re.search(r"(s|x|z|ch|sh)$", word) else "s")


def _conjugated(lemma: str, form: str) -> str:
    """The VB, VBZ, VBP, VBD, VBN or VBG of base/past/participle/-ing, regular where not given."""
    base, past, participle, ing = [*lemma.split("/"), "", "", ""][:4]
    if form in ("VB", "VBP"):
        return base
    if form == "VBZ":
        return "goes" if base == "go" else _with_s(base)
    stem = base[:-1] if base.endswith("e") and not base.endswith("ee") else base
    if form == "VBG":
        return ing or ("dying" if base == "die" else stem + "ing")
    regular = base[:-1] + "ied" if re.search(r"[^aeiou]y$", base) else stem + "ed"
    return (past if form == "VBD" else participle) or regular
