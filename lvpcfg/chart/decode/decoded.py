"""What decoding gives, from pruned forests and from whole charts."""

from dataclasses import dataclass, field

from jaxtyping import Float64
from torch import Tensor

from lvpcfg.chart.decode.spans import Steps
from lvpcfg.chart.derivations import Skeleton
from lvpcfg.chart.forest.packed import Forest
from lvpcfg.chart.forest.prune import Nodes


@dataclass(frozen=True)
class Wanted:
    """What is to be known of each sentence: how many trees, and the posteriors of their spans, or of all spans; and the
    forest in which they were looked for."""

    trees: int = 1
    spans: bool = False
    everywhere: bool = False
    forest: bool = False


BEST = Wanted()


@dataclass(frozen=True, eq=False)
class Decoded:
    """Of some sentences."""

    trees: list[list[Skeleton]]  # best first; none where the grammar has none
    log_z: Float64[Tensor, "sentences"]
    steps: Steps = field(default_factory=dict)  # of the spans of the trees, or of all, if they are wanted
    forest: tuple[Forest, Nodes] | None = None  # if it is wanted, and there is one
