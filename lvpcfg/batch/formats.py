"""What is written for a record: a tree in brackets, a JSON object, or the parse column of CoNLL-2012."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from nltk.tree import Tree

from lvpcfg.batch.records import Record
from lvpcfg.options import BRACKETS, CONLL, JSONL
from lvpcfg.parser import Parser
from lvpcfg.parses import Parse
from lvpcfg.trees.brackets import format_tree
from lvpcfg.trees.normalise import TOP
from lvpcfg.trees.walk import is_preterminal

ENDINGS = {".jsonl": JSONL, ".ndjson": JSONL, ".conll": CONLL}


@dataclass(frozen=True)
class Writer:
    kind: str
    k_best: int = 1  # trees of a sentence
    spans: bool = False  # the posterior of each

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
        if not parses:
            return found | {"tree": None}
        best = parses[0]
        found |= {**self._tree(best), "flat": best.flat}
        if self.k_best > 1:
            found["k_best"] = [self._tree(parse) for parse in parses]
        return found

    def _tree(self, parse: Parse) -> dict[str, Any]:
        log_prob = parse.log_prob if parse.log_prob > -math.inf else None  # JSON has no infinity
        found: dict[str, Any] = {"tree": format_tree(parse.tree), "log_prob": log_prob, "posterior": parse.posterior}
        if parse.spans is not None:
            found["spans"] = [[span.label, span.start, span.end, span.posterior] for span in parse.spans]
        return found


def kind_of(path: str) -> str:
    """The format of a file, by its name."""
    plain = path.removesuffix(".gz").removesuffix(".zst")
    return next((kind for ending, kind in ENDINGS.items() if plain.endswith(ending)), BRACKETS)


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
