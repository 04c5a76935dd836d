"""EVALB's files: parameters and sentences in, its report out, to the letter (but 0.00 for its nan)."""

import re

from lvpcfg.errors import InputError, show
from lvpcfg.evaluation.evalb import COLLINS, VALID, Pairs, Parameters, Scores, Sentence, add_up, percent, sentence
from lvpcfg.files import PathLike, read_text
from lvpcfg.trees.brackets import COMMENT, trees_from_text

WORDLESS = re.compile(r"\(\s*[^\s()]*|[\s)]", re.ASCII)  # brackets and labels
NUMBERS = ("DEBUG", "MAX_ERROR", "CUTOFF_LEN", "LABELED")
KEYWORDS = dict.fromkeys((*NUMBERS, "DELETE_LABEL", "DELETE_LABEL_FOR_LENGTH"), 1) | {"EQ_LABEL": 2, "EQ_WORD": 2}
RULE = "=" * 76
HEADER = [
    "  Sent.                        Matched  Bracket   Cross        Correct Tag",
    " ID  Len.  Stat. Recal  Prec.  Bracket gold test Bracket Words  Tags Accracy",
    RULE,
]


def read_sentences(path: PathLike) -> list[Sentence]:
    """The sentences of a bracket file: one a line, an empty line or (()) for a failed parse.

    A file whose lines are not trees by themselves is read as trees over several lines.
    """
    text = read_text(path)
    lines = [line for line in text.removesuffix("\n").split("\n") if not COMMENT.match(line)]
    try:
        return [sentence([] if _is_failure(line) else trees_from_text(line)) for line in lines]
    except InputError:
        return [sentence([tree]) for tree in trees_from_text(text, str(path))]


def _is_failure(line: str) -> bool:
    """Nothing, or balanced brackets without a word in them."""
    return line.count("(") == line.count(")") and not WORDLESS.sub("", line)


def read_pair(gold: PathLike, test: PathLike) -> tuple[list[Sentence], list[Sentence]]:
    """Gold and test sentences; empty lines at the end of either that pair with nothing are dropped."""
    golds, tests = read_sentences(gold), read_sentences(test)
    while golds and not golds[-1].words:
        golds.pop()
    while len(tests) > len(golds) and not tests[-1].words:
        tests.pop()
    return golds, tests


def read_parameters(path: PathLike) -> Parameters:
    """An EVALB parameter file. MAX_ERROR is not obeyed: every sentence is scored."""
    values: dict[str, list[tuple[str, ...]]] = {name: [] for name in KEYWORDS}
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if line.startswith("#") or not line.strip():
            continue
        name, *arguments = line.split()
        if name == "QUOTE_LABEL":
            raise InputError(
                f"{path}, line {number}: QUOTE_LABEL is not supported: leave it out, and read f1_all, "
                "which drops no sentence for the tag of a quotation mark."
            )
        if name not in KEYWORDS or len(arguments) != KEYWORDS[name]:
            known = ", ".join(f"{keyword} with {count}" for keyword, count in KEYWORDS.items())
            raise InputError(f"{path}, line {number}: {show(line)} is no EVALB parameter: expected {known} value(s).")
        if name in NUMBERS and not arguments[0].isdecimal():
            raise InputError(f"{path}, line {number}: {name} should be a whole number, found {show(arguments[0])}.")
        values[name].append(tuple(arguments))

    def both_ways(name: str) -> Pairs:
        return frozenset((one, other) for a, b in values[name] for one, other in ((a, b), (b, a)))

    return Parameters(
        labeled=int(values["LABELED"][-1][0]) != 0 if values["LABELED"] else COLLINS.labeled,
        cutoff=int(values["CUTOFF_LEN"][-1][0]) if values["CUTOFF_LEN"] else COLLINS.cutoff,
        delete=frozenset(label for (label,) in values["DELETE_LABEL"]),
        delete_for_length=frozenset(label for (label,) in values["DELETE_LABEL_FOR_LENGTH"]),
        equal_labels=both_ways("EQ_LABEL"),
        equal_words=both_ways("EQ_WORD"),
    )


def report(scores: Scores) -> str:
    """EVALB's own text: error messages, one line a sentence, totals, summaries."""
    rows = scores.rows
    valid = [row for row in rows if row.status == VALID]
    total = add_up(valid)
    lines = [f"{row.number} : {row.message}" for row in rows if row.message]
    lines += HEADER
    lines += [
        f"{row.number:4d}  {row.length:3d}    {row.status:d}  {percent(row.matched, row.gold):6.2f} "
        f"{percent(row.matched, row.test):6.2f}   {row.matched:3d}    {row.gold:3d}  {row.test:3d}    "
        f"{row.crossing:3d}   {row.words:4d}  {row.tags:4d}   {percent(row.tags, row.words):6.2f}"
        for row in rows
    ]
    lines += [
        RULE,
        f"                {percent(total.matched, total.gold):6.2f} {percent(total.matched, total.test):6.2f} "
        f"{total.matched:6d} {total.gold:5d} {total.test:5d}  {total.crossing:5d}  {total.words:5d} "
        f"{total.tags:5d}   {percent(total.tags, total.words):6.2f}",
        "=== Summary ===",
    ]
    for title, summary in (("All", scores.all), (f"len<={scores.cutoff}", scores.short)):
        lines += [
            "",
            f"-- {title} --",
            f"Number of sentence        = {summary.sentences:6d}",
            f"Number of Error sentence  = {summary.errors:6d}",
            f"Number of Skip  sentence  = {summary.skipped:6d}",
            f"Number of Valid sentence  = {summary.valid:6d}",
            f"Bracketing Recall         = {summary.recall:6.2f}",
            f"Bracketing Precision      = {summary.precision:6.2f}",
            f"Bracketing FMeasure       = {summary.f1:6.2f}",
            f"Complete match            = {summary.complete_match:6.2f}",
            f"Average crossing          = {summary.average_crossing:6.2f}",
            f"No crossing               = {summary.no_crossing:6.2f}",
            f"2 or less crossing        = {summary.two_or_less_crossing:6.2f}",
            f"Tagging accuracy          = {summary.tagging_accuracy:6.2f}",
        ]
    return "\n".join(lines) + "\n"
