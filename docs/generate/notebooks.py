"""A hook of mkdocs: each notebook as a page, with the outputs that are saved in it."""

import base64
import json
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"


def pages() -> Iterator[tuple[str, str | bytes]]:
    """Names below docs/ and what they hold: pages, and the pictures in them."""
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        pictures: dict[str, bytes] = {}
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        parts = [part for cell in cells for part in _cell(cell, path.stem, pictures)]
        note = f"*This page is the notebook `notebooks/{path.name}`, with its outputs.*"
        parts.insert(1, note)
        yield f"notebooks/{path.stem}.md", "\n\n".join(parts) + "\n"
        yield from ((f"notebooks/{name}", content) for name, content in pictures.items())


def _cell(cell: dict[str, Any], name: str, pictures: dict[str, bytes]) -> Iterator[str]:
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        yield source.replace("](../docs/", "](../")
        return
    yield f"```python\n{source}\n```"
    for output in cell["outputs"]:
        data = output.get("data", {})
        if "image/png" in data:
            picture = f"{name}_{len(pictures)}.png"
            pictures[picture] = base64.b64decode(data["image/png"])
            yield f"![output of the code above]({picture})"
        else:
            text = "".join(output.get("text", data.get("text/plain", "")))
            yield textwrap.indent(text.rstrip("\n"), "    ")


def on_files(files: Any, config: Any) -> None:
    from mkdocs.structure.files import File

    for name, content in pages():
        files.append(File.generated(config, name, content=content))
