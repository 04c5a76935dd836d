"""Where a model is: in a folder; as grammars of a product in the folders 0, 1, ... of one; or in lvpcfg, by name."""

import os
from itertools import count, takewhile
from pathlib import Path

from lvpcfg.files import PathLike, place
from lvpcfg.grammar.reader import JSON

PROVIDED = Path(__file__).parents[1] / "models"  # those that come with lvpcfg


def provided() -> list[str]:
    """The names of the models that come with lvpcfg."""
    return sorted(path.name for path in PROVIDED.glob("*") if path.is_dir())


def located(path: PathLike) -> Path:
    """The folder of a model. A name of `provided`, unless there is a folder of that name, is one of lvpcfg's own."""
    folder = place(path)
    if folder.parts and folder.parts[0] in provided() and ".." not in folder.parts and not os.path.exists(folder):
        return PROVIDED / folder
    return folder


def parts(path: PathLike) -> list[Path]:
    """The folders of the grammars of a model: its own, or those of a product."""
    folder = located(path)
    if os.path.isfile(folder / JSON):
        return [folder]
    numbered = (folder / str(number) for number in count())
    return [*takewhile(lambda each: os.path.isfile(each / JSON), numbered)] or [folder]
