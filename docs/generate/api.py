"""A hook of mkdocs: `api.md`, an entry for each name in `lvpcfg.__all__`. mkdocstrings fills in docstrings."""

from collections.abc import Iterator
from typing import Any

SECTIONS = {
    "Models": ["train", "Model", "Grammar", "compress", "generate", "tightness", "renormalise", "check_invariance"],
    "Parsing": ["Parser", "Parse", "Span", "Certificate", "calibrate", "Calibration", "evaluate"],
    "Tagging": ["Tagger", "TaggingModel"],
    "Trees and words": [
        *["read_trees", "write_trees", "read_conllu", "read_berkeley", "corpus", "normalise", "Binarisation"],
        *["binarise", "debinarise", "Treebank", "build_treebank", "register_signature"],
    ],
    "Features of nodes": ["inside_feature", "outside_feature"],
    "Errors": ["InputError"],
}
MODULES = {"distributions": "Distributions", "nn": "Modules", "sequence": "Sequences"}


def page() -> Iterator[str]:
    import lvpcfg

    placed = {name for names in SECTIONS.values() for name in names} | set(MODULES)
    yield "# API reference\n"
    yield "Everything that `import lvpcfg` offers. Modules are imported when they are used first.\n"
    sections = SECTIONS | {"Others": [name for name in lvpcfg.__all__ if name not in placed]}
    for title, names in sections.items():
        if names:
            yield f"## {title}\n"
            yield from (f"::: lvpcfg.{lvpcfg._MODULES[name]}.{name}\n" for name in names)
    for module, title in MODULES.items():
        yield f"## {title}: `lvpcfg.{module}` {{#{title.lower()}}}\n"
        yield f"::: lvpcfg.{module}\n    options:\n      show_root_heading: false\n      show_root_toc_entry: false\n"


def on_files(files: Any, config: Any) -> None:
    from mkdocs.structure.files import File

    files.append(File.generated(config, "api.md", content="\n".join(page())))
