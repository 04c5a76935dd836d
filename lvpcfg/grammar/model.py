"""A model and its folder: `model.safetensors` (numbers) and `model.json` (everything else).

Nothing in the folder is code or names code. A file that is truncated, foreign, newer than this
program, or made to harm is refused with one sentence before anything is built from it.
"""

import hashlib
import json
import math
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from jaxtyping import Int64
from safetensors import SafetensorError
from safetensors.torch import load as tensors_from_bytes
from torch import Tensor

from lvpcfg.errors import InputError, show
from lvpcfg.files import PathLike, place, read_bytes, tensor_file, write_bytes, writing
from lvpcfg.grammar import rule_cp, whole_cp  # noqa: F401  (they register themselves)
from lvpcfg.grammar.coarse import CoarseGrammar, is_large, projected_coarse
from lvpcfg.grammar.factors import Factors
from lvpcfg.grammar.grammar import Grammar
from lvpcfg.grammar.reader import FORMER, JSON, MOST_STATES, TENSORS, BinaryReader, Reader
from lvpcfg.grammar.rule_tensors import RuleTensors
from lvpcfg.grammar.rules import REPRESENTATIONS, BinaryRules
from lvpcfg.trees.binarisation import INTERMEDIATE, RIGHT, Binarisation
from lvpcfg.trees.lexicon import LexicalTable, Lexicon
from lvpcfg.trees.spelling import CharacterNetwork, CharacterSizes
from lvpcfg.trees.treebank import Symbols

WAITING = "model.safetensors.new"
DIGEST = "sha256"  # of all else in model.json
LEXICAL = ("row", "state", "value", "weight", "source", "backoff")
FORMAT, OLDEST, VERSION = "lvpcfg", 2, 7
# Before this format, the representation of binary rules showed in a rank, and their tensors had other names.
FIRST_WITH_REPRESENTATION = FIRST_WITH_COARSE = 5
FIRST_WITH_CHARACTERS = 6
FIRST_WITH_DIGEST = FIRST_WITH_FOLDED_WORDS = 7
# What binarisation calls the symbols that it adds: @S, or with the siblings that it remembers @S|NP|VP.
INTERMEDIATE_SYMBOL = re.compile(r"@[^@+^|][^|]*(\|[^@+^|][^|]*)*")


@dataclass(frozen=True, eq=False)
class Model:
    """What an estimator returns and a parser needs."""

    grammar: Grammar
    lexicon: Lexicon
    binarisation: Binarisation
    provenance: dict[str, Any] = field(default_factory=dict)  # how it was made, as plain JSON
    coarse: CoarseGrammar | None = None  # charts are pruned by it; without one, they are filled

    def save(self, path: PathLike) -> None:
        """Writes the model into the folder `path`; a crash leaves the old model or the new one.

        What could not be loaded again is refused before anything is written.
        """
        folder = place(path)
        tensors = _tensors(self)
        description = _description(self)
        _ModelReader(
            f"the model for {show(str(folder), 200)} cannot be saved", _through_json(description), tensors
        ).model()
        data = tensor_file(tensors, {})
        description["tensors_sha256"] = _digest(data)
        description[DIGEST] = digest_of(description)
        lines = [f"{json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}" for key, value in description.items()]
        with writing(folder):
            text = ("{\n" + ",\n".join(lines) + "\n}\n").encode("utf-8")
            folder.mkdir(parents=True, exist_ok=True)
            _finish_save(folder)
            # The new numbers wait beside the old ones until model.json, in one step, names them.
            write_bytes(folder / WAITING, *data)
            write_bytes(folder / JSON, text)
            os.replace(folder / WAITING, folder / TENSORS)

    @staticmethod
    def load(path: PathLike) -> "Model":
        """Reads a folder written by `save`, in the precision it was saved in, on the CPU."""
        folder = place(path)
        if not os.path.isfile(folder / JSON):
            raise InputError(f"{show(str(folder), 200)} is not a model folder: there is no file {JSON} in it.")
        reader = _ModelReader(f"the model in {show(str(folder), 200)} cannot be used", {}, {})
        for _ in range(3):  # another process may be saving
            reader.description = _read_description(folder, reader)
            reader.check_version()
            reader.check_digest()
            data = _matching_tensors(folder, reader.get("tensors_sha256", str))
            if data is not None:
                reader.tensors = _parse_tensors(data, reader)
                return reader.model()
        reader.refuse(f"{TENSORS} is missing, truncated, or not the one {JSON} was written with")


