"""Penn brackets: text -> `nltk.Tree` and back, without recursion.

Written by hand because nltk reads one tree at a time, takes the no-break spaces inside words for
separators, cannot skip a malformed tree, and does not say on which line of the file it stands.
"""

import gc
import logging
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from nltk.tree import Tree

from lvpcfg.errors import InputError, show
from lvpcfg.files import PathLike, read_text, write_text

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
TREE_AT_LINE_START = re.compile(r"^\(", re.MULTILINE)
COMMENT = ("#", "*x*")
ESCAPED = str.maketrans({"(": "-LRB-", ")": "-RRB-"})

UNCLOSED = "this bracket is never closed"
STRAY = "this bracket closes nothing"
EMPTY = "there is nothing in this bracket"
UNTAGGED = "this word has no tag: expected (TAG word)"
OUTSIDE = "this word stands outside of any bracket: expected a tree such as (S (NN time) (VBZ flies))"

OnError = str | Callable[[InputError], None]


def read_trees(path: PathLike, on_error: OnError = "raise") -> list[Tree]:
    """All trees of a bracket file (plain or gzip, UTF-8), in order.

    Trees may share a line or span many; lines that begin with ``#`` between trees are comments.
    Several words in one bracket, ``(NN New York)``, are one word, ``New_York``.
    `on_error` is "raise", "skip" (malformed trees are left out; how many is logged), or a
    function that is called with each error.
    """
    return trees_from_text(read_text(path), str(path), on_error)


def trees_from_text(text: str, name: str = "text", on_error: OnError = "raise") -> list[Tree]:
    """As `read_trees`, for text in memory; `name` stands for the file in error messages."""
    trees: list[Tree] = []
    seen, line = 0, 1  # lines are counted from problem to problem, not each time from the top
    with handling(on_error, name) as report:
        with garbage_collection_paused():
            for problem in _problems(text, trees):
                here = problem.where
                line += text.count("\n", seen, here) if here >= seen else -text.count("\n", here, seen)
                seen = here
                report(InputError(f"{name}, line {line}: {problem.message}: {_around(text, here)}"))
        if not trees and not text.strip():
            report(InputError(f"{name} is empty: expected trees such as (S (NP (NN time)) (VP (VBZ flies)))."))
    return trees


def write_trees(trees: Iterable[Tree], path: PathLike) -> None:
    """One tree a line."""
    write_text(path, "".join(format_tree(tree) + "\n" for tree in trees))


def format_tree(tree: Tree) -> str:
    """The tree on one line; brackets inside words become -LRB- and -RRB-."""
    pieces: list[str] = []
    todo: list[Tree | str | None] = [tree]  # None closes a bracket
    while todo:
        item = todo.pop()
        if item is None:
            pieces.append(")")
        elif isinstance(item, str):
            pieces.append(f" {_token(item)}")
        else:
            pieces.append(f" ({_token(item.label())}" if pieces else f"({_token(item.label())}")
            todo.append(None)
            todo.extend(reversed(item))
    return "".join(pieces)


@contextmanager
def handling(on_error: OnError, name: str) -> Iterator[Callable[[InputError], None]]:
    """Turns an `on_error` option into a function to call with each error."""
    if callable(on_error):
        yield on_error
    elif on_error == "raise":
        yield _raise
    elif on_error == "skip":
        errors: list[InputError] = []
        yield errors.append
        if errors:
            log.warning("%s: skipped %d malformed pieces; the first: %s", name, len(errors), errors[0])
    else:
        raise InputError(f"on_error is {on_error!r}: expected 'raise', 'skip' or a function.")


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


def _raise(error: InputError) -> None:
    raise error


class _Problem(NamedTuple):
    where: int
    message: str
    resume: int
    in_tree: bool


def _problems(text: str, trees: list[Tree]) -> Iterator[_Problem]:
    """Appends the trees of `text` to `trees`; yields each problem, then goes on behind it."""
    position, by_line = 0, False
    while position < len(text):
        # Behind a malformed tree, which may have swallowed others, a line that begins with "(" begins a tree.
        end = _next_tree(text, position + 1) if by_line else len(text)
        problem = _scan(text, position, end, trees)
        if problem is None:
            position = end
        else:
            by_line |= problem.in_tree
            position = problem.resume
            yield problem


def _scan(text: str, position: int, end: int, trees: list[Tree]) -> _Problem | None:
    """Appends the trees in text[position:end] to `trees`, up to the first problem."""
    parents: list[Any] = []  # the open brackets around `node`, and `trees` at the bottom
    node: Any = trees
    begin = position
    while True:
        for match in TOKEN.finditer(text, position, end):
            label, word, several, close, bare = match.groups()
            if word:
                node.append(Tree(label, (word,)))
            elif close:
                if not parents:
                    return _Problem(match.start(), STRAY, match.end(), in_tree=False)
                child, node = node, parents.pop()
                # Some treebanks mark a dropped subject by a bracket with a label and nothing in it.
                if not child and (not parents or not child.label()):
                    return _Problem(match.start(), EMPTY, _next_tree(text, begin + 1), in_tree=True)
                node.append(child)
            elif several:
                node.append(Tree(label, (SPACE.sub("_", several),)))
            elif not bare:
                if not parents:
                    begin = match.start()
                parents.append(node)
                node = Tree(label, ())
            elif parents:
                return _Problem(match.start(), UNTAGGED, _next_tree(text, begin + 1), in_tree=True)
            elif bare.startswith(COMMENT):
                position = text.find("\n", match.end(), end)
                break
            else:
                bracket = text.find("(", match.end(), end)
                return _Problem(match.start(), OUTSIDE, bracket if bracket >= 0 else end, in_tree=False)
        else:
            return _Problem(begin, UNCLOSED, _next_tree(text, begin + 1), in_tree=True) if parents else None
        if position < 0:
            return None


def _next_tree(text: str, position: int) -> int:
    found = TREE_AT_LINE_START.search(text, position)
    return found.start() if found else len(text)


def _token(text: str) -> str:
    if SPACE.search(text):
        raise InputError(f"cannot write {show(text)} as a bracketed tree: labels and words hold no white space.")
    return text.translate(ESCAPED)
