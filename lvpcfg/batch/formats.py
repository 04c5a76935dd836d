"""What is written for a record: a tree in brackets, a JSON object, or the parse column of CoNLL-2012.

Of a tagger: the tags in CoNLL-U, in a JSON object, or beside the words."""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nltk.tree import Tree

from lvpcfg.batch.records import Record
from lvpcfg.options import BRACKETS, CONLL, CONLLU, JSONL
from lvpcfg.parser import Parser
from lvpcfg.parses import Parse
from lvpcfg.tagger import Tagger
from lvpcfg.trees.brackets import format_tree
from lvpcfg.trees.conllu import COLUMNS, NO_WORD
from lvpcfg.trees.normalise import TOP
from lvpcfg.trees.walk import is_preterminal

ENDINGS = {".jsonl": JSONL, ".ndjson": JSONL, ".conll": CONLL}


@dataclass(frozen=True)
class Writer:
    kind: str
    k_best: int = 1  # trees of a sentence
    spans: bool = False  # the posterior of each
    certify: bool = False  # what the tree can be under the exact grammar

    @property
    def begin(self) -> bytes:
        """What stands before all records."""
        return b"#begin document (lvpcfg); part 000\n" if self.kind == CONLL else b""

    @property
    def end(self) -> bytes:
        return b"#end document\n" if self.kind == CONLL else b""

    def parse(
        self, parser: Parser, records: Sequence[Record], update: Callable[[int], object]
    ) -> Sequence[Sequence[Tree | Parse]]:
        """The trees of each record, with as much about them as will be written."""
        sentences, tags = [record.words for record in records], [record.tags for record in records]
        if self.certify:
            return [
                [one] for one in parser.analyse(sentences, update=update, tags=tags, spans=self.spans, certify=True)
            ]
        if self.kind == JSONL:
            return parser.k_best_sents(sentences, self.k_best, update=update, tags=tags, spans=self.spans)
        return [[tree] for tree in parser.parse_sents(sentences, update=update, tags=tags)]

    def bytes(self, record: Record, parses: Sequence[Any]) -> bytes:
        """A record with its trees; none, where it has no words."""
        if self.kind == JSONL:
            text = json.dumps(self._object(record, parses), ensure_ascii=False) + "\n"
        elif self.kind == BRACKETS:
            text = (format_tree(parses[0]) if parses else "") + "\n"
        else:
            text = "".join(row + "\n" for row in _rows(parses[0])) + "\n" if parses else "\n"
        return text.encode("utf-8", "backslashreplace")  # half of a surrogate pair in an id, as JSON writes it

    def _object(self, record: Record, parses: Sequence[Parse]) -> dict[str, Any]:
        found: dict[str, Any] = {"id": record.id}
        if record.problem is not None:
            return found | {"tree": None, "problem": record.problem}
        return found | (self.known(parses) if parses else {"tree": None})

    def known(self, parses: Sequence[Parse]) -> dict[str, Any]:
        """What is known about a sentence, for JSON."""
        found = {**self._tree(parses[0]), "flat": parses[0].flat}
        if self.k_best > 1:
            found["k_best"] = [self._tree(parse) for parse in parses]
        return found

    def _tree(self, parse: Parse) -> dict[str, Any]:
        log_prob = parse.log_prob if parse.log_prob > -math.inf else None  # JSON has no infinity
        found: dict[str, Any] = {"tree": format_tree(parse.tree), "log_prob": log_prob, "posterior": parse.posterior}
        if parse.spans is not None:
            found["spans"] = [[span.label, span.start, span.end, span.posterior] for span in parse.spans]
        if parse.certificate is not None:
            found["certificate"] = {
                name: value if isinstance(value, str) else [end if math.isfinite(end) else None for end in value]
                for name, value in vars(parse.certificate).items()
            }
        return found


@dataclass(frozen=True)
class TagWriter:
    """Of words with their tags."""

    kind: str
    column: str  # of CoNLL-U
    begin, end = b"", b""

    def parse(
        self, tagger: Tagger, records: Sequence[Record], update: Callable[[int], object]
    ) -> Sequence[Sequence[str]]:
        """The tags of the words of each record."""
        return tagger.tags_of([record.words for record in records], update=update)

    def bytes(self, record: Record, tags: Sequence[str]) -> bytes:
        """A record with its tags. What is no sentence is an empty line of text, and stays what it was in CoNLL-U."""
        if self.kind == JSONL:
            found: dict[str, Any] = {"id": record.id, "tokens": record.words, "tags": tags}
            if record.problem is not None:
                found = {"id": record.id, "tags": None, "problem": record.problem}
            text = json.dumps(found, ensure_ascii=False) + "\n"
        elif self.kind == CONLLU:
            end = "\r\n" if record.text is not None and record.text.endswith("\r") else "\n"  # as its lines do
            text = "".join(line + "\n" for line in self._lines(record, tags)) + end
        else:
            text = " ".join(f"{word}/{tag}" for word, tag in zip(record.words, tags, strict=True)) + "\n"
        return text.encode("utf-8", "backslashreplace")

    def _lines(self, record: Record, tags: Sequence[str]) -> Iterator[str]:
        place = COLUMNS[self.column]
        if record.text is None:
            for number, (word, tag) in enumerate(zip(record.words, tags, strict=True), 1):
                yield "\t".join([str(number), word, *(tag if column == place else "_" for column in range(2, 10))])
            return
        rest = iter(tags)
        for line in record.text.split("\n"):
            if record.words and not line.startswith("#"):
                columns = line.split("\t")
                if not NO_WORD.fullmatch(columns[0]):
                    columns[place] = next(rest)
                    line = "\t".join(columns)
            yield line


AnyWriter = Writer | TagWriter


def kind_of(path: str, endings: Mapping[str, str] = ENDINGS, otherwise: str = BRACKETS) -> str:
    """The format of a file, by its name."""
    plain = path.lower().removesuffix(".gz").removesuffix(".zst")
    return next((kind for ending, kind in endings.items() if plain.endswith(ending)), otherwise)


def _rows(tree: Tree) -> list[str]:
    """Document, part, number, word, tag, parse; the columns of layers that a parser does not add are empty."""
    tree = tree if tree.label() == TOP else Tree(TOP, [tree])
    words = list[tuple[str, str]]()
    bits = [""]  # of the words so far, and what opens before the next one
    todo: list[Tree | None] = [tree]  # None closes a bracket
    while todo:
        node = todo.pop()
        if node is None:
            bits[-2] += ")"
        elif is_preterminal(node):
            words.append((node[0], node.label()))
            bits[-1] += "*"
            bits.append("")
        else:
            bits[-1] += f"({node.label()}"
            todo.append(None)
            todo.extend(reversed(node))
    return [
        "\t".join(("lvpcfg", "0", str(number), word, tag, bit, "-", "-", "-", "-", "*", "-"))
        for number, ((word, tag), bit) in enumerate(zip(words, bits, strict=False))
    ]
