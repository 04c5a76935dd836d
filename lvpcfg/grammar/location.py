"""Where a model is: in a folder; as grammars of a product in the folders 0, 1, ... of one; or in lvpcfg, by name."""

import os
import re
from pathlib import Path

from lvpcfg.errors import InputError, show
from lvpcfg.files import PathLike, place
from lvpcfg.grammar.reader import JSON

PROVIDED = Path(__file__).parents[1] / "models"  # those that come with lvpcfg


def provided() -> list[str]:
    """The names of the models that come with lvpcfg."""
    return sorted(path.name for path in PROVIDED.glob("*") if path.is_dir())


def located(path: PathLike) -> Path:
    """The folder of a model. A name of `provided` is one of lvpcfg's, unless a folder of that name holds a model."""
    folder = place(path)
    named = folder.parts and folder.parts[0] in provided() and ".." not in folder.parts
    return PROVIDED / folder if named and not _holds_model(folder) else folder


def _holds_model(folder: Path) -> bool:
    return any(os.path.isfile(each / JSON) for each in (folder, folder / "0"))


def parts(path: PathLike) -> list[Path]:
    """The folders of the grammars of a model: its own, or those of a product."""
    folder = located(path)
    if os.path.isfile(folder / JSON):
        return [folder]
    numbers = sorted(int(each.name) for each in folder.glob("*") if re.fullmatch(r"0|[1-9][0-9]{0,5}", each.name))
    missing = [number for number in range(len(numbers)) if not os.path.isfile(folder / str(number) / JSON)]
    if missing:
        found = ", ".join(map(str, numbers))
        raise InputError(
            f"{show(os.fspath(path), 200)} has the folders {found}, and there is no grammar in {missing[0]}: "
            f"expected those of a product, from 0 to {len(numbers) - 1}."
        )
    return [folder / str(number) for number in numbers] or [folder]