def problem_with_marks(symbols: Symbols) -> str | None:
    """Why binarisation could not be undone on trees with these symbols, if so: those that begin with @ are dropped."""
    for name in symbols.preterminals:
        if name.startswith(INTERMEDIATE):
            return f"its preterminal {show(name)} begins with {INTERMEDIATE}, which marks phrases made by binarisation"
    for name in symbols.interminals:
        if name.startswith(INTERMEDIATE) and not INTERMEDIATE_SYMBOL.fullmatch(name):
            return f"its interminal {show(name)} is no symbol that binarisation makes, such as '@S' or '@S|NP'"
    return None


def _tensors(model: Model) -> dict[str, Tensor]:
    grammar = model.grammar
    tensors = {"root": grammar.root, "unary": grammar.unary, "hierarchy": grammar.hierarchy}
    tensors |= {f"binary.{name}": tensor for name, tensor in grammar.binary.saved().items()}
    tensors |= {f"lexical.{name}": getattr(grammar.lexical, name) for name in LEXICAL}
    if model.coarse is not None:
        coarse, cover = model.coarse.grammar.to(dtype=grammar.root.dtype), model.coarse.cover
        tensors |= {"coarse.root": coarse.root, "coarse.unary": coarse.unary}
        tensors["coarse.binary"] = coarse.binary.written_out().values
        tensors |= {f"coarse.lexical.{name}": getattr(coarse.lexical, name) for name in LEXICAL}
        if cover is not None:
            tensors |= {f"cover.{name}": factor.to(grammar.root.dtype) for name, factor in vars(cover).items()}
    if grammar.lexical.network is not None:
        tensors |= {f"characters.{name}": tensor for name, tensor in grammar.lexical.network.tensors.items()}
    return {name: tensor.detach().flatten().cpu() for name, tensor in tensors.items()}


def _description(model: Model) -> dict[str, Any]:
    grammar, lexicon, horizontal = model.grammar, model.lexicon, model.binarisation.horizontal
    return {
        "format": FORMAT,
        "version": VERSION,
        "tensors_sha256": "",  # filled in when the rest is accepted
        "provenance": model.provenance,
        # JSON has no infinity.
        "binarisation": asdict(model.binarisation) | {"horizontal": "inf" if horizontal == math.inf else horizontal},
        "interminals": list(grammar.symbols.interminals),
        "preterminals": list(grammar.symbols.preterminals),
        "states": grammar.states.tolist(),
        "binary_rules": grammar.binary_rules.tolist(),
        "unary_rules": grammar.unary_rules.tolist(),
        "closed": grammar.closed,
        "binary": {"representation": grammar.binary.name} | grammar.binary.sizes(),
        "coarse": model.coarse is not None,
        "cover_rank": 0 if model.coarse is None or model.coarse.cover is None else model.coarse.cover.rank,
        "characters": None if grammar.lexical.network is None else asdict(grammar.lexical.network.sizes),
        "signature": lexicon.signature,
        "folded": lexicon.folded,
        "classes": list(lexicon.classes),
        "words": list(lexicon.words),
    }


