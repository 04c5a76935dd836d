"""A hook of mkdocs: formulas become MathML, which browsers draw by themselves.

The extension `arithmatex` finds `$...$` and `$$...$$` and keeps their LaTeX in the page.
"""

import html
import re
from typing import Any

from latex2mathml.converter import convert
from latex2mathml.exceptions import (
    DenominatorNotFoundError,
    DoubleSubscriptsError,
    DoubleSuperscriptsError,
    ExtraLeftOrMissingRightError,
    MissingEndError,
    NumeratorNotFoundError,
)
from mkdocs.plugins import get_plugin_logger

LOG = get_plugin_logger("maths")
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)
WRONG = (
    DenominatorNotFoundError,
    DoubleSubscriptsError,
    DoubleSuperscriptsError,
    ExtraLeftOrMissingRightError,
    MissingEndError,
    NumeratorNotFoundError,
)


def on_page_content(text: str, page: Any, **_: Any) -> str:
    def drawn(found: re.Match[str]) -> str:
        latex = html.unescape(found[3]).strip()
        try:
            return str(convert(latex, display="block" if found[2] == "[" else "inline"))
        except WRONG as error:
            LOG.warning("%s: the formula %r cannot be read: %r", page.file.src_path, latex, error)
            return found[0]

    return FORMULA.sub(drawn, text)
