"""Penn brackets: text -> `nltk.Tree` and back, without recursion.

Written by hand because nltk reads one tree at a time, takes the no-break spaces inside words for
separators, cannot skip a malformed tree, and does not say on which line of the file it stands.
"""

import gc
import logging
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from nltk.tree import Tree

from lvpcfg.errors import InputError, OnError, handling, show
from lvpcfg.files import PathLike, read_text, write_text
from lvpcfg.trees.walk import is_preterminal, require_tree, trees_of

log = logging.getLogger(__name__)

# "(TAG word)" or "(TAG several words)" in one match, else "(LABEL", else ")", else a bare word.
# Only ASCII white space separates: words may hold no-break and thin spaces.
TOKEN = re.compile(
    r"\(\s*(?P<label>[^\s()]*)(?:\s+(?:(?P<word>[^\s()]+)|(?P<several>[^\s()]+(?:\s+[^\s()]+)+))\s*\))?"
    r"|(?P<close>\))"
    r"|(?P<bare>[^\s()]+)",
    re.ASCII,
)
SPACE = re.compile(r"\s+", re.ASCII)
CLOSERS = re.compile(r"[\s)]*", re.ASCII)
COMMENT = re.compile(r"[ \t]*(#|\*x\*)")
ESCAPED = str.maketrans({"(": "-LRB-", ")": "-RRB-"})

UNCLOSED = "this bracket is never closed"
STRAY = "this bracket closes nothing"
EMPTY = "there is nothing in this bracket"
UNTAGGED = "this word has no tag: expected (TAG word)"
OUTSIDE = "this word stands outside of any bracket: expected a tree such as (S (NN time) (VBZ flies))"


def read_trees(path: PathLike, on_error: OnError = "raise") -> list[Tree]:
    """All trees of a bracket file (plain or gzip, UTF-8), in order.

    Trees may share a line or span many; lines between trees that begin with ``#`` (or ``*x*``, as in
    old Penn headers) are comments. Several words in one bracket, ``(NN New York)``, are one word,
    ``New_York``; how many were joined is logged.

    `on_error` is "raise", "skip" (malformed trees are left out, and their number is logged), or a
    function that is called with each error. Trees before and after an error are kept. After a
    bracket that is never closed, the next tree begins at a line that begins with a bracket and is
    indented no deeper.
    """
    scanner = _scan(read_text(path), str(path), on_error)
    if scanner.joined:
        log.warning("%s: joined the words of %d brackets, as in %s", path, len(scanner.joined), scanner.joined[0])
    return scanner.trees


def trees_from_text(text: str, name: str = "text", on_error: OnError = "raise") -> list[Tree]:
    """As `read_trees`, for text in memory; `name` stands for the file in error messages."""
    return _scan(text, name, on_error).trees


def _scan(text: str, name: str, on_error: OnError) -> "_Scanner":
    scanner = _Scanner(text)
    seen, line, problems = 0, 1, 0  # lines are counted from problem to problem, not each time from the top
    with handling(on_error, name) as report:
        with garbage_collection_paused():
            for problem in scanner.problems():
                here = problem.where
                line += text.count("\n", seen, here) if here >= seen else -text.count("\n", here, seen)
                seen, problems = here, problems + 1
                report(InputError(f"{name}, line {line}: {problem.message}: {_around(text, here)}"))
        if not scanner.trees and not problems:
            report(
                InputError(f"there is no tree in {name}: expected some, such as (S (NP (NN time)) (VP (VBZ flies))).")
            )
    return scanner


def write_trees(trees: Iterable[Tree], path: PathLike) -> None:
    """Writes trees into a file, one in each line."""
    write_text(path, "".join(format_tree(tree) + "\n" for tree in trees_of("what is to be written", trees)))


def format_tree(tree: Tree) -> str:
    """The tree on one line; brackets inside words become -LRB- and -RRB-."""
    require_tree(tree)
    pieces: list[str] = []
    todo: list[Tree | str | None] = [tree]  # None closes a bracket
    while todo:
        item = todo.pop()
        if item is None:
            pieces.append(")")
        elif isinstance(item, str):
            pieces.append(f" {_token(item)}")
        else:
            if is_preterminal(item) and not (item.label() and item[0]):
                raise InputError(f"cannot write {show(item)} as a bracketed tree: its tag or its word is empty.")
            pieces.append(f" ({_token(item.label())}" if pieces else f"({_token(item.label())}")
            todo.append(None)
            todo.extend(reversed(item))
    return "".join(pieces)


