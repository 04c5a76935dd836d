"""A model and its folder: `model.safetensors` (numbers) and `model.json` (everything else).

Nothing in the folder is code or names code. A file that is truncated, foreign, newer than this
program, or made to harm is refused with one sentence before anything is built from it.
"""

import hashlib
import json
import math
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError
from safetensors.torch import load as tensors_from_bytes
from safetensors.torch import save as tensors_to_bytes
from torch import Tensor

from lvpcfg.errors import InputError, show
from lvpcfg.files import PathLike, read_bytes, write_synced, write_text, writing
from lvpcfg.grammar.grammar import Grammar
from lvpcfg.trees.binarise import Binarisation
from lvpcfg.trees.lexicon import LexicalTable, Lexicon
from lvpcfg.trees.treebank import Symbols

JSON, TENSORS = "model.json", "model.safetensors"
LEXICAL = ("row", "state", "value", "weight", "backoff")
FORMAT, VERSION = "lvpcfg", 1


@dataclass(frozen=True, eq=False)
class Model:
    """What an estimator returns and a parser needs."""

    grammar: Grammar
    lexicon: Lexicon
    binarisation: Binarisation
    provenance: dict[str, Any] = field(default_factory=dict)  # how it was made, as plain JSON

    def save(self, path: PathLike) -> None:
        """Writes the model into the folder `path`; a crash leaves the old model or the new one."""
        folder, grammar = Path(path), self.grammar
        tensors = {"root": grammar.root, "binary": grammar.binary, "unary": grammar.unary}
        tensors |= {f"lexical.{name}": getattr(grammar.lexical, name) for name in LEXICAL}
        data = tensors_to_bytes({name: value.detach().cpu().contiguous() for name, value in tensors.items()})
        description = {
            "format": FORMAT,
            "version": VERSION,
            "tensors_sha256": hashlib.sha256(data).hexdigest(),
            "provenance": self.provenance,
            "binarisation": _finite(asdict(self.binarisation)),
            "interminals": grammar.symbols.interminals,
            "preterminals": grammar.symbols.preterminals,
            "states": grammar.states.tolist(),
            "binary_rules": grammar.binary_rules.tolist(),
            "unary_rules": grammar.unary_rules.tolist(),
            "signature": self.lexicon.signature,
            "classes": self.lexicon.classes,
            "words": self.lexicon.words,
        }
        lines = [f"{json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}" for key, value in description.items()]
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            # The new numbers wait beside the old ones until model.json, in one step, names them.
            waiting = folder / (TENSORS + ".new")
            write_synced(waiting, data)
            write_text(folder / JSON, "{\n" + ",\n".join(lines) + "\n}\n")
            os.replace(waiting, folder / TENSORS)

    @staticmethod
    def load(path: PathLike) -> "Model":
        """Reads a folder written by `save`, in the precision it was saved in, on the CPU."""
        reader = _Reader(Path(path))
        symbols = Symbols(reader.names("interminals"), reader.names("preterminals"))
        lexicon = Lexicon(reader.names("words"), reader.names("classes"), reader.get("signature", str))
        states = reader.integers("states", least=1)
        if len(states) != len(symbols) or not symbols.preterminals:
            reader.refuse(f"it has {len(symbols)} symbols but {len(states)} numbers of states")
        binary_rules = reader.rules("binary_rules", 3, len(symbols))
        unary_rules = reader.rules("unary_rules", 2, len(symbols))
        emitting = sum(states[len(symbols.interminals) :])
        row = reader.tensor("lexical.row", len(lexicon) + 1, torch.int64)
        state = reader.tensor("lexical.state", None, torch.int64)
        value = reader.tensor("lexical.value", len(state))
        backoff = reader.tensor("lexical.backoff", emitting)
        sizes = row[1:] - row[:-1]
        if row[0] != 0 or row[-1] != len(state) or bool((sizes < 0).any()):
            reader.refuse("the tensor 'lexical.row' does not divide 'lexical.state' into rows")
        if bool(((state < 0) | (state >= emitting)).any()):
            reader.refuse(f"the tensor 'lexical.state' names a state outside of 0 .. {emitting - 1}")
        lexical = LexicalTable(
            row=row,
            state=state,
            value=value,
            weight=reader.tensor("lexical.weight", len(lexicon)),
            backoff=backoff,
            widest=int(sizes.max()),
        )
        grammar = Grammar(
            symbols=symbols,
            root=reader.tensor("root", sum(states)),
            binary=reader.tensor("binary", sum(states[a] * states[b] * states[c] for a, b, c in binary_rules)),
            unary=reader.tensor("unary", sum(states[a] * states[b] for a, b in unary_rules)),
            states=torch.tensor(states, dtype=torch.int64),
            binary_rules=torch.tensor(binary_rules, dtype=torch.int64).reshape(-1, 3),
            unary_rules=torch.tensor(unary_rules, dtype=torch.int64).reshape(-1, 2),
            lexical=lexical,
        )
        return Model(grammar, lexicon, reader.binarisation(), reader.get("provenance", dict))


