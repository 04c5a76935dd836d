"""What the states of a spectral model are: directions in the space of features, with their singular values."""

from dataclasses import dataclass
from typing import Any

from lvpcfg.errors import InputError, show
from lvpcfg.grammar.model import Model


@dataclass(frozen=True)
class Directions:
    """Of a symbol. The first state is constant, the next ones are the directions with the largest singular values."""

    singular_values: tuple[float, ...]  # of all directions, also of those that give no state
    inside: tuple[tuple[str, ...], ...]  # of each state but the first the features that weigh most, with their signs
    outside: tuple[tuple[str, ...], ...]


def directions_of(model: Model) -> dict[str, Directions]:
    """By symbol: of those that have directions. It is told by the model's provenance."""
    made = model.provenance
    if made.get("estimator") != "spectral":
        return {}
    states = dict(zip(model.grammar.symbols.names, model.grammar.states.tolist(), strict=True))
    try:
        return {name: _directions(states[name], **about) for name, about in made["symbols"].items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(
            f"the model says that estimator=spectral made it, but not what its states are ({show(str(error))}): train "
            "it again."
        ) from None


def _directions(states: int, singular_values: Any, inside: Any, outside: Any) -> Directions:
    found = Directions(
        tuple(map(float, singular_values)),
        *(tuple(tuple(map(str, features)) for features in side) for side in (inside, outside)),
    )
    if not len(found.inside) == len(found.outside) == states - 1 <= len(found.singular_values):
        raise ValueError(f"{len(found.inside)} directions for {states} states")
    return found
