"""What a tagger is: a chain over the latent states of tags, and a lexicon; and its folder.

    p(tags, words) = sum over states h of
                     p(a_1 h_1)  prod_t p(w_t | a_t h_t)  prod_t p(a_{t+1} h_{t+1} | a_t h_t)  p(end | a_n h_n)

Every tag has m states; with m = 1 it is the hidden Markov model (the LVG taggers of Zhao, Zhang & Tu 2018).
"""

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from lvpcfg.files import PathLike
from lvpcfg.grammar.folder import TAGGER, FolderReader, lexical_tensors, lexicon_description, load_folder, save_folder
from lvpcfg.grammar.reader import MOST_STATES
from lvpcfg.sequence.chain import Chain
from lvpcfg.trees.conllu import COLUMNS
from lvpcfg.trees.lexicon import LexicalTable, Lexicon


@dataclass(frozen=True, eq=False)
class TagChain:
    """The numbers of a tagger. State h of tag a is a * states + h."""

    tags: tuple[str, ...]
    states: int  # of each tag
    chain: Chain  # with final weights: those that a sentence ends
    lexical: LexicalTable

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> "TagChain":
        chain = self.chain.change(lambda tensor: tensor.to(device, dtype))
        return replace(self, chain=chain, lexical=self.lexical.to(device, dtype))


@dataclass(frozen=True, eq=False)
class TaggingModel:
    """The model of a tagger: a chain over the states of tags, and a lexicon.

    Estimators make it from tagged sentences, and a `Tagger` needs it.
    """

    grammar: TagChain
    lexicon: Lexicon
    column: str = "upos"  # of CoNLL-U, that its tags stand in
    provenance: dict[str, Any] = field(default_factory=dict)  # how it was made, as plain JSON

    def save(self, path: PathLike) -> None:
        """Writes the model into the folder `path`, as `Model.save` does."""
        grammar = self.grammar
        description = {
            "provenance": self.provenance,
            "tags": list(grammar.tags),
            "states": grammar.states,
            "column": self.column,
        } | lexicon_description(self.lexicon, grammar.lexical)
        assert grammar.chain.final is not None
        tensors = {
            "initial": grammar.chain.initial,
            "transition": grammar.chain.transition,
            "final": grammar.chain.final,
        } | lexical_tensors(grammar.lexical)
        save_folder(path, description, tensors, _TaggingReader)

    @staticmethod
    def load(path: PathLike) -> "TaggingModel":
        """Reads a folder written by `save`, in the precision it was saved in, on the CPU."""
        return load_folder(path, _TaggingReader)


class _TaggingReader(FolderReader[TaggingModel]):
    """Builds a tagger of a description and tensors."""

    FORMAT, OLDEST, VERSION = TAGGER, 1, 2
    EXPECTED = "a tagger, as job=train makes one of tagged sentences"
    TYPED_BY = "initial"

    def held(self) -> TaggingModel:
        tags, states, column, lexicon = (
            self.names("tags"),
            self.get("states", int),
            self.get("column", str),
            self.lexicon(),
        )
        if not tags or not 1 <= states <= MOST_STATES:
            self.refuse(f"it has {len(tags)} tags of {states} states: expected one or more of both")
        if column not in COLUMNS:
            self.refuse(f"'column' is {column!r}: expected {' or '.join(COLUMNS)}")
        every = len(tags) * states
        initial, final = self.floats("initial", every), self.floats("final", every)
        transition = self.floats("transition", every * every)
        lexical = replace(self.lexical(len(lexicon), every), network=self.network(lexicon, every))
        for tensor in (initial, transition, final, lexical.value, lexical.weight, lexical.backoff):
            if bool((tensor < 0).any()):
                self.refuse("it has numbers below zero")
        chain = Chain(initial, (transition.view(every, every),), final)
        return TaggingModel(TagChain(tags, states, chain, lexical), lexicon, column, self.get("provenance", dict))
