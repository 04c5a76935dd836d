"""All splits and all states of both children, for some rules over some spans."""

from jaxtyping import Int
from torch import Tensor

from lvpcfg.chart.fast.blocks import PHRASES, WORD_FIRST, WORD_LAST, WORDS, DenseBlock
from lvpcfg.chart.fast.forms import TensorForm
from lvpcfg.chart.fast.inside import Chart


class Pairs:
    """Each choice is a span of a width, a rule of a term (by its number in the block) and its parent state x."""

    def __init__(
        self,
        chart: Chart,
        form: TensorForm,
        term: int,
        width: int,
        cell: Int[Tensor, "choices"],
        rule: Int[Tensor, "choices"],
        x: Int[Tensor, "choices"],
    ) -> None:
        self.form, self.width, block = form, width, form.blocks[term]
        self.child_types = block.child_types
        if self.child_types == PHRASES:
            left, right = (operand.index_select(0, cell) for operand in chart.operands(term, width))
        else:
            words = form.pad(chart.word_top)
            first, last = (chart.window(words, width, side, -2) for side in (WORD_FIRST, WORD_LAST))
            left = chart.spans.rest(width, WORD_LAST) if self.child_types == WORD_LAST else first
            right = chart.spans.rest(width, WORD_FIRST) if self.child_types == WORD_FIRST else last
            left, right = left.index_select(0, cell).unsqueeze(1), right.index_select(0, cell).unsqueeze(1)
        self.y: Tensor | None = None  # [choices, y]: the states of the children, if not all in order
        self.z: Tensor | None = None
        if isinstance(block, DenseBlock):
            left, right = left.narrow(2, 0, block.shape[1]), right.narrow(2, 0, block.shape[2])
        else:
            pair = rule if block.pair is None else block.pair[rule]
            self.y, self.z = block.left[pair], block.right[pair]
            left = left.gather(2, self.y.unsqueeze(1).expand(-1, left.shape[1], -1))
            right = right.gather(2, self.z.unsqueeze(1).expand(-1, right.shape[1], -1))
        self.left, self.right = left, right  # [choices, splits, y] and [choices, splits, z]
        self.weights = block.chosen(form.weights[term], rule, x)  # [choices, y, z]

    def named(self, choice: Tensor, split: Tensor, y: Tensor, z: Tensor) -> list[Tensor]:
        """The width of the left child and the states of both, of some splits and pairs of states."""
        y = y if self.y is None else self.y[choice, y]
        z = z if self.z is None else self.z[choice, z]
        inner = self.form.interminals
        return [
            split + {PHRASES: self.form.narrowest, WORD_LAST: self.width - 1}.get(self.child_types, 1),
            y + (inner if self.child_types in (WORD_FIRST, WORDS) else 0),
            z + (inner if self.child_types in (WORD_LAST, WORDS) else 0),
        ]
