"""Latent states by clustering (Narayan & Cohen 2015): k-means on [U^T phi, V^T psi] of nodes, then counts.

Each node of the trees has the state of its cluster, and counting gives a grammar with nothing below zero. It is
smoothed over the states of each symbol. With `iterations`, EM goes on from there, smoothed too. `restarts` with other
seeds, or with `dropout` or `noise`, make grammars for a product.
"""

from dataclasses import dataclass

from lvpcfg.estimate.estimator import MOST_ITERATIONS, Estimator, Step, Task, check_number
from lvpcfg.estimate.spectral import ProjectionOptions
from lvpcfg.registry import ESTIMATORS


@dataclass
class ClusterOptions(ProjectionOptions):
    name: str = "cluster"
    states: int = 24
    dropout: float = 0.0  # share of the features that are left out, others for each seed
    noise: float = 0.0  # vectors are multiplied by 1 + this times a normal random number
    smooth_rules: float = 0.01  # weight of the mean over the states of a symbol
    smooth_words: float = 0.1
    iterations: int = 0  # of EM afterwards
    rare: int = 20  # words that occur no more often than this share one profile over the states of a tag

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self, "dropout", most=0.9)
        check_number(self, "noise")
        for name in ("smooth_rules", "smooth_words"):
            check_number(self, name, most=1, otherwise="a fraction, 0 to 1")
        check_number(self, "iterations", most=MOST_ITERATIONS)
        check_number(self, "rare", most=2**62)


@ESTIMATORS.register("cluster", ClusterOptions)
def cluster(options: ClusterOptions, task: Task) -> Estimator:
    from lvpcfg.estimate.clusters import clustered
    from lvpcfg.estimate.expectation_maximisation import ExpectationMaximisation, Phase

    weights = (options.smooth_rules, options.smooth_words)
    phase = Phase(
        "em",
        cycle=1,
        iterations=options.iterations,
        smooth=weights if any(weights) else None,
        title="iteration {iteration}",
        evaluate="sometimes",
    )
    start = Step("clustering", "clusters", "always")
    return ExpectationMaximisation(options, task, [phase], clustered(options, task, task.seed), start)
