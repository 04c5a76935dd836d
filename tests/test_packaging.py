"""The command works from any folder after each kind of installation."""

import json
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

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


@pytest.mark.parametrize("kind", ["wheel", "sdist", "editable"])
def test_the_command_works_from_another_folder(built, tmp_path, kind):
    # A new environment that sees this one's libraries, but not this one's lvpcfg.
    venv.create(tmp_path / "env", with_pip=False, symlinks=True)
    python = tmp_path / "env/bin/python"
    packages = Path(check(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path).strip())
    (packages / "libraries.pth").write_text(sysconfig.get_path("purelib"))
    install = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index")
    if kind == "editable":
        check(*install, "--no-build-isolation", "-e", ROOT, cwd=tmp_path)
    else:
        (wheel,) = (built / kind).glob("*.whl")
        check(*install, wheel, cwd=tmp_path)

    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    where = check(python, "-c", "from lvpcfg.jobs.config import folder; print(folder())", cwd=elsewhere).strip()
    assert Path(where) == (ROOT / "conf" if kind == "editable" else packages / "lvpcfg/conf")
    printed = check(tmp_path / "env/bin/lvpcfg", "job=train", "hydra.run.dir=out", cwd=elsewhere)
    assert printed.strip().split("\n")[-1] == str(elsewhere / "out")
    assert json.loads((elsewhere / "out/result.json").read_text())["trees"] == 2000
