"""EM for grammars that are in CP form from the start: the term rho of a rule is a latent variable, like the states.

    p(b, h2, c, h3 | a, h1) = sum over rho of  p(rho | a, h1) p(b, h2 | rho) p(c, h3 | rho)

Each term belongs to one rule, or (`shared`) to the whole grammar.
"""

from dataclasses import dataclass

from lvpcfg.errors import InputError, show
from lvpcfg.estimate.estimator import (
    MOST_CYCLES,
    MOST_ITERATIONS,
    Estimator,
    Options,
    Task,
    check_folder,
    check_number,
)
from lvpcfg.registry import ESTIMATORS

MOST_TERMS = 100_000


@dataclass
class KruskalEMOptions(Options):
    name: str = "kruskal_em"
    rank: int = 8
    shared: bool = False
    init: str | None = None
    states: int = 1
    cycles: int | None = None
    split_iterations: int = 50
    merge_iterations: int = 20
    smooth_iterations: int = 10
    merged: float = 0.5
    noise: float = 0.01
    smooth_rules: float = 0.01
    smooth_words: float = 0.1
    rare: int = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self.shared) is not bool:
            raise InputError(f"estimator.shared is {show(self.shared)}: expected true or false.")
        if self.cycles is None:
            self.cycles = 4 if self.init is None else 0
        check_folder(self, "init")
        check_number(self, "rank", least=1, most=MOST_TERMS)
        for name in ("split_iterations", "merge_iterations"):
            check_number(self, name, least=1, most=MOST_ITERATIONS)
        check_number(self, "smooth_iterations", most=MOST_ITERATIONS)
        check_number(self, "cycles", most=MOST_CYCLES)
        check_number(self, "states", least=1)
        check_number(self, "rare")
        for name in ("merged", "smooth_rules", "smooth_words"):
            check_number(self, name, most=1, otherwise="a fraction, 0 to 1")
        check_number(self, "noise", most=100, otherwise="100 at the most, since exp of it is multiplied with")

    @property
    def heeds_seed(self) -> bool:
        return self.init is None or bool(self.cycles)


@ESTIMATORS.register("kruskal_em", KruskalEMOptions)
def kruskal_em(options: KruskalEMOptions, task: Task) -> Estimator:
    """The phases of `split_merge`; without cycles, EM and then EM with smoothing.

    Random terms that rules share go through EM once before the first cycle: they have to find their rules.
    """
    from lvpcfg.estimate.expectation_maximisation import ExpectationMaximisation, Phase
    from lvpcfg.estimate.kruskal_start import fresh, taken_up
    from lvpcfg.estimate.start import START, made_of
    from lvpcfg.estimate.terms import merge_terms, split_terms

    smooth, phases = (options.smooth_rules, options.smooth_words), []
    if options.shared and options.init is None and options.cycles:
        phases.append(Phase(name="start", cycle=0, iterations=options.split_iterations, title="start"))
    for cycle in range(1, (options.cycles or 0) + 1):
        phases += [
            Phase(
                name="split",
                cycle=cycle,
                iterations=options.split_iterations,
                begin=lambda refinement, generator: split_terms(
                    refinement.split(2, options.noise, generator), 2, options.noise, generator
                ),
            ),
            Phase(
                name="merge",
                cycle=cycle,
                iterations=options.merge_iterations,
                begin=lambda refinement, _: merge_terms(refinement, options.merged, options.rank).merge(options.merged),
            ),
            Phase(name="smooth", cycle=cycle, iterations=options.smooth_iterations, smooth=smooth),
        ]
    if not phases:
        phases = [
            Phase(
                name="em",
                cycle=1,
                iterations=options.split_iterations,
                title="iteration {iteration}",
                evaluate="sometimes",
            ),
            Phase(name="smooth", cycle=1, iterations=options.smooth_iterations, smooth=smooth),
        ]
    if options.init is None:
        return ExpectationMaximisation(options, task, phases, fresh(options, task), start=None)
    begin = taken_up(options.init, task, options.rare)
    return ExpectationMaximisation(options, task, phases, begin, START, made_of(options.init))
