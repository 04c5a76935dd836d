"""EVALB (Sekine & Collins): labelled bracketing scores, number for number.

A sentence is its words and tags and a list of brackets over word positions. EVALB removes the words
whose tags are in DELETE_LABEL (punctuation), each tree by its own tags, so that a wrong punctuation
tag leaves two sentences of different lengths and the pair is dropped as an error. `f1_all`
therefore removes words from both trees by the gold tags, and counts every sentence; one whose other
words differ, or that has no parse at all, counts as having matched nothing.

One thing differs on purpose: a wrapper on top (no label, TOP or ROOT) is never a bracket, whatever
the parameters say.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

from nltk.tree import Tree

from lvpcfg.errors import InputError
from lvpcfg.evaluation.unlabelled import unlabelled_sentence_f1
from lvpcfg.trees.normalise import TRACE_TAG, WRAPPERS
from lvpcfg.trees.walk import is_preterminal, require_tags, require_tree, trees_of

Pairs = frozenset[tuple[str, str]]
VALID, ERROR, SKIP = 0, 1, 2


@dataclass(frozen=True)
class Parameters:
    """What an EVALB parameter file sets; the defaults are those of COLLINS.prm."""

    labeled: bool = True
    cutoff: int = 40
    delete: frozenset[str] = frozenset({"TOP", "-NONE-", ",", ":", "``", "''", "."})
    delete_for_length: frozenset[str] = frozenset({"-NONE-"})
    equal_labels: Pairs = frozenset({("ADVP", "PRT"), ("PRT", "ADVP")})
    equal_words: Pairs = frozenset()


COLLINS = Parameters()


@dataclass(frozen=True)
class Sentence:
    """The words and tags of a sentence and its brackets (label, start, end), outermost first."""

    words: list[str]
    tags: list[str]
    brackets: list[tuple[str, int, int]]

    def without(self, removed: Sequence[bool]) -> "Sentence":
        """The sentence without some of its words, and without the brackets that leaves empty."""
        position = [0, *accumulate(not gone for gone in removed)]
        return Sentence(
            [word for word, gone in zip(self.words, removed, strict=True) if not gone],
            [tag for tag, gone in zip(self.tags, removed, strict=True) if not gone],
            [
                (label, position[start], position[end])
                for label, start, end in self.brackets
                if position[start] < position[end]
            ],
        )


@dataclass(frozen=True)
class Row:
    """One line of EVALB's table."""

    number: int
    length: int
    status: int
    matched: int = 0
    gold: int = 0
    test: int = 0
    crossing: int = 0
    words: int = 0
    tags: int = 0
    message: str = ""


@dataclass(frozen=True)
class Summary:
    """EVALB's summary of some sentences; percentages, but for the counts and `average_crossing`."""

    sentences: int
    errors: int
    skipped: int
    recall: float
    precision: float
    f1: float
    complete_match: float
    average_crossing: float
    no_crossing: float
    two_or_less_crossing: float
    tagging_accuracy: float

    @property
    def valid(self) -> int:
        return self.sentences - self.errors - self.skipped


@dataclass(frozen=True)
class Scores:
    rows: list[Row]
    all: Summary
    short: Summary  # sentences of up to `cutoff` words
    f1_all: float  # punctuation removed by the gold tags, no sentence dropped
    unlabelled_sentence_f1: float
    cutoff: int

    def figures(self) -> dict[str, float]:
        """The numbers of `result.json`."""
        return {
            "precision": self.all.precision,
            "recall": self.all.recall,
            "f1": self.all.f1,
            "f1_40": summarise([row for row in self.rows if row.length <= 40]).f1,
            "f1_all": self.f1_all,
            "unlabelled_sentence_f1": self.unlabelled_sentence_f1,
            "tagging_accuracy": self.all.tagging_accuracy,
            "complete_match": self.all.complete_match,
            "sentences": self.all.sentences,
            "errors": self.all.errors,
            "skipped": self.all.skipped,
        }