@contextmanager
def garbage_collection_paused() -> Iterator[None]:
    """Millions of nodes at once: without this, half the time goes to looking for cycles."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _around(text: str, where: int) -> str:
    """The line at position `where`, cut to what is near, with a mark before the position."""
    begin = text.rfind("\n", 0, where) + 1
    end = text.find("\n", where)
    before = text[begin:where]
    after = text[where : end if end >= 0 else len(text)]
    before = before if len(before) <= 30 else "..." + before[-30:]
    after = after if len(after) <= 40 else after[:40] + "..."
    return f"{before} >>> {after}"


class _Problem(NamedTuple):
    where: int
    message: str
    resume: int


class _Scanner:
    def __init__(self, text: str) -> None:
        self.text = text
        self.trees: list[Tree] = []
        self.joined: list[str] = []  # words made of several

    def problems(self) -> Iterator[_Problem]:
        """Collects the trees; yields each problem on the way, then goes on behind it."""
        position = 0
        begins_tree: re.Pattern[str] | None = None
        while position < len(self.text):
            end = len(self.text) if begins_tree is None else self.find(begins_tree, position + 1)
            problem = self.scan(position, end)
            if problem is None:
                position = end
                continue
            position = problem.resume
            if problem.message is UNCLOSED:
                # It may have swallowed the trees behind it: from here on, take them line by line.
                begins_tree = begins_tree or self.pattern_of_line(problem.where)
                position = self.find(begins_tree, problem.where + 1)
            yield problem

    def pattern_of_line(self, position: int) -> re.Pattern[str]:
        """Finds the lines that begin with a bracket and are indented no deeper than this one."""
        before = self.text[self.text.rfind("\n", 0, position) + 1 : position]
        return re.compile(rf"^[ \t]{{0,{len(before) - len(before.lstrip())}}}\(", re.MULTILINE)

    def find(self, pattern: re.Pattern[str], position: int) -> int:
        found = pattern.search(self.text, position)
        return found.start() if found else len(self.text)

    def scan(self, position: int, end: int) -> _Problem | None:
        """Collects the trees in text[position:end], up to the first problem."""
        text = self.text
        new = Tree.__new__  # passing by Tree.__init__ and its checks saves a quarter of the time
        parents: list[Any] = []  # the open brackets around `node`, the list of trees at the bottom
        node: Any = self.trees
        begin, joined = position, len(self.joined)  # where the tree that is open began
        fault: tuple[int, str] | None = None  # the first one in it
        while True:
            for match in TOKEN.finditer(text, position, end):
                label, word, several, close, bare = match.groups()
                if word:
                    leaf = new(Tree)
                    leaf.set_label(label)
                    leaf.append(word)
                    node.append(leaf)
                elif close:
                    if not parents:
                        run = CLOSERS.match(text, match.start(), end)
                        return _Problem(match.start(), STRAY, run.end() if run else end)
                    child, node = node, parents.pop()
                    # Some treebanks mark a dropped subject by a bracket with a label and nothing in it.
                    if not child and (not parents or not child.label()):
                        fault = fault or (match.start(), EMPTY)
                    if fault and not parents:
                        del self.joined[joined:]
                        return _Problem(*fault, resume=match.end())
                    node.append(child)
                elif several:
                    self.joined.append(SPACE.sub("_", several))
                    node.append(Tree(label, (self.joined[-1],)))
                elif not bare:
                    if not parents:
                        begin, joined = match.start(), len(self.joined)
                    parents.append(node)
                    node = new(Tree)
                    node.set_label(label)
                elif parents:
                    fault = fault or (match.start(), UNTAGGED)
                elif COMMENT.match(text, text.rfind("\n", 0, match.start()) + 1):
                    position = text.find("\n", match.end(), end)
                    break
                else:
                    bracket = text.find("(", match.end(), end)
                    return _Problem(match.start(), OUTSIDE, bracket if bracket >= 0 else end)
            else:
                if not parents:
                    return None
                del self.joined[joined:]
                return _Problem(begin, UNCLOSED, end)
            if position < 0:
                return None


def _token(text: str) -> str:
    if SPACE.search(text):
        raise InputError(f"cannot write {show(text)} as a bracketed tree: labels and words hold no white space.")
    return text.translate(ESCAPED)
