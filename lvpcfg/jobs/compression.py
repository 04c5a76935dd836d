"""The work of job=compress: compresses a model, and shows what that did to its rules in tables, pictures and bounds."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
from torch import Tensor
from tqdm import tqdm

from lvpcfg.decompose import bounds
from lvpcfg.decompose.compress import CHILD_TYPE_NAMES, Compression, Progress, decompose
from lvpcfg.decompose.dense import Difference, divergence, rule_tensor
from lvpcfg.decompose.options import TrimOptions
from lvpcfg.device import usable_device
from lvpcfg.errors import InputError
from lvpcfg.evaluation.pictures import draw_errors
from lvpcfg.generation import generate
from lvpcfg.grammar.factors import Factors
from lvpcfg.grammar.grammar import Grammar
from lvpcfg.grammar.location import located
from lvpcfg.grammar.model import Model
from lvpcfg.grammar.tightness import tightness
from lvpcfg.jobs.compress import CompressOptions
from lvpcfg.jobs.options import one_folder
from lvpcfg.jobs.run import Run
from lvpcfg.parser import Parser
from lvpcfg.trees.walk import words

DRAWN, LONGEST, NARROW = 40, 40, 0.1  # sentences for certificates, their words, and a width in nats
EPSILON = 0.01  # the error that bounds are stated for
QUANTILES = {"median": 0.5, "90 %": 0.9, "largest": 1.0}


def run(config: CompressOptions, run: Run) -> None:
    source, target = located(one_folder(config.model, "compress")), run.folder / "model"
    if source.exists() and target.exists() and source.samefile(target):
        raise InputError(f"{target} is the model to compress: choose another run folder by hydra.run.dir=FOLDER.")
    model = Model.load(source)
    run.begin()
    on_device = replace(model, grammar=model.grammar.to(usable_device(config.device)))
    begin = time.perf_counter()
    with fitting(config.decompose.name) as progress:
        found = decompose(on_device, config.decompose, config.seed, progress, config.certify)
    run.result["seconds"] = time.perf_counter() - begin
    found.model.save(target, compressed=isinstance(config.decompose, TrimOptions))

    run.say(", ".join(f"{name} {value}" for name, value in found.model.provenance["compressed"].items()) + ":")
    if isinstance(config.decompose, TrimOptions):
        _say_trimmed(found, run)
    elif found.factors is None or found.difference is None:
        _show_rules(found, run)
        _say_bounds_of_rules(found, on_device.grammar, run)
    else:
        _show_one_form(found, found.factors, found.difference, run)
        _say_bounds_of_one_form(found, found.factors, found.difference, run)
    found_tight = tightness(found.model)
    run.result |= found_tight.figures()
    run.say(found_tight.line())
    if config.certify:
        _say_certificates(found, config.device, run)
    _say_sizes(found, source, target, run)


@contextmanager
def fitting(title: str) -> Iterator[Progress]:
    """A progress bar for a decomposition; yields the function that moves it on."""
    with tqdm(desc=title, disable=None, leave=False) as bar:

        def advance(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield advance


def _name(title: str) -> str:
    """A title as a name of figures: `two_phrases`."""
    return title.replace(" ", "_")


def _say_trimmed(found: Compression, run: Run) -> None:
    before, after = (
        int(grammar.binary.written_out().values.count_nonzero()) for grammar in (found.source, found.model.grammar)
    )
    _keep(run, {"nonzero_before": before, "nonzero_after": after})
    run.say(f"Binary rules: {before:,} numbers other than zero before, {after:,} after.")


def _show_rules(found: Compression, run: Run) -> None:
    """The rules in CP form, each with its factors, by the types of their children."""
    grammar = found.model.grammar
    sizes = grammar.states[grammar.binary_rules]
    rank = found.model.provenance["compressed"]["rank"]
    after = torch.where(found.approximated, rank * sizes.sum(1), sizes.prod(1))
    fitted = found.gamma.isfinite()
    rows = []
    for types, name in enumerate([*CHILD_TYPE_NAMES, "all"]):
        of_type = found.child_types == types if types < len(CHILD_TYPE_NAMES) else torch.ones_like(fitted)
        used = of_type & found.approximated
        gamma = found.gamma[of_type & fitted]
        figures = {
            "rules": int(of_type.sum()),
            "approximated": int(used.sum()),
            **{f"gamma_{quantile}": _quantile(gamma, share) for quantile, share in QUANTILES.items()},
            "numbers_before": int(sizes[of_type].prod(1).sum()),
            "numbers_after": int(after[of_type].sum()),
            "negative_mass": float(found.negative[used].mean()) if bool(used.any()) else 0.0,
        }
        _keep(run, figures, "" if name == "all" else f"{_name(name)}_")
        compression = figures["numbers_before"] / max(1, figures["numbers_after"])
        rows.append(
            [
                name,
                f"{figures['rules']:,}",
                f"{figures['approximated']:,}",
                *(
                    "" if math.isnan(figures[f"gamma_{name}"]) else bounds.upwards(figures[f"gamma_{name}"], 2)
                    for name in QUANTILES
                ),
                f"{compression:.1f}",
                f"{100 * figures['negative_mass']:.2g} %",
            ]
        )
        if len(gamma):
            run.board.add_histogram(f"log10_gamma/{_name(name)}", gamma.clamp_min(1e-16).log10())
    run.result["compression"] = run.result["numbers_before"] / max(1, run.result["numbers_after"])
    columns = ["rules with", "rules", "used", "gamma\nmedian", "\n90 %", "\nlargest", "times\nsmaller", "\nnegative"]
    run.table("Rules: CP forms used, their errors, their numbers, their mass below zero", columns, rows)
    if bool(fitted.any()):
        gammas = {
            name: found.gamma[fitted & (found.child_types == types)].tolist()
            for types, name in enumerate(CHILD_TYPE_NAMES)
        }
        threshold = found.model.provenance["compressed"]["threshold"]
        run.picture("gamma", draw_errors({name: gamma for name, gamma in gammas.items() if gamma}, threshold))


def _quantile(values: Tensor, share: float) -> float:
    return float(values.double().quantile(share)) if len(values) else math.nan


def _keep(run: Run, figures: dict[str, float], prefix: str = "") -> None:
    """Puts finite figures into the result; JSON has no infinity and no nan."""
    names = {name: name.replace(" %", "") for name in figures}
    run.result |= {prefix + names[name]: value for name, value in figures.items() if math.isfinite(value)}


def _show_one_form(found: Compression, factors: Factors, difference: Difference, run: Run) -> None:
    """The CP form of all rules, and how far it is from the rules."""
    grammar = found.source
    rows = []
    for types, name in enumerate([*CHILD_TYPE_NAMES, "all"]):
        here = slice(types, types + 1) if types < len(CHILD_TYPE_NAMES) else slice(None)
        of_type = found.child_types == types if types < len(CHILD_TYPE_NAMES) else found.child_types >= 0
        mass = float(difference.mass[here].sum())
        figures = {
            "rules": int(of_type.sum()),
            "norm": float(difference.norm[here].norm()),
            "error": float(difference.error[here].norm()),
            "added_mass": float(difference.added[here].sum()) / mass if mass else 0.0,
            "negative_mass": float(difference.negative[here].sum()) / mass if mass else 0.0,
        }
        _keep(run, figures, "" if name == "all" else f"{_name(name)}_")
        shares = (f"{100 * figures[share]:.2f} %" for share in ("added_mass", "negative_mass"))
        error = bounds.upwards(figures["error"])
        rows.append([name, f"{figures['rules']:,}", f"{figures['norm']:.4g}", error, *shares])
    columns = ["rules with", "rules", "||T||", "||T - T^||", "mass where\nno rule is", "negative\nmass"]
    run.table(f"One CP form of {factors.rank:,} terms, and how far it is from the rules", columns, rows)
    sums = found.model.grammar.row_sums()
    figures = {
        "rank": factors.rank,
        "numbers_before": found.before,
        "numbers_after": found.after,
        "compression": found.before / found.after,
        "row_sum_least": float(sums.min()),
        "row_sum_largest": float(sums.max()),
        "kl": divergence(grammar, factors),
    }
    _keep(run, figures)
    run.say(
        f"What a state rewrites to adds up to {figures['row_sum_least']:.6f} at the least and "
        f"{figures['row_sum_largest']:.6f} at the most (1 is normalised)."
    )
    if math.isfinite(figures["kl"]):
        run.say(f"The Kullback-Leibler divergence of its trees is {figures['kl']:.4g} nats a tree.")
    else:
        run.say("The Kullback-Leibler divergence of its trees is infinite: some rules have become zero or less.")


def _say_bounds_of_rules(found: Compression, grammar: Grammar, run: Run) -> None:
    """Cohen & Collins 2012, Theorem 4.2; `grammar` is the exact one."""
    if not bool(found.approximated.any()):
        run.say("Bounds: no rule is approximated, inference is exact.")
        return
    gamma, m = float(found.gamma[found.approximated].max()), int(grammar.states.max())
    why_not = bounds.outside_theorem(grammar)
    if why_not:
        _keep(run, {"bound_gamma": gamma})
        run.say(
            f"Bounds: gamma = {bounds.upwards(gamma)}. Theorem 4.2 of Cohen & Collins 2012 "
            f"says nothing about trees of this grammar: {why_not}."
        )
        return
    figures = {
        "bound_gamma": gamma,
        "bound_growth": bounds.growth(gamma, m),
        "bound_depth_limit": bounds.depth_limit(gamma, m),
        "bound_depth": bounds.covered_depth(gamma, m, EPSILON),
        "bound_length": bounds.covered_sentence(gamma, m, EPSILON, len(grammar.symbols)),
    }
    _keep(run, figures)
    run.say(
        f"Bounds (Cohen & Collins 2012, Theorem 4.2): gamma = {bounds.upwards(gamma)}, m = {m}, "
        f"X = {bounds.upwards(figures['bound_growth'])}, "
        f"d* = {bounds.downwards(figures['bound_depth_limit'])}. {_covered(figures['bound_depth'], 'Trees', 'levels')} "
        f"{_covered(figures['bound_length'], 'Marginals of sentences', 'words')}"
    )


def _covered(number: float, things: str, unit: str) -> str:
    """A sentence that says up to which size errors are sure to be within EPSILON."""
    if number == math.inf:
        return f"{things} of any size are exact."
    if number < 1:
        return f"{things} of no size are sure to be within {EPSILON}: vacuous."
    return f"{things} of up to {number:,.0f} {unit} are within {EPSILON} for sure."


def _say_bounds_of_one_form(found: Compression, factors: Factors, difference: Difference, run: Run) -> None:
    """Cohen, Satta & Collins 2013: bounds over the trees of the exact grammar alone."""
    grammar = found.source
    nu, m = _smallest(grammar), len(grammar.root)
    length = bounds.covered_length(found.error, nu, m, EPSILON)
    _keep(run, {"bound_delta": found.error, "bound_nu": nu, "bound_length": length})
    run.say(
        f"Bounds (Cohen, Satta & Collins 2013): Delta = {bounds.upwards(found.error)}, "
        f"nu = {bounds.downwards(nu)}, m = {m:,}. "
        f"{_covered(length, 'Sums over the trees of sentences', 'words')}"
    )
    if found.error <= 1e-6 * float(difference.norm.norm()):  # an exact decomposition, but for rounding
        tails = bounds.tail_sums(factors) + found.error
        ranks = sorted({factors.rank * share // 8 for share in (1, 2, 4, 6, 7)} - {0})
        _keep(run, {f"tail_sum_{rank}": float(tails[rank]) for rank in ranks})
        text = ", ".join(f"{bounds.upwards(float(tails[rank]))} at {rank:,}" for rank in ranks)
        run.say(f"Theorem 2: the best approximation of a rank has a Delta of at most {text} terms.")


def _say_certificates(found: Compression, device: str | None, run: Run) -> None:
    """The widths of intervals of log Z of sentences that the exact grammar draws."""
    envelope = found.model.envelope
    assert envelope is not None
    sentences = [words(tree) for tree in generate(replace(found.model, grammar=found.source), DRAWN, 0, LONGEST)]
    parses = Parser(found.model, device=device).analyse(sentences, certify=True)
    widths = [parse.certificate.log_z.width for parse in parses if parse.certificate is not None]
    figures = {
        "certificate_kept": len(envelope.exact),
        "certificate_numbers": sum(tensor.numel() for tensor in envelope.tensors.values()),
        "certificate_median": median(widths),
        "certificate_narrow": sum(width < NARROW for width in widths) / len(widths),
    }
    _keep(run, figures)
    run.say(
        f"Certificate: {figures['certificate_numbers']:,} more numbers, {figures['certificate_kept']:,} rules as they "
        f"were. Intervals of log Z of {len(widths)} sentences drawn from the grammar, of up to {LONGEST} words: "
        f"median width {bounds.upwards(figures['certificate_median'], 2)}, narrower than {NARROW} in "
        f"{100 * figures['certificate_narrow']:.0f} % of them."
    )


def _smallest(grammar: Grammar) -> float:
    """The smallest probability of a rule, binary or unary."""
    values = torch.cat([rule_tensor(grammar).values(), grammar.unary.detach()]).double()
    return float(values[values > 0].min())


def _say_sizes(found: Compression, source: Path, target: Path, run: Run) -> None:
    before, after = (sum(path.stat().st_size for path in folder.iterdir()) for folder in (source, target))
    run.result |= {"bytes_before": before, "bytes_after": after, "error": found.error}
    run.say(
        f"Binary rules: {found.before:,} numbers before, {found.after:,} after. "
        f"Model folder: {before / 1e6:,.2f} MB before, {after / 1e6:,.2f} MB after."
    )
    run.say(f"The model is in {target}.")
