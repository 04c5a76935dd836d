"""CoNLL-U: the words and tags of sentences; the dependencies are not read."""

import re

from lvpcfg.errors import InputError, OnError, expect, handling, show
from lvpcfg.files import PathLike, read_text
from lvpcfg.options import TAG_COLUMNS

COLUMNS = dict(zip(TAG_COLUMNS, (3, 4), strict=True))
NO_WORD = re.compile(r"\d+[-.]\d+")  # a range of words written as one, or an empty node

TaggedSentence = list[tuple[str, str]]


def read_conllu(path: PathLike, tag: str = "upos", on_error: OnError = "raise") -> list[TaggedSentence]:
    """The sentences of a CoNLL-U file (plain or gzip, UTF-8) as (word, tag) pairs.

    `tag` is the column of the tags, "upos" or "xpos". `on_error` is as in `read_trees`; "skip"
    leaves out whole sentences.
    """
    expect("tag", tag, tuple(COLUMNS))
    return conllu_from_text(read_text(path), str(path), tag, on_error)


def conllu_from_text(
    text: str, name: str = "text", tag: str = "upos", on_error: OnError = "raise"
) -> list[TaggedSentence]:
    """As `read_conllu`, for text in memory."""
    sentences: list[TaggedSentence] = []
    with handling(on_error, name) as report:
        current: TaggedSentence = []
        broken = any_broken = False
        for number, line in enumerate([*text.split("\n"), ""], start=1):
            if not line.strip(" "):
                if current and not broken:
                    sentences.append(current)
                current, broken = [], False
            elif not line.startswith("#") and not broken:
                problem = _add(current, line, tag)
                if problem:
                    broken = any_broken = True
                    report(InputError(f"{name}, line {number}: {problem}"))
        if not sentences and not any_broken:
            report(InputError(f"there is no sentence in {name}: expected some in CoNLL-U format."))
    return sentences


def _add(sentence: TaggedSentence, line: str, tag: str) -> str | None:
    """Appends the word of a line, or says what is wrong with the line."""
    columns = line.split("\t")
    if len(columns) != 10:
        return f"expected 10 columns separated by tabs, found {len(columns)} in {show(line)}."
    if NO_WORD.fullmatch(columns[0]):
        return None
    if columns[0] != str(len(sentence) + 1):
        return f"expected word number {len(sentence) + 1} of the sentence, found {show(columns[0])} in {show(line)}."
    word, word_tag = columns[1], columns[COLUMNS[tag]]
    if not word.strip():
        return f"the word is missing in {show(line)}."
    if not word_tag or word_tag == "_":
        return f"the word {show(word)} has no {tag} tag: its column {COLUMNS[tag] + 1} is {show(word_tag)}."
    sentence.append((word, word_tag))
    return None