def evaluate(gold: Sequence[Tree], test: Sequence[Tree | None], parameters: Parameters = COLLINS) -> Scores:
    """Scores test trees against gold trees, pair by pair; None, or a tree without words, is a failed parse."""
    pairs = {"gold": trees_of("gold", gold), "test": trees_of("test", test)}
    for tree in (*pairs["gold"], *(tree for tree in pairs["test"] if tree is not None)):
        require_tree(tree)
    tests = [sentence([] if tree is None else [tree]) for tree in pairs["test"]]
    return score([sentence([tree]) for tree in pairs["gold"]], tests, parameters)


def score(gold: Sequence[Sentence], test: Sequence[Sentence], parameters: Parameters = COLLINS) -> Scores:
    if len(gold) != len(test):
        raise InputError(
            f"there are {len(gold)} gold and {len(test)} test sentences: expected one test tree for each "
            "gold tree, with an empty line where a sentence has no parse."
        )
    if not gold:
        raise InputError("there is no gold sentence to score against.")
    pairs = list(zip(gold, test, strict=True))
    rows = [_row(number, one, other, parameters) for number, (one, other) in enumerate(pairs, start=1)]
    return Scores(
        rows=rows,
        all=summarise(rows),
        short=summarise([row for row in rows if row.length <= parameters.cutoff]),
        f1_all=_f1_all(pairs, rows, parameters),
        unlabelled_sentence_f1=unlabelled_sentence_f1(pairs),
        cutoff=parameters.cutoff,
    )


def sentence(forest: Iterable[Tree]) -> Sentence:
    """The words and brackets of one sentence, given as one tree or as several side by side."""
    words: list[str] = []
    tags: list[str] = []
    brackets: list[tuple[str, int, int]] = []
    todo: list[Tree | int] = _without_wrappers(forest)[::-1]  # a number closes that bracket
    while todo:
        item = todo.pop()
        if isinstance(item, int):
            label, start, _ = brackets[item]
            brackets[item] = (label, start, len(words))
        elif is_preterminal(item):
            words.append(item[0])
            tags.append(item.label())
        else:
            require_tags(item)
            todo.append(len(brackets))
            brackets.append((evalb_label(item.label()), len(words), -1))
            todo.extend(reversed(item))
    return Sentence(words, tags, brackets)


@cache
def evalb_label(label: str) -> str:
    """The label up to its first - or =."""
    return label.partition("-")[0].partition("=")[0]


def _without_wrappers(forest: Iterable[Tree]) -> list[Tree]:
    roots: list[Tree] = []
    todo = list(forest)[::-1]
    while todo:
        tree = todo.pop()
        if isinstance(tree, Tree) and tree.label() in WRAPPERS and not is_preterminal(tree):
            require_tags(tree)
            todo.extend(reversed(tree))
        else:
            roots.append(tree)
    return roots


def _row(number: int, gold: Sentence, test: Sentence, parameters: Parameters) -> Row:
    length = sum(tag not in parameters.delete_for_length for tag in gold.tags)
    gold = _reduced(gold, gold.tags, parameters)
    test = _reduced(test, test.tags, parameters)
    if not test.words:
        return Row(number, length, SKIP)
    if len(gold.words) != len(test.words):
        return Row(number, length, ERROR, message=f"Length unmatch ({len(gold.words)}|{len(test.words)})")
    for one, other in zip(gold.words, test.words, strict=True):
        if not _equal(one, other, parameters.equal_words):
            return Row(number, length, ERROR, message=f"Words unmatch ({one}|{other})")
    gold_spans = {(start, end) for _, start, end in gold.brackets}
    return Row(
        number,
        length,
        VALID,
        matched=_matched(gold, test, parameters),
        gold=len(gold.brackets),
        test=len(test.brackets),
        crossing=sum(_crosses(start, end, gold_spans) for _, start, end in test.brackets),
        words=len(gold.words),
        tags=sum(_equal(one, other, parameters.equal_labels) for one, other in zip(gold.tags, test.tags, strict=True)),
    )


