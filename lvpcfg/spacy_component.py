"""A component for spaCy: the trees of a document's sentences, as attributes of its spans and tokens.

    nlp.add_pipe("lvpcfg", config={"model": FOLDER})
    sentence._.parse_string, span._.labels, span._.constituents, span._.children, span._.parent

A constituent is what stands over some tokens: all phrases of a unary chain together, or a word, which has no labels.
White space is no word. Attributes have the names that benepar gave them, so that one can stand in for the other.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import srsly
from nltk.tree import Tree
from spacy.language import Language
from spacy.tokens import Doc, Span, Token

from lvpcfg.batch.records import SPACE
from lvpcfg.errors import InputError, show
from lvpcfg.files import PathLike, read_bytes, write_bytes
from lvpcfg.grammar.location import located
from lvpcfg.grammar.reader import JSON, TENSORS
from lvpcfg.parser import MAX_LENGTH, THRESHOLD, TOKENS, Parser
from lvpcfg.trees.brackets import ESCAPED, format_tree
from lvpcfg.trees.normalise import TOP
from lvpcfg.trees.walk import is_preterminal

NAME = "lvpcfg"  # of the component, and of the attribute of documents that holds the rows of their constituents
DOCUMENTS = 64  # parsed together where nobody says how many


class Row(NamedTuple):
    """A constituent. A document has those of all its sentences in preorder; as lists, which spaCy can save."""

    start: int  # token
    end: int  # one past its last token
    labels: Sequence[str]  # from the top
    tag: str | None  # of a word
    parent: int  # row; -1 for a sentence


class ConstituencyParser:
    """Parses the sentences of documents, those of a batch of documents together."""

    def __init__(self, model: str | list[str], options: dict[str, Any]) -> None:
        _set_extensions()
        self.model, self.options = model, options
        self._parser: Parser | None = None
        # A pipeline that was saved has its model with it, and the folder in its configuration may be gone.
        if all(located(folder).exists() for folder in ([model] if isinstance(model, str) else model)):
            self._load(model)

    @property
    def parser(self) -> Parser:
        return self._parser or self._load(self.model)

    def _load(self, model: PathLike | Sequence[PathLike]) -> Parser:
        self._parser = Parser.load(model, **self.options)
        return self._parser

    def __call__(self, doc: Doc) -> Doc:
        (doc,) = self.pipe([doc])
        return doc

    def pipe(self, stream: Iterable[Doc], *, batch_size: int = DOCUMENTS) -> Iterator[Doc]:
        documents = iter(stream)
        while batch := list(islice(documents, batch_size)):
            sentences = [[_words(sentence) for sentence in doc.sents] for doc in batch]
            trees = iter(self.parser.parse_sents([_texts(words) for some in sentences for words in some if words]))
            for doc, some in zip(batch, sentences, strict=True):
                rows: list[Row] = []
                for words in some:
                    if words:
                        rows += _rows(next(trees), [word.i for word in words], len(rows))
                doc._.set(NAME, [list(row) for row in rows])
            yield from batch

    def to_disk(self, path: PathLike, *, exclude: Iterable[str] = ()) -> None:
        for number, model in enumerate(self.parser.models):
            model.save(Path(path) / str(number))

    def from_disk(self, path: PathLike, *, exclude: Iterable[str] = ()) -> "ConstituencyParser":
        self._load(path)
        return self

    def to_bytes(self, *, exclude: Iterable[str] = ()) -> bytes:
        with TemporaryDirectory() as folder:
            self.to_disk(folder)
            paths = [Path(folder) / str(number) for number in range(len(self.parser.models))]
            return srsly.msgpack_dumps([[read_bytes(path / name) for name in (JSON, TENSORS)] for path in paths])

    def from_bytes(self, data: bytes, *, exclude: Iterable[str] = ()) -> "ConstituencyParser":
        with TemporaryDirectory() as folder:
            for number, files in enumerate(srsly.msgpack_loads(data)):
                for name, content in zip((JSON, TENSORS), files, strict=True):
                    write_bytes(Path(folder) / str(number) / name, content)
            return self.from_disk(folder)


def make(
    nlp: Language,
    name: str,
    model: str | list[str],
    decoder: str | None,
    device: str | None,
    dtype: str,
    prune: float,
    batch_tokens: int,
    max_length: int,
) -> ConstituencyParser:
    """`model` is a folder, or a list of folders: their product. The rest are options of `lvpcfg.Parser`."""
    options = {"decoder": decoder, "device": device, "dtype": dtype, "prune": prune}
    return ConstituencyParser(model, options | {"batch_tokens": batch_tokens, "max_length": max_length})


Language.factory(
    NAME,
    default_config={
        "decoder": None,
        "device": None,
        "dtype": "float32",
        "prune": THRESHOLD,
        "batch_tokens": TOKENS,
        "max_length": MAX_LENGTH,
    },
    requires=["doc.sents"],
    assigns=[f"doc._.{NAME}", "span._.parse_string", "span._.labels", "span._.constituents"],
    func=make,
)


def _words(sentence: Span) -> list[Token]:
    return [token for token in sentence if not token.is_space]


def _texts(words: Iterable[Token]) -> list[str]:
    """As they can stand in trees."""
    return [SPACE.sub("_", word.text).translate(ESCAPED) for word in words]


def _rows(tree: Tree, tokens: Sequence[int], before: int) -> list[Row]:
    """Of a tree over these tokens, behind some rows of other sentences."""
    top = tree[0] if tree.label() == TOP and len(tree) == 1 else tree
    rows: list[Row] = []
    seen = 0  # words
    todo: list[tuple[Tree, int] | int] = [(top, -1)]  # a number: that row ends
    while todo:
        item = todo.pop()
        if isinstance(item, int):
            rows[item] = rows[item]._replace(end=tokens[seen - 1] + 1)
            continue
        node, parent = item
        labels = []
        while not is_preterminal(node):
            labels.append(node.label())
            if len(node) > 1:
                break
            node = node[0]
        tag = node.label() if is_preterminal(node) else None
        todo.append(len(rows))
        if tag is None:
            todo += [(child, before + len(rows)) for child in reversed(node)]
        rows.append(Row(tokens[seen], 0, labels, tag, parent))
        seen += tag is not None
    return rows


# ---------------------------------------------------------------- attributes


def _set_extensions() -> None:
    Doc.set_extension(NAME, default=None, force=True)
    of_spans = {
        "labels": _labels,
        "parse_string": _parse_string,
        "constituents": _constituents,
        "children": _children,
        "parent": _parent,
    }
    for name, getter in of_spans.items():
        Span.set_extension(name, getter=getter, force=True)
    for name in ("labels", "parse_string", "parent"):
        getter = of_spans[name]
        Token.set_extension(
            name, getter=lambda token, getter=getter: getter(token.doc[token.i : token.i + 1]), force=True
        )


def _labels(span: Span) -> tuple[str, ...]:
    return tuple(label for row in _below(span)[:1] for label in row.labels)


def _constituents(span: Span) -> Iterator[Span]:
    """It and all below it, parents before children."""
    return (span.doc[row.start : row.end] for row in _below(span))


def _children(span: Span) -> Iterator[Span]:
    rows = _below(span)
    return (span.doc[row.start : row.end] for row in rows[1:] if row.parent == rows[1].parent)


def _parent(span: Span) -> Span | None:
    rows = _below(span)
    if not rows or rows[0].parent < 0:
        return None
    parent = Row(*span.doc._.get(NAME)[rows[0].parent])
    return span.doc[parent.start : parent.end]


def _parse_string(span: Span) -> str:
    rows = _below(span)
    if not rows:
        return ""
    built: list[Tree] = []
    for row in reversed(rows):  # children before their parents, the leftmost on top
        below: list[Any] = []
        while built and row.tag is None and row.start <= built[-1].first < row.end:
            below.append(built.pop())
        if row.tag is not None:
            below = [Tree(row.tag, _texts([span.doc[row.start]]))]
        for label in reversed(row.labels):
            below = [Tree(label, below)]
        below[0].first = row.start
        built.append(below[0])
    return format_tree(built[0])


def _below(span: Span) -> list[Row]:
    """A constituent and all below it; nothing, for a span without words."""
    known = span.doc._.get(NAME)
    if known is None:
        raise InputError(f"{show(span.text)} has no tree: its document did not go through the component 'lvpcfg'.")
    words = _words(span)
    if not words:
        return []
    start, end = words[0].i, words[-1].i + 1
    place = bisect_left(known, (start, -end), key=lambda row: (row[0], -row[1]))
    if place == len(known) or (known[place][0], known[place][1]) != (start, end):
        raise InputError(f"{show(span.text)} is no constituent: those of a sentence are in its _.constituents.")
    after = bisect_left(known, end, place, key=lambda row: row[0])
    return [Row(*row) for row in known[place:after]]
