"""A hook of mkdocs: `options.md`, every option of every job, with its type, its default and what `conf/` says of it."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import yaml

START = """\
# Options of all jobs

This page is made of the files in `conf/`. `lvpcfg job=NAME --help` shows the same in a terminal.

| for every job | |
|---|---|
| `hydra.run.dir=FOLDER` | the run folder, in place of `runs/JOB/DATE_TIME` |
| `-m` | a sweep: one run for each value, as in `binarisation.horizontal=0,1,2` |
| `hydra.sweep.dir=FOLDER` | the folder of a sweep |
| `--cfg job` | show the options without running |
| `--help`, `--version` | |
"""

WORDS = {
    **{"str": "text", "int": "whole number", "float": "number", "bool": "true | false"},
    **{"None": "null", "NoneType": "null", "typing.Any": "", "Any": ""},
}


@dataclass
class Option:
    name: str
    default: str
    meaning: list[str] = field(default_factory=list)
    heading: str = ""  # of this option and those behind it


@dataclass
class Page:
    """One file of `conf/`."""

    comment: list[str]
    parts: list[Any]  # of what else it is composed
    options: list[Option]


def read(path: Path) -> Page:
    lines = path.read_text(encoding="utf-8").splitlines()
    start = next((number for number, line in enumerate(lines) if not line.startswith("#")), len(lines))
    comment = [line[2:] for line in lines[:start] if "@package" not in line]
    parts = (yaml.safe_load("\n".join(lines)) or {}).get("defaults", [])
    if parts:
        start = lines.index("", start) + 1 if "" in lines[start:] else len(lines)
    return Page(comment, parts, list(_options(lines[start:])))


def _options(lines: list[str]) -> Iterator[Option]:
    """A comment behind an option or in deep indentation below it is about it; one above it, about what follows."""
    above: list[str] = []
    group, option = "", None
    for line in lines:
        indentation = len(line) - len(line.lstrip())
        if line.lstrip().startswith("#"):
            text = line.strip("# ")
            if indentation > 8 and option is not None:
                option.meaning.append(text)
            else:
                above.append(text)
            continue
        found = re.fullmatch(r"\s*(\w+):\s*(.*?)\s*(?:#\s*(.*))?", line)
        if found is None:
            continue
        name, default, behind = found.groups()
        if not default and behind is None:
            group = f"{name}."
            continue
        group = group if indentation else ""
        option = Option(group + name, default, [behind] if behind else [])
        if above and behind and above[0].startswith("of "):
            option.heading = " ".join(above)
        else:
            option.meaning[:0] = above
        above = []
        yield option


def types(options: type, prefix: str = "") -> dict[str, str]:
    """The type of each option, by its dotted name."""
    found: dict[str, str] = {}
    hints = get_type_hints(options)
    for name in (one.name for one in fields(options)):
        kind = hints[name]
        if isinstance(kind, type) and is_dataclass(kind):
            found |= types(kind, f"{prefix}{name}.")
        else:
            text = kind.__name__ if isinstance(kind, type) and not hasattr(kind, "__args__") else str(kind)
            found[prefix + name] = re.sub(r"[\w.]+", lambda word: WORDS.get(word[0], word[0]), text)
    return found


def table(options: list[Option], kinds: dict[str, str], prefix: str = "") -> Iterator[str]:
    yield "| option | type | default | |"
    yield "|---|---|---|---|"
    for option in options:
        if option.name in ("name", "job"):
            continue
        if option.heading:
            yield f"| | | | *{_cell(option.heading)}* |"
        kind, meaning = kinds.get(option.name, ""), "<br>".join(map(_cell, option.meaning))
        yield f"| `{prefix}{option.name}` | {_cell(kind)} | `{option.default}` | {meaning} |"
    yield ""


def _cell(text: str) -> str:
    """Text as it is, within a table."""
    return re.sub(r"([\\|*_<>\[\]~^$])", r"\\\1", text)


def page() -> Iterator[str]:
    from lvpcfg.jobs.config import GROUPS
    from lvpcfg.jobs.options import BinarisationOptions, DeviceOptions, ParserOptions, TreebankOptions
    from lvpcfg.registry import JOBS, configuration_folder

    conf = configuration_folder()
    yield START
    yield "## Jobs\n"
    for path in sorted((conf / "job").glob("*.yaml")):
        yield from _job(read(path), path.stem, types(JOBS[path.stem].options))
    for group, (_, options_of) in GROUPS.items():
        title = {"estimator": "Estimators", "decompose": "Decompositions"}.get(group, group)
        yield f"## {title}\n"
        yield f"What may stand behind `{group}=`. Their options begin with `{group}.`\n"
        for path in sorted((conf / group).glob("*.yaml")):
            found = read(path)
            yield f"### {group}={path.stem} {{#{group}-{path.stem}}}\n"
            yield " ".join(found.comment) + "\n"
            if any(option.name != "name" for option in found.options):
                yield from table(found.options, types(options_of(path.stem)), f"{group}.")
    yield "## Shared options\n"
    shared = {"device": DeviceOptions, "parser": ParserOptions, "treebank": TreebankOptions}
    for name, options in shared.items():
        found = read(conf / "shared" / f"{name}.yaml")
        yield f"### {' '.join(found.comment)} {{#shared-{name}}}\n"
        kinds = types(options) | types(BinarisationOptions, "binarisation.")
        yield from table(found.options, kinds)


def _job(found: Page, name: str, kinds: dict[str, str]) -> Iterator[str]:
    about, *rest = found.comment
    usage = [line.strip() for line in rest if line.startswith(" ")]
    notes = [line for line in rest if not line.startswith(" ")]
    yield f"### job={name} {{#job-{name}}}\n"
    yield f"{about[0].upper()}{about[1:]}.\n"
    yield "```sh\n" + "\n".join(usage) + "\n```\n"
    if notes:
        yield " ".join(notes) + "\n"
    if any(option.name != "job" for option in found.options):
        yield from table(found.options, kinds)
    others = [_part(part) for part in found.parts if part != "_self_"]
    if others:
        yield f"Also: {', '.join(others)}.\n"


def _part(part: Any) -> str:
    if isinstance(part, str):
        name = part.rsplit("/", 1)[-1]
        title = {"device": "where the work is done", "parser": "how sentences are parsed"}
        return f"[{title.get(name, 'how trees become rules')}](#shared-{name})"
    ((group, default),) = part.items()
    group = group.strip("/")
    return f"[`{group}=`](#{group}s), `{default}` unless another is chosen".replace("#decomposes", "#decompositions")


def on_files(files: Any, config: Any) -> None:
    from mkdocs.structure.files import File

    files.append(File.generated(config, "options.md", content="\n".join(page())))
