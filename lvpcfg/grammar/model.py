"""A model, and what stands in its folder."""

import math
import re
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor

from lvpcfg.errors import InputError, show
from lvpcfg.files import PathLike
from lvpcfg.grammar import gaussian, rule_cp, whole_cp  # noqa: F401  (they register themselves)
from lvpcfg.grammar.coarse import CoarseGrammar, is_large, projected_coarse
from lvpcfg.grammar.envelope import Envelope
from lvpcfg.grammar.factors import Factors
from lvpcfg.grammar.folder import (
    GRAMMAR,
    FolderReader,
    lexical_tensors,
    lexicon_description,
    load_folder,
    save_folder,
)
from lvpcfg.grammar.grammar import Grammar
from lvpcfg.grammar.reader import FORMER, MOST_STATES, BinaryReader
from lvpcfg.grammar.rule_cp import RuleCP
from lvpcfg.grammar.rule_tensors import RuleTensors
from lvpcfg.grammar.rules import REPRESENTATIONS, BinaryRules
from lvpcfg.trees.binarisation import INTERMEDIATE, RIGHT, Binarisation
from lvpcfg.trees.lexicon import Lexicon
from lvpcfg.trees.spelling import CharacterNetwork
from lvpcfg.trees.treebank import Symbols

# Before this format, the representation of binary rules showed in a rank, and their tensors had other names.
FIRST_WITH_REPRESENTATION = FIRST_WITH_COARSE = 5
FIRST_WITH_CHARACTERS = 6
FIRST_WITH_DIGEST = FIRST_WITH_FOLDED_WORDS = 7
FIRST_WITH_ENVELOPE = 9
# What binarisation calls the symbols that it adds: @S, or with the siblings that it remembers @S|NP|VP.
INTERMEDIATE_SYMBOL = re.compile(r"@[^@+^|][^|]*(\|[^@+^|][^|]*)*")


@dataclass(frozen=True, eq=False)
class Model:
    """A grammar, its lexicon, how its trees are binarised, how it was made, and the coarse grammar for pruning.

    Estimators return it, and parsers need it.
    """

    grammar: Grammar
    lexicon: Lexicon
    binarisation: Binarisation
    provenance: dict[str, Any] = field(default_factory=dict)  # how it was made, as plain JSON
    coarse: CoarseGrammar | None = None  # charts are pruned by it; without one, they are filled
    envelope: Envelope | None = None  # of a compressed grammar: how far from the exact one it can be

    def save(self, path: PathLike, compressed: bool = False) -> None:
        """Writes the model into the folder `path`; a crash leaves the old model or the new one.

        What could not be loaded again is refused before anything is written. `compressed` makes the folder smaller:
        its numbers are then in a file of zstd.
        """
        save_folder(path, _description(self), _tensors(self), _ModelReader, compressed)

    @staticmethod
    def load(path: PathLike) -> "Model":
        """Reads a folder written by `save`, in the precision it was saved in, on the CPU."""
        return load_folder(path, _ModelReader)


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
    tensors |= lexical_tensors(grammar.lexical)
    if model.coarse is not None:
        coarse, cover = model.coarse.grammar.to(dtype=grammar.root.dtype), model.coarse.cover
        tensors |= {"coarse.root": coarse.root, "coarse.unary": coarse.unary}
        tensors["coarse.binary"] = coarse.binary.written_out().values
        tensors |= lexical_tensors(replace(coarse.lexical, network=None), "coarse.lexical")
        if cover is not None:
            tensors |= {f"cover.{name}": factor.to(grammar.root.dtype) for name, factor in vars(cover).items()}
    if model.envelope is not None:
        tensors |= {f"envelope.{name}": tensor for name, tensor in model.envelope.tensors.items()}
    return tensors


def _description(model: Model) -> dict[str, Any]:
    grammar, lexicon, horizontal = model.grammar, model.lexicon, model.binarisation.horizontal
    return {
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
        "envelope": None
        if model.envelope is None
        else {"compressed": model.envelope.compressed, "source": model.envelope.source},
    } | lexicon_description(lexicon, grammar.lexical)


class _ModelReader(FolderReader[Model]):
    """Builds a model of a description and tensors."""

    FORMAT, OLDEST, VERSION = GRAMMAR, 2, 9
    EXPECTED = "a grammar, as job=train makes one of trees"

    def needs_digest(self) -> bool:
        version: int = self.get("version", int)
        return version >= FIRST_WITH_DIGEST

    def held(self) -> Model:
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
            grammar,
            lexicon,
            self.binarisation(),
            self.get("provenance", dict),
            self.coarse(grammar, len(lexicon)),
            self.envelope(grammar),
        )

    def envelope(self, grammar: Grammar) -> Envelope | None:
        if self.get("version", int) < FIRST_WITH_ENVELOPE or self.description.get("envelope", {}) is None:
            return None
        about, binary = self.get("envelope", dict), grammar.binary
        if about.keys() != {"compressed", "source"} or not all(type(name) is str for name in about.values()):
            self.refuse(f"'envelope' is {show(about)}: expected the digests of two grammars")
        in_cp = binary.cp_rules if isinstance(binary, RuleCP) else torch.zeros(0, dtype=torch.int64)
        exact, widest = self.indices("envelope.exact"), max(binary.state_counts)
        if not bool(torch.isin(exact, in_cp).all()) or bool((exact[1:] <= exact[:-1]).any()):
            self.refuse("the tensor 'envelope.exact' should have numbers of its rules in CP form, ascending")
        values = self.floats("envelope.values", int(grammar.states[binary.rules[exact]].prod(1).sum()))
        covered = len(in_cp) - len(exact)
        u, v, w = (self.floats(f"envelope.{name}", covered * widest).view(covered, widest) for name in "uvw")
        if any(bool((term < 0).any()) for term in (u, v, w)):
            self.refuse("its envelope has numbers below zero")
        return Envelope(exact, values, u, v, w, about["compressed"], about["source"])

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

    def folded(self) -> bool:
        return self.get("version", int) >= FIRST_WITH_FOLDED_WORDS and super().folded()

    def network(self, lexicon: Lexicon, states: int) -> CharacterNetwork | None:
        return None if self.get("version", int) < FIRST_WITH_CHARACTERS else super().network(lexicon, states)

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