class _Reader:
    """Takes a model folder apart, checking each piece against what it must be."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if not (folder / JSON).is_file():
            raise InputError(f"{show(str(folder), 200)} is not a model folder: there is no file {JSON} in it.")
        try:
            self.json = json.loads(read_bytes(folder / JSON), parse_constant=self._constant)
        except (ValueError, RecursionError):
            self.refuse(f"{JSON} is damaged or no JSON")
        if not isinstance(self.json, dict) or self.json.get("format") != FORMAT:
            self.refuse(f'{JSON} was not written by lvpcfg: it should say "format": "{FORMAT}"')
        if self.get("version", int) > VERSION:
            self.refuse(
                f"it is in format {self.json['version']}, written by a newer lvpcfg, "
                f"and this one reads formats up to {VERSION}"
            )
        self.tensors = self._read_tensors(self.get("tensors_sha256", str))

    def refuse(self, reason: str) -> NoReturn:
        raise InputError(f"the model in {show(str(self.folder), 200)} cannot be used: {reason}.") from None

    def get(self, key: str, kind: type) -> Any:
        value = self.json.get(key)
        if type(value) is not kind:
            self.refuse(f"{JSON} should have {kind.__name__} under {key!r}, found {show(value)}")
        return value

    def names(self, key: str) -> tuple[str, ...]:
        names = self.get(key, list)
        if not all(type(name) is str for name in names) or len(set(names)) != len(names):
            self.refuse(f"{key!r} should be a list of different strings")
        return tuple(names)

    def integers(self, key: str, least: int) -> list[int]:
        numbers = self.get(key, list)
        if not all(type(number) is int and number >= least for number in numbers):
            self.refuse(f"{key!r} should be a list of whole numbers from {least}")
        return list(numbers)

    def rules(self, key: str, width: int, symbols: int) -> list[list[int]]:
        rules: list[list[int]] = self.get(key, list)
        for rule in rules:
            if not (type(rule) is list and len(rule) == width):
                self.refuse(f"{key!r} should hold lists of {width} symbols, found {show(rule)}")
            if not all(type(symbol) is int and 0 <= symbol < symbols for symbol in rule):
                self.refuse(f"{key!r} names a symbol outside of 0 .. {symbols - 1} in {show(rule)}")
        return rules

    def binarisation(self) -> Binarisation:
        options = self.get("binarisation", dict)
        try:
            horizontal = options["horizontal"]
            return Binarisation(**{**options, "horizontal": math.inf if horizontal == "inf" else horizontal})
        except (TypeError, ValueError, KeyError):
            self.refuse(f"'binarisation' is {show(options)}, which this version does not understand")

    def tensor(self, name: str, size: int | None, dtype: torch.dtype | None = None) -> Tensor:
        """A vector of `size` numbers; without `dtype`, finite floating-point ones."""
        tensor = self.tensors.get(name)
        if tensor is None:
            self.refuse(f"{TENSORS} lacks the tensor {name!r}")
        if tensor.dim() != 1 or (size is not None and len(tensor) != size):
            expected = "a vector" if size is None else f"{size} numbers"
            self.refuse(f"the tensor {name!r} has the shape {tuple(tensor.shape)}, expected {expected}")
        if (tensor.dtype != dtype) if dtype else (tensor.dtype not in (torch.float32, torch.float64)):
            self.refuse(f"the tensor {name!r} is of type {tensor.dtype}, expected {dtype or 'float32 or float64'}")
        if not bool(tensor.isfinite().all()):
            self.refuse(f"the tensor {name!r} holds numbers that are not finite")
        return tensor

    def _read_tensors(self, digest: str) -> dict[str, Tensor]:
        # The second name exists only where a save was cut off behind its writing of model.json.
        for name in (TENSORS, TENSORS + ".new"):
            if (self.folder / name).is_file():
                data = read_bytes(self.folder / name)
                if hashlib.sha256(data).hexdigest() == digest:
                    try:
                        return dict(tensors_from_bytes(data))
                    except (SafetensorError, ValueError, KeyError) as error:
                        self.refuse(f"{name} is no safetensors file ({error})")
        self.refuse(f"{TENSORS} is missing, truncated, or not the one {JSON} was written with")

    def _constant(self, name: str) -> NoReturn:
        raise ValueError(name)


def _finite(options: dict[str, Any]) -> dict[str, Any]:
    """JSON has no infinity: it is written as the string "inf"."""
    return {key: "inf" if value == math.inf else value for key, value in options.items()}
