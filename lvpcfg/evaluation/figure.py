"""A matplotlib figure that notebooks show by themselves, without pyplot."""

from io import BytesIO
from typing import Literal

from matplotlib.figure import Figure


class Picture(Figure):
    """An empty figure of so many inches; `savefig` writes it to a file."""

    def __init__(self, width: float, height: float, layout: Literal["constrained"] | None = "constrained") -> None:
        super().__init__(figsize=(width, height), layout=layout)

    def _repr_png_(self) -> bytes:
        """What IPython asks for."""
        shown = BytesIO()
        self.savefig(shown, format="png", dpi=80)
        return shown.getvalue()
