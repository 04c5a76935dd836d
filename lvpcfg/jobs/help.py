"""--help: what stands in `conf/`, with its comments.

It is read as text, since Hydra takes longer to import than an answer should take.
"""

from collections.abc import Iterator, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from textwrap import indent

import yaml

from lvpcfg.errors import expect
from lvpcfg.registry import ESTIMATORS, JOBS, Registry, configuration_folder

TITLE = "lvpcfg: latent-variable PCFGs, learned from treebanks and run in batches with PyTorch."
USAGE = """\
lvpcfg job=parse --help          how a job is called, and its options with their defaults
lvpcfg -m job=train seed=0,1,2   one run for each value
lvpcfg job=train --cfg job       show the options without running
lvpcfg --version
Every job prints its run folder last, with config.yaml and result.json; hydra.run.dir=DIR sets it."""
WELCOME = """\
lvpcfg learns latent-variable PCFGs from treebanks, makes them small and fast, and parses corpora with them.

    lvpcfg job=train estimator=split_merge data.train=FILE data.dev=FILE   # a grammar of a treebank
    lvpcfg job=inspect model=FOLDER                                        # what its states stand for
    lvpcfg job=compress model=FOLDER                                       # a smaller and faster one
    lvpcfg job=parse model=FOLDER input=FILE output=FILE                   # trees of a corpus
    lvpcfg job=evaluate model=FOLDER gold=FILE                             # scores, as EVALB gives them
    lvpcfg --help                                                          # all jobs

Without options it runs job=demo, about a minute on its own corpus:"""


def page(arguments: Sequence[str]) -> str:
    """Of all jobs, or of the one that is chosen."""
    chosen = dict(argument.split("=", 1) for argument in arguments if "=" in argument)
    return "\n".join(_job(chosen) if "job" in chosen else _all_jobs()) + "\n"


def _all_jobs() -> Iterator[str]:
    """On one screen: a line for each."""
    yield from (TITLE, "")
    names = JOBS.names()
    width = max(map(len, names))
    for name in names:
        about = _File(JOBS.file(name)).comment[0] if JOBS.has_file(name) else f"see lvpcfg job={name} --help"
        yield f"job={name:{width}}  {about}"
    yield from ("", USAGE)


def _job(chosen: dict[str, str]) -> Iterator[str]:
    name = chosen["job"]
    if JOBS.has_file(name):
        file = _File(JOBS.file(name))
        yield from (*file.comment, "", *file.options(chosen))
    else:
        yield from _without_file(JOBS, name)


def _without_file(registry: Registry, name: str) -> Iterator[str]:
    """What the class of its options says."""
    entry = registry[name]
    yield from ((entry.run.__doc__ or f"{registry.group}={name}").strip(), "")
    for field in fields(entry.options):
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        yield f"{field.name}: {'null' if default is None else default}"


class _File:
    """One file of `conf/`: a comment, what else it is composed of, and options."""

    def __init__(self, path: Path) -> None:
        text = path.read_text(encoding="utf-8")
        lines = text.splitlines()
        start = next(number for number, line in enumerate(lines) if not line.startswith("#"))
        self.comment = [line[2:] for line in lines[:start] if "@package" not in line]
        self.parts = (yaml.safe_load(text) or {}).get("defaults", [])
        rest = iter(lines[start:])
        if self.parts:
            for line in rest:  # its own lines come after an empty one
                if not line:
                    break
        self.body = list(rest)

    def options(self, chosen: dict[str, str]) -> Iterator[str]:
        """All lines of options, in the order of the parts; of a group, those of what is chosen from it."""
        for part in self.parts or ["_self_"]:
            if part == "_self_":
                yield from self.body
            elif isinstance(part, str):
                file = _File(configuration_folder() / f"{part.strip('/')}.yaml")
                yield from ("", *(f"# {line}" for line in file.comment), *file.options(chosen))
            else:
                ((group, default),) = part.items()
                yield ""
                yield from _group(group.strip("/"), chosen.get(group.strip("/"), default), chosen)


def _group(group: str, name: str, chosen: dict[str, str]) -> Iterator[str]:
    """What is chosen from a group, and what else can be."""
    folder = configuration_folder() / group
    names = ESTIMATORS.names() if group == ESTIMATORS.group else sorted(path.stem for path in folder.glob("*.yaml"))
    expect(group, name, names)
    yield f"{group}:  # {group}={' or '.join(names)}, each with options of its own; {group}={name}:"
    if (folder / f"{name}.yaml").exists():
        file = _File(folder / f"{name}.yaml")
        lines = [*(f"# {line}" for line in file.comment), *file.options(chosen)]
    else:
        lines = list(_without_file(ESTIMATORS, name))
    yield indent("\n".join(lines), "  ")
