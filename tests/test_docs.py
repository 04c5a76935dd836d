"""The documentation: its Python runs, its commands have right options, and the generated pages leave nothing out."""

import re
import shutil
import sys
from functools import lru_cache
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import yaml
from hydra import compose
from pages import PAGES, ROOT, SHELL, blocks, commands, inline_commands, options_of
from running import every_entry

import lvpcfg
from lvpcfg.estimate import features
from lvpcfg.jobs import arguments
from lvpcfg.jobs.config import GROUPS
from lvpcfg.registry import ESTIMATORS, JOBS, configuration_folder
from lvpcfg.trees import signatures

sys.path.append(str(ROOT / "docs/generate"))
import api
import options

import notebooks

NAMES = [page.relative_to(ROOT).as_posix() for page in PAGES]
PROGRAMS = ["cat", "cd", "curl", "docker", "echo", "git", "jupyter", "mkdocs", "mypy", "pip", "pytest", "ruff"]
PROGRAMS += ["tensorboard", "zcat"]  # that pages call, other than lvpcfg and python


@pytest.fixture(scope="session")
def material(tmp_path_factory):
    """What pages take for granted: treebanks, sentences, a model."""
    folder = tmp_path_factory.mktemp("material")
    short = sorted(lvpcfg.corpus("train")[:60], key=lambda tree: len(tree.leaves()))[:12]
    trees = {"train": lvpcfg.corpus("train")[:60], "dev": lvpcfg.corpus("dev")[:8], "gold": short}
    for split, some in trees.items():
        lvpcfg.write_trees(some, folder / f"{split}.mrg")
        text = []
        for tree in some:
            pairs = enumerate(lvpcfg.normalise(tree).pos(), 1)
            text += [f"{number}\t{word}\t_\t{tag}\t{tag}\t_\t_\t_\t_\t_\n" for number, (word, tag) in pairs] + ["\n"]
        (folder / f"{split}.conllu").write_text("".join(text))
    (folder / "sents.txt").write_text("The dog barks .\nNo .\n")
    lvpcfg.train(trees["train"], "em", states=2, iterations=3).save(folder / "model")
    return folder


@pytest.fixture
def place(material, tmp_path, monkeypatch):
    """A folder to run in, with the material. What a page registers goes again."""
    shutil.copytree(material, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    torch.manual_seed(0)
    for registry in (ESTIMATORS, JOBS):
        monkeypatch.setattr(registry, "_entries", every_entry(registry))
    with patch.dict(features.INSIDE), patch.dict(features.OUTSIDE), patch.dict(signatures.SIGNATURES):
        yield tmp_path


# ---------------------------------------------------------------- what runs


@pytest.mark.parametrize("name", NAMES)
def test_the_python_of_a_page_runs(name, place):
    """In one namespace, from top to bottom; blocks that show a file are written to it."""
    names = {"__name__": "page"}
    for block in blocks(ROOT / name):
        if block.language != "python" or block.reason or block.test:
            continue
        if block.file:
            (place / block.file).parent.mkdir(parents=True, exist_ok=True)
            (place / block.file).write_text(block.text)
        else:
            exec(compile("\n" * block.line + block.text, ROOT / name, "exec"), names)


@pytest.mark.parametrize("name", NAMES)
def test_the_commands_of_a_page_have_right_options(name):
    for block in blocks(ROOT / name):
        if block.language in SHELL and not block.reason and not block.test:
            for words, message in commands(block.text):
                check(words, message)
    for text in inline_commands(ROOT / name):
        for words, message in commands(text):
            check(words, message)


@pytest.fixture(scope="session", autouse=True)
def composed_once():
    """Composing takes Hydra longer than all else, and most commands begin with the same."""
    composed = lru_cache(lambda name, overrides, **how: compose(name, overrides=list(overrides), **how))
    with patch.object(arguments, "compose", lambda name, overrides, **how: composed(name, tuple(overrides), **how)):
        yield


@lru_cache
def problem(*given):
    return None if {"--help", "--version", "--cfg"} & {*given} else arguments.problem_with(given)


def check(words, message=""):
    given = options_of(words)
    if given is not None and "job=NAME" not in given:
        assert problem(*given) == (message or None), " ".join(words)
    elif given is None and words[0] == "python" and words[1].startswith("benchmarks/"):
        source = (ROOT / words[1]).read_text(encoding="utf-8")
        for option in words[2:]:
            assert not option.startswith("--") or f'"{option}"' in source, f"{words[1]} has no option {option}"
    elif given is None:
        assert words[0] in PROGRAMS, (
            f"{words[0]}: is this a command? If not, give the block another language, as ```text."
        )


@pytest.mark.parametrize("name", NAMES)
def test_what_does_not_run_says_why_or_by_whom(name):
    for block in blocks(ROOT / name):
        assert not (block.reason and block.test)
        if block.test:
            assert name in (ROOT / block.test).read_text(encoding="utf-8"), f"{block.test} says nothing of {name}"
        if block.language in ("yaml", "toml"):
            assert block.test or block.reason, f"{name}, line {block.line}: nothing reads this block"


@pytest.mark.parametrize("path", sorted(configuration_folder().glob("job/*.yaml")), ids=lambda path: path.stem)
def test_the_commands_of_help_have_right_options(path):
    for line in options.read(path).comment:
        if line.startswith(" "):
            for words, message in commands(line.strip()):
                check(words, message)


# ---------------------------------------------------------------- the site


def test_every_page_is_in_the_navigation():
    def pages(items):
        for item in items:
            for value in item.values() if isinstance(item, dict) else [item]:
                yield from pages(value) if isinstance(value, list) else [value]

    class Loader(yaml.SafeLoader):
        pass

    placed = list(pages(yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader)["nav"]))
    assert len(placed) == len(set(placed))
    written = {path.name for path in ROOT.glob("docs/*.md")}
    made = {"options.md", "api.md", "contributing.md", "changelog.md"}
    made |= {name for name, _ in notebooks.pages() if name.endswith(".md")}
    assert set(placed) == written | made


