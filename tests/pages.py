"""The pages of the documentation: the blocks of code in them, and the commands.

A comment right above a block says why it does not run, or which test runs it:

    <!-- not run: needs a cluster -->
    <!-- run by tests/test_command.py -->
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
SHELL = ("sh", "console", "")  # languages of blocks with commands; "" where a block is only indented


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    text: str
    reason: str | None  # why it does not run
    test: str | None  # that runs it

    @property
    def file(self) -> str | None:
        """The file that the block shows, by the name in its first line."""
        found = re.match(r"# ([\w./-]+\.(?:py|toml|yaml))\n", self.text)
        return found[1] if found else None


def blocks(page: Path) -> list[Block]:
    """All blocks of code of a page, in their order."""
    found, comment = [], ""
    for token in _tokens(page):
        if token.type in ("fence", "code_block"):
            said = dict(re.findall(r"<!-- (not run|run by):? (.+?) -->", comment, re.DOTALL))
            language = token.info.split()[0] if token.info.strip() else ""
            line = token.map[0] + 1
            found.append(Block(page, line, language, token.content, said.get("not run"), said.get("run by")))
        comment = token.content if token.type == "html_block" else ""
    return found


def python_of(page: str) -> list[str]:
    """The Python of a page, for tests that look closer at it."""
    return [block.text for block in blocks(ROOT / page) if block.language == "python"]


def inline_commands(page: Path) -> Iterator[str]:
    """Commands within paragraphs and tables: `lvpcfg ...` and `job=NAME ...`."""
    for token in _tokens(page):
        for part in token.children or ():
            if part.type == "code_inline" and re.match(r"lvpcfg -*\w|job=[a-z]+ ", part.content):
                yield part.content if part.content.startswith("lvpcfg") else f"lvpcfg {part.content}"


def _tokens(page: Path) -> list:
    return MarkdownIt("commonmark").enable("table").parse(page.read_text(encoding="utf-8"))


def commands(text: str) -> Iterator[tuple[list[str], str]]:
    """The words of each command in lines of a shell, and the message that the line below it shows, if any.

    Where lines begin with a prompt, all others are output.
    """
    lines = text.replace("\\\n", " ").splitlines()
    prompt = "$ " if any(line.startswith("$ ") for line in lines) else ""
    for line, below in zip(lines, [*lines[1:], ""], strict=True):
        if not line.startswith(prompt):
            continue
        message = below.removeprefix("lvpcfg: ") if below.startswith("lvpcfg: ") else ""
        lexer = shlex.shlex(line.removeprefix(prompt), posix=True, punctuation_chars="|><&;")
        lexer.whitespace_split = True  # and # begins a comment
        words: list[str] = []
        for word in [*lexer, ";"]:
            if not set(word) <= set("|><&;"):
                words.append(word)
            elif words:
                yield words, message
                words = []


def options_of(words: list[str]) -> list[str] | None:
    """What a command hands to lvpcfg; None of other programs."""
    words = [word for word in words if word != "..."]
    if words[0] == "torchrun":
        words = words[next(place for place, word in enumerate(words) if word in ("run.py", "lvpcfg")) :]
    elif words[:2] == ["python", "run.py"]:
        words = words[1:]
    return words[1:] if words[0] in ("run.py", "lvpcfg") else None