def _through_json(description: dict[str, Any]) -> Any:
    try:
        returned = json.loads(json.dumps(description, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"the model cannot be saved: its provenance is not plain JSON ({error}).") from None
    if returned != description:
        raise InputError("the model cannot be saved: its provenance is not plain JSON (keys are strings, no tuples).")
    return returned


def digest_of(description: dict[str, Any]) -> str:
    """Of what a description says, however it is spaced."""
    rest = {name: value for name, value in description.items() if name != DIGEST}
    return _digest([json.dumps(rest, sort_keys=True).encode()])


def _digest(parts: Sequence[bytes | memoryview]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def _finish_save(folder: Path) -> None:
    """Where a save was cut off behind its writing of model.json, its numbers take their place."""
    try:
        description = json.loads((folder / JSON).read_bytes())
        waiting = (folder / WAITING).read_bytes()
    except (OSError, ValueError, RecursionError):
        return
    if isinstance(description, dict) and description.get("tensors_sha256") == _digest([waiting]):
        os.replace(folder / WAITING, folder / TENSORS)


def _read_description(folder: Path, reader: Reader) -> dict[str, Any]:
    try:
        description = json.loads(read_bytes(folder / JSON), parse_constant=_no_constant)
    except (ValueError, RecursionError):
        reader.refuse(f"{JSON} is damaged or no JSON")
    if not isinstance(description, dict) or description.get("format") != FORMAT:
        reader.refuse(f'{JSON} was not written by lvpcfg: it should say "format": "{FORMAT}"')
    return description


def _no_constant(name: str) -> NoReturn:
    raise ValueError(name)  # NaN and Infinity are no JSON


def _matching_tensors(folder: Path, digest: str) -> bytes | None:
    for name in (TENSORS, WAITING):
        if os.path.isfile(folder / name):
            with suppress(InputError):  # it may have been renamed since
                data = read_bytes(folder / name)
                if _digest([data]) == digest:
                    return data
    return None


def _parse_tensors(data: bytes, reader: Reader) -> dict[str, Tensor]:
    try:
        return dict(tensors_from_bytes(data))
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError, OverflowError) as error:
        reader.refuse(f"{TENSORS} is no safetensors file ({show(str(error))})")


class _ModelReader(Reader):
    """Builds a model of a description and tensors."""

    def check_version(self) -> None:
        version = self.get("version", int)
        if version > VERSION:
            self.refuse(f"it is in format {show(version)} of a newer lvpcfg, and this one reads up to {VERSION}")
        if version < 1:
            self.refuse(f"there is no format {show(version)}")
        if version < OLDEST:
            self.refuse(f"it is in format {version} of an older lvpcfg, which this one no longer reads: train it again")

    def check_digest(self) -> None:
        if DIGEST not in self.description and self.get("version", int) < FIRST_WITH_DIGEST:
            return
        with suppress(RecursionError):  # nested without end
            if self.get(DIGEST, str) == digest_of(self.description):
                return
        self.refuse(f"{JSON} is damaged, or was changed: its digest is another one")

    def model(self) -> Model:
        symbols = Symbols(self.names("interminals"), self.names("preterminals"))
        problem = problem_with_marks(symbols)
        if problem:
            self.refuse(problem)
        states = self.integers("states")
        if len(states) != len(symbols) or not symbols.preterminals:
            self.refuse(f"it has {len(symbols)} symbols but {len(states)} numbers of states")
        binary_rules = self.rules("binary_rules", 3, symbols)
        unary_rules = self.rules("unary_rules", 2, symbols)
        lexicon = self.lexicon()
        rules = torch.tensor(binary_rules, dtype=torch.int64).reshape(-1, 3)
        cls, reader = self.representation()
        tag_states = sum(states[len(symbols.interminals) :])
        grammar = Grammar(
            symbols=symbols,
            root=self.floats("root", sum(states)),
            binary=cls.read(tuple(states), len(symbols.interminals), rules, reader),
            unary=self.floats("unary", sum(states[a] * states[b] for a, b in unary_rules)),
            lexical=replace(self.lexical(len(lexicon), tag_states), network=self.network(lexicon, tag_states)),
            unary_rules=torch.tensor(unary_rules, dtype=torch.int64).reshape(-1, 2),
            hierarchy=self.hierarchy(states),
            closed="closed" in self.description and self.get("closed", bool),  # else saved before there was such
        )
        return Model(
            grammar, lexicon, self.binarisation(), self.get("provenance", dict), self.coarse(grammar, len(lexicon))
        )

    def coarse(self, grammar: Grammar, entries: int) -> CoarseGrammar | None:
        """Models of older versions have at most a cover: their coarse grammars were projected."""
        symbols = len(grammar.symbols)
        cover = self.factors("cover", self.rank("cover"), (len(grammar.symbols.interminals), symbols, symbols))
        if self.get("version", int) < FIRST_WITH_COARSE:
            return replace(projected_coarse(grammar), cover=cover) if is_large(grammar) else None
        if not self.get("coarse", bool):
            return None
        values = self.floats("coarse.binary", len(grammar.binary_rules))
        coarse = replace(
            grammar,
            root=self.floats("coarse.root", symbols),
            binary=RuleTensors((1,) * symbols, len(grammar.symbols.interminals), grammar.binary_rules, values),
            unary=self.floats("coarse.unary", len(grammar.unary_rules)),
            lexical=self.lexical(entries, len(grammar.symbols.preterminals), "coarse.lexical"),
            hierarchy=torch.zeros(0, symbols, dtype=torch.int64),
        )
        lexical = coarse.lexical
        for tensor in (coarse.root, values, coarse.unary, lexical.value, lexical.weight, lexical.backoff):
            if bool((tensor < 0).any()):
                self.refuse("its coarse grammar has numbers below zero")
        return CoarseGrammar(coarse, cover)

    def representation(self) -> tuple[type[BinaryRules], BinaryReader]:
        """How the binary rules are kept, and what they are read from."""
        if self.get("version", int) < FIRST_WITH_REPRESENTATION:
            name, rank = next(((new, self.rank(old)) for old, new in FORMER.items() if self.rank(old)), ("tensors", 0))
            return REPRESENTATIONS[name], BinaryReader(self, name, {"rank": rank}, former=True)
        about = self.get("binary", dict)
        name = about.get("representation")
        if not isinstance(name, str) or name not in REPRESENTATIONS:
            self.refuse(f"its binary rules are kept as {show(name)}: expected {' or '.join(REPRESENTATIONS)}")
        return REPRESENTATIONS[name], BinaryReader(self, name, about)

    def rank(self, name: str) -> int:
        """The rank of a CP form; 0 where there is none, as in the models of older versions."""
        rank: int = self.get(f"{name}_rank", int) if f"{name}_rank" in self.description else 0
        if not 0 <= rank <= MOST_STATES:
            self.refuse(f"'{name}_rank' is {show(rank)}: expected a number from 0 to {MOST_STATES}")
        return rank

    def factors(self, name: str, rank: int, sizes: tuple[int, ...], batch: int | None = None) -> Factors | None:
        if not rank:
            return None
        lead = () if batch is None else (batch,)
        return Factors(
            *(
                self.floats(f"{name}.{factor}", math.prod(lead) * rank * size).view(*lead, rank, size)
                for factor, size in zip("uvw", sizes, strict=True)
            )
        )

    def hierarchy(self, states: list[int]) -> Int64[Tensor, "levels _"]:
        ancestors = self.indices("hierarchy")
        if len(ancestors) % sum(states):
            self.refuse(f"the tensor 'hierarchy' has {len(ancestors)} numbers, no multiple of {sum(states)} states")
        levels = ancestors.view(-1, sum(states))
        most = torch.tensor(states).repeat_interleave(torch.tensor(states))
        if bool(((levels < 0) | (levels >= most)).any()):
            self.refuse("the tensor 'hierarchy' names states that its symbols do not have")
        return levels

    def lexicon(self) -> Lexicon:
        words, classes, signature = self.names("words"), self.names("classes"), self.get("signature", str)
        folded = self.get("version", int) >= FIRST_WITH_FOLDED_WORDS and self.get("folded", bool)
        try:
            return Lexicon(words, classes, signature, folded)
        except InputError as error:
            self.refuse(str(error).rstrip("."))

    def lexical(self, entries: int, states: int, name: str = "lexical") -> LexicalTable:
        weight, source = self.floats(f"{name}.weight", entries), self.indices(f"{name}.source")
        sources = int(source.max()) + 1 if len(source) else 0
        if len(source) != entries or not sources or int(source.min()) < 0 or sources > entries:
            self.refuse(f"the tensor '{name}.source' should have a row for each of {entries} entries")
        backoff = self.floats(f"{name}.backoff", sources * states).view(sources, states)
        row, state = self.indices(f"{name}.row"), self.indices(f"{name}.state")
        if len(row) != entries + 1 or row[0] != 0 or row[-1] != len(state) or bool((row[1:] < row[:-1]).any()):
            self.refuse(f"the tensor '{name}.row' does not divide '{name}.state' into rows")
        if bool(((state < 0) | (state >= states)).any()):
            self.refuse(f"the tensor '{name}.state' names a state outside of 0 .. {states - 1}")
        value = self.floats(f"{name}.value", len(state))
        return LexicalTable(row, state, value, weight, source, backoff, widest=int((row[1:] - row[:-1]).max()))

    def network(self, lexicon: Lexicon, states: int) -> CharacterNetwork | None:
        if self.get("version", int) < FIRST_WITH_CHARACTERS or self.description.get("characters", {}) is None:
            return None
        sizes = self.get("characters", dict)
        names = [each.name for each in fields(CharacterSizes)]
        if sizes.keys() != {*names} or not all(type(n) is int and 1 <= n <= MOST_STATES for n in sizes.values()):
            self.refuse(f"'characters' is {show(sizes)}: expected whole numbers for {', '.join(names)}")
        if sizes["width"] % 2 == 0:
            self.refuse(f"the 'width' of its 'characters' is {sizes['width']}: expected an odd number")
        shapes = CharacterSizes(**sizes).shapes(len(lexicon.alphabet), states)
        return CharacterNetwork(
            **{name: self.floats(f"characters.{name}", math.prod(shape)).view(shape) for name, shape in shapes.items()}
        )

    def rules(self, key: str, width: int, symbols: Symbols) -> list[list[int]]:
        rules: list[list[int]] = self.get(key, list)
        for rule in rules:
            if not (type(rule) is list and len(rule) == width and all(type(symbol) is int for symbol in rule)):
                self.refuse(f"{key!r} should hold lists of {width} symbols, found {show(rule)}")
            if not all(0 <= symbol < len(symbols) for symbol in rule) or rule[0] >= len(symbols.interminals):
                self.refuse(f"{show(rule)} in {key!r} is no rule from an interminal to symbols")
        if len({tuple(rule) for rule in rules}) != len(rules):
            self.refuse(f"a rule stands twice in {key!r}")
        return rules

    def binarisation(self) -> Binarisation:
        options = self.get("binarisation", dict)
        if options.get("horizontal") == "inf":
            options = options | {"horizontal": math.inf}
        if options.keys() == asdict(RIGHT).keys() and type(options["vertical"]) is int:  # True would pass for 1
            with suppress(InputError):
                return Binarisation(**options)
        self.refuse(f"'binarisation' is {show(options)}, which this version does not understand")