def test_every_option_is_on_the_page_of_options():
    shown = set(re.findall(r"^\| `([\w.]+)` \|", "\n".join(options.page()), re.MULTILINE))
    expected = {name for job in JOBS.names() if JOBS.has_file(job) for name in options.types(JOBS[job].options)}
    for group, (names, options_of_group) in GROUPS.items():
        expected |= {
            f"{group}.{option}"
            for one in names()
            if (configuration_folder() / group / f"{one}.yaml").exists()
            for option in options.types(options_of_group(one))
        }
    assert shown == {name for name in expected if not name.endswith(".name") and name not in GROUPS}


def test_comments_stay_with_their_options(tmp_path):
    (tmp_path / "some.yaml").write_text(
        "# about\ndefaults:\n  - _self_\n\nname: x\nplain: 1           # of one line,\n"
        "                   # and of two\n# above: what it means\nsaid: null\n# of objective=sentence\nlater: a  # b\n"
        "group:\n  inner: [1, 2]  # c\nouter: 2\n"
    )
    found = {option.name: option for option in options.read(tmp_path / "some.yaml").options}
    assert list(found) == ["name", "plain", "said", "later", "group.inner", "outer"]
    assert found["plain"].meaning == ["of one line,", "and of two"]
    assert found["said"].meaning == ["above: what it means"]
    assert (found["later"].meaning, found["later"].heading) == (["b"], "of objective=sentence")
    assert (found["group.inner"].default, found["group.inner"].meaning) == ("[1, 2]", ["c"])


def test_the_api_reference_has_every_public_name():
    text = "\n".join(api.page())
    for name in lvpcfg.__all__:
        assert re.search(rf"^::: lvpcfg\.(\w+\.)*{name}$", text, re.MULTILINE), name
    assert "## Others" not in text, "give new names a section in docs/generate/api.py"


def test_the_readme_is_short_and_has_the_two_commands():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert text.count("\n") <= 150
    assert "pip install -e . && python run.py\n" in text
    assert 'pip install -e ".[dev]" && pytest\n' in text


@pytest.mark.parametrize("name", NAMES)
def test_links_between_pages_lead_somewhere(name):
    made = {"options.md", "api.md", "changelog.md", "contributing.md"} | {one for one, _ in notebooks.pages()}
    for target in re.findall(r"\]\(([^)#\s]+)", (ROOT / name).read_text(encoding="utf-8")):
        if not target.startswith("http") and not target.startswith("mailto"):
            folder = (ROOT / name).parent
            assert (folder / target).exists() or target in made, f"{name}: {target}"
            assert Path(target).suffix != ".py", f"{name}: the site has no {target}"
