"""The command works from any folder after each kind of installation."""

import json
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from zipfile import ZipFile

import pytest

from lvpcfg import corpus, write_trees

ROOT = Path(__file__).parents[1]


def check(*command, cwd):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    line = [str(part) for part in command]
    done = subprocess.run(line, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """An sdist, a wheel built from it, and a wheel built straight from the checkout."""
    folder = tmp_path_factory.mktemp("dist")
    build = (sys.executable, "-m", "build", "--no-isolation", str(ROOT))
    check(*build, "--outdir", folder / "sdist", cwd=ROOT)
    check(*build, "--wheel", "--outdir", folder / "wheel", cwd=ROOT)
    return folder


def test_a_wheel_is_the_same_from_the_checkout_and_from_an_sdist(built):
    wheels = []
    for kind in ("wheel", "sdist"):
        (path,) = (built / kind).glob("*.whl")
        with ZipFile(path) as archive:
            wheels.append({name: archive.read(name) for name in archive.namelist()})
    assert "lvpcfg/conf/config.yaml" in wheels[0]
    assert "lvpcfg/serve/page.html" in wheels[0]
    assert wheels[0] == wheels[1]
    (entries,) = (data.decode() for name, data in wheels[0].items() if name.endswith("entry_points.txt"))
    assert "[spacy_factories]\nlvpcfg = lvpcfg.spacy_component:make" in entries  # spaCy finds it without an import


@pytest.mark.parametrize("kind", ["wheel", "editable"])
def test_the_command_works_from_another_folder(built, tmp_path, kind):
    # A new environment that sees this one's libraries, but not this one's lvpcfg.
    venv.create(tmp_path / "env", with_pip=False, symlinks=True)
    python = tmp_path / "env/bin/python"
    packages = Path(sysconfig.get_path("purelib", "posix_prefix", {"base": str(tmp_path / "env")}))
    (packages / "libraries.pth").write_text(sysconfig.get_path("purelib"))
    install = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index")
    if kind == "editable":
        check(*install, "--no-build-isolation", "-e", ROOT, cwd=tmp_path)
    else:
        (wheel,) = (built / kind).glob("*.whl")
        check(*install, wheel, cwd=tmp_path)

    elsewhere = tmp_path / "elsewhere"
    write_trees(corpus("dev")[:20], elsewhere / "trees.mrg")
    script = "from importlib.util import find_spec; print(find_spec('lvpcfg').origin)"
    where = Path(check(python, "-c", script, cwd=elsewhere).strip())
    assert where == (ROOT if kind == "editable" else packages) / "lvpcfg/__init__.py"
    options = ("job=train", "data.train=trees.mrg", "hydra.run.dir=out")
    printed = check(tmp_path / "env/bin/lvpcfg", *options, cwd=elsewhere)
    assert printed.strip().split("\n")[-1] == str(elsewhere / "out")
    assert json.loads((elsewhere / "out/result.json").read_text())["trees"] == 20
