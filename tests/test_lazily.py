"""Each in a process of its own, since what has been imported stays imported."""

import subprocess
import sys

import pytest

SAME = "assert nltk.Tree is nltk.tree.Tree is lvpcfg.parser.Tree and issubclass(lvpcfg.Parser, nltk.parse.ParserI)"


def run(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_package_alone_imports_little():
    run("import lvpcfg, sys; assert not {'scipy', 'nltk.corpus', 'nltk.parse.chart'} & set(sys.modules)")


@pytest.mark.parametrize(
    "statements",
    [
        "import nltk; nltk.word_tokenize",
        "from nltk import *; Tree, PCFG, word_tokenize",
        "from nltk.corpus import treebank",
        "from nltk.parse.viterbi import ViterbiParser as V; import nltk.parse; assert nltk.parse.ViterbiParser is V",
        "import nltk.parse; nltk.parse.ViterbiParser",
        "import nltk\ntry: nltk.nonsense\nexcept AttributeError: pass\nelse: assert False",
    ],
)
def test_all_of_nltk_is_there_for_those_who_ask(statements):
    run(f"import lvpcfg\n{statements}\nimport nltk\n{SAME}")


def test_nltk_that_was_there_before_is_left_alone():
    run(f"import nltk.parse.chart, lvpcfg\n{SAME}")