def _reduced(sentence: Sentence, tags: Sequence[str], parameters: Parameters) -> Sentence:
    """Without the words whose `tags` are deleted, and without deleted and empty brackets."""
    kept = sentence.without([tag in parameters.delete for tag in tags])
    brackets = [bracket for bracket in kept.brackets if not _is_deleted(bracket[0], parameters)]
    return Sentence(kept.words, kept.tags, brackets)


def _is_deleted(label: str, parameters: Parameters) -> bool:
    return any(_equal(label, deleted, parameters.equal_labels) for deleted in parameters.delete)


def _matched(gold: Sentence, test: Sentence, parameters: Parameters) -> int:
    """Each gold bracket takes the first free test bracket with its span and an equal label."""
    free: dict[tuple[int, int], list[str]] = {}
    for label, start, end in test.brackets:
        free.setdefault((start, end), []).append(label)
    matched = 0
    for label, start, end in gold.brackets:
        candidates = free.get((start, end), [])
        for i, candidate in enumerate(candidates):
            if not parameters.labeled or _equal(label, candidate, parameters.equal_labels):
                del candidates[i]
                matched += 1
                break
    return matched


def _crosses(start: int, end: int, spans: set[tuple[int, int]]) -> bool:
    if (start, end) in spans:  # gold brackets are nested, so one of them crosses no other
        return False
    return any(a < start < b < end or start < a < end < b for a, b in spans)


def _equal(one: str, other: str, pairs: Pairs) -> bool:
    return one == other or (one, other) in pairs


def _f1_all(pairs: Sequence[tuple[Sentence, Sentence]], rows: Sequence[Row], parameters: Parameters) -> float:
    matched = golds = tests = 0
    for (gold, test), row in zip(pairs, rows, strict=True):
        if TRACE_TAG in parameters.delete:
            gold, test = (side.without([tag == TRACE_TAG for tag in side.tags]) for side in (gold, test))
        alike = len(gold.words) == len(test.words) and all(
            tag in parameters.delete or _equal(one, other, parameters.equal_words)
            for one, other, tag in zip(gold.words, test.words, gold.tags, strict=True)
        )
        if alike:
            gold, test = (_reduced(side, gold.tags, parameters) for side in (gold, test))
            matched += _matched(gold, test, parameters)
            golds, tests = golds + len(gold.brackets), tests + len(test.brackets)
        elif row.status == VALID:  # punctuation was left out: EVALB's own count stands
            matched, golds, tests = matched + row.matched, golds + row.gold, tests + row.test
        else:
            golds += len(_reduced(gold, gold.tags, parameters).brackets)
            tests += len(_reduced(test, test.tags, parameters).brackets)
    return _f1(percent(matched, golds), percent(matched, tests))


def add_up(rows: Iterable[Row]) -> Row:
    """The counts of some rows, added up."""
    names = ("matched", "gold", "test", "crossing", "words", "tags")
    return Row(0, 0, VALID, **{name: sum(getattr(row, name) for row in rows) for name in names})


def summarise(rows: Sequence[Row]) -> Summary:
    valid = [row for row in rows if row.status == VALID]
    total = add_up(valid)
    recall, precision = percent(total.matched, total.gold), percent(total.matched, total.test)
    return Summary(
        sentences=len(rows),
        errors=sum(row.status == ERROR for row in rows),
        skipped=sum(row.status == SKIP for row in rows),
        recall=recall,
        precision=precision,
        f1=_f1(recall, precision),
        complete_match=percent(sum(row.matched == row.gold == row.test for row in valid), len(valid)),
        average_crossing=total.crossing / len(valid) if valid else 0.0,
        no_crossing=percent(sum(row.crossing == 0 for row in valid), len(valid)),
        two_or_less_crossing=percent(sum(row.crossing <= 2 for row in valid), len(valid)),
        tagging_accuracy=percent(total.tags, total.words),
    )


def percent(part: int, whole: int) -> float:
    return 100.0 * part / whole if whole else 0.0


def _f1(recall: float, precision: float) -> float:
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0
