"""A hook of mkdocs: pages that stand at the root of the project, where people and their hosts look for them."""

from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGES = {"contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}


def on_files(files: Any, config: Any) -> None:
    from mkdocs.structure.files import File

    for name, source in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8").replace("](docs/", "](")
        files.append(File.generated(config, name, content=text))
