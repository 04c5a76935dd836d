"""The hot path stays on the device of its tensors, whatever device that is.

Without a GPU the device is `meta`, or CUDA in PyTorch's fake mode (in a process of its own, see fake_cuda.py): there
as on a GPU, an operation on tensors of two devices is an error, and so is reading a number back.
"""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import FORMS, Case, make
from test_coarse_to_fine import coarse_to_fine_of, flat
from test_rule_cp import factored
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from lvpcfg.chart.decode.exhaustive import Exhaustive, SymbolChart
from lvpcfg.chart.fast.forms import TensorForm
from lvpcfg.chart.fast.inside import Chart
from lvpcfg.chart.fast.outside import Outside
from lvpcfg.chart.fast.partition import log_partition
from lvpcfg.chart.forest.logarithms import LogScores
from lvpcfg.chart.forest.plan import Plan
from lvpcfg.chart.forest.prune import FineRules
from lvpcfg.grammar.grammar import Grammar
from lvpcfg.options import PRODUCT, RECALL, RULE_SUM, VARIATIONAL

LENGTH, BATCH = 5, 2


def moved(thing: Any, move: Callable[[Tensor], Tensor]) -> Any:
    """A form with all its tensors moved, those of its blocks and its source included."""
    if isinstance(thing, Tensor):
        return move(thing)
    if isinstance(thing, tuple | list):
        return type(thing)(moved(part, move) for part in thing)
    if is_dataclass(thing):
        return replace(thing, **{field.name: moved(getattr(thing, field.name), move) for field in fields(thing)})
    return thing


def moved_decoder(case: Case, form: Any, move: Callable[[Tensor], Tensor]) -> Exhaustive:
    """A decoder with all its tensors moved; `form` is moved already."""
    decoder = Exhaustive(case.grammar, case.form, PRODUCT)
    for holder in (decoder, decoder.decoder):
        for name, value in vars(holder).items():
            if isinstance(value, Tensor | Grammar):
                setattr(holder, name, moved(value, move))
    decoder.form = form if isinstance(form, TensorForm) else form.source
    return decoder


def tensors_in(thing: Any) -> Iterator[Tensor]:
    """All tensors that an object holds, at any depth."""
    if isinstance(thing, Tensor):
        yield thing
    elif isinstance(thing, list | tuple):
        for part in thing:
            yield from tensors_in(part)
    elif hasattr(thing, "__dict__"):
        for part in vars(thing).values():
            yield from tensors_in(part)


class Placed:
    """One form with its sentences on a device."""

    def __init__(self, name: str, fake: bool, device: str = "meta") -> None:
        self.case = make(name)
        self.mode: AbstractContextManager[Any] = FakeTensorMode() if fake else nullcontext()
        self.fake, self.device = fake, device
        leaf = self.case.leaf(LENGTH, BATCH)
        self.form, self.leaf = moved(self.case.form, self.move), self.move(leaf)
        self.ones = self.move(torch.ones(BATCH, dtype=torch.float64))
        self.decoder = moved_decoder(self.case, self.form, self.move) if self.case.grammar else None

    def kept(self, tensor: Tensor) -> Tensor:
        """On the CPU, but in the mode."""
        return self.mode.from_tensor(tensor) if self.fake else tensor

    def move(self, tensor: Tensor) -> Tensor:
        with self.mode:
            return self.kept(tensor).to(self.device)

    def run(self) -> list[Any]:
        with self.mode:
            chart = Chart(self.form, self.leaf)
            outside = Outside(chart, self.ones, parameters=True)
            if self.decoder is None:
                return [chart, outside]
            decoders = (PRODUCT, RULE_SUM, VARIATIONAL, RECALL)
            seen = chart if isinstance(chart.form, TensorForm) else chart.seen_through(self.decoder.form)
            with torch.inference_mode():
                return [chart, outside, *(SymbolChart(self.decoder, seen, outside, one) for one in decoders)]


class PlacedForest:
    """A forest on a device, its rules as tensors or some of them in CP form. Its plan is made on the CPU."""

    def __init__(self, cp: bool, fake: bool) -> None:
        case = make("rule tensors")
        grammar = factored(case.grammar, [0, 1, 4, 6]) if cp else case.grammar
        words, lengths = flat(case.leaf(LENGTH, BATCH))
        parser = coarse_to_fine_of([case.grammar], PRODUCT)
        forest, nodes = parser.pruning.coarse.forest(words @ parser.fold, lengths, 0.0)
        rules, leaves = FineRules(grammar), forest.leaves
        leaf = rules.leaf(words, LENGTH * nodes.sentence[leaves] + nodes.start[leaves], nodes.symbol[leaves])
        plan = Plan(forest, rules.sizes, rules.cp)
        assert plan._by_rule  # what it finds out once
        self.mode: AbstractContextManager[Any] = FakeTensorMode() if fake else nullcontext()
        self.fake = fake
        self.plan, self.leaf, self.values = copy(plan), self.move(leaf), self.move(rules.values)
        for name, value in vars(plan).items():
            setattr(self.plan, name, moved(value, self.move))
        self.plan.device = self.leaf.device

    def kept(self, tensor: Tensor) -> Tensor:
        """On the CPU, but in the mode."""
        return self.mode.from_tensor(tensor) if self.fake else tensor

    def move(self, tensor: Tensor) -> Tensor:
        with self.mode:
            return self.kept(tensor).to("meta")

    def run(self) -> list[Any]:
        plan = self.plan
        with self.mode:
            weights = plan.weights(self.values, self.leaf.dtype)
            scores = plan.inside(weights, self.leaf)
            edges = self.leaf.new_zeros(len(plan.forest.rule) + 1)
            beta = plan.outside(weights, scores, torch.ones_like(scores.log_z), edges)
            out_of_range = plan.out_of_range(scores, beta)
            logarithms = LogScores(plan, weights, self.leaf)
            log_beta = logarithms.outside()
            return [
                [scores, edges, beta, out_of_range, plan.rule_gradients(weights, scores, beta)],
                [logarithms, log_beta, logarithms.gradients(log_beta[0], torch.ones_like(scores.log_z))],
            ]


@pytest.mark.parametrize("fake", [False, True])
@pytest.mark.parametrize("cp", [False, True])
def test_forests_are_computed_where_their_plan_is(cp, fake):
    placed = PlacedForest(cp, fake)
    for found in placed.run():
        assert {tensor.device.type for tensor in tensors_in(found)} == {"meta"}
    placed.leaf = placed.kept(torch.ones(placed.leaf.shape, dtype=placed.leaf.dtype))
    with pytest.raises(RuntimeError, match="device"):  # what is left behind is seen
        placed.run()


@pytest.mark.parametrize("fake", [False, True])
@pytest.mark.parametrize("name", FORMS)
def test_all_is_where_the_form_is(name, fake):
    placed = Placed(name, fake)
    made = placed.run()
    chart, outside, *decoders = made
    assert len(decoders) == (4 if placed.case.grammar else 0)
    for one in made:
        held = list(tensors_in(one))
        assert len(held) > 10
        assert {tensor.device.type for tensor in held} == {"meta"}

    inner = placed.case.form.interminals
    cells = [(LENGTH - width + 1) * BATCH for width in range(1, LENGTH + 1)]
    for part in (chart.top, chart.bottom, outside.top, outside.bottom):
        assert [tuple(cell.shape) for cell in part] == [(rows, inner) for rows in cells]
    assert chart.log_z.shape == (BATCH,)
    assert chart.log_z.dtype == torch.float64
    assert outside.leaf.shape == (LENGTH, BATCH, len(placed.case.symbol) - inner)
    assert [tensor.shape for tensor in outside.tensors] == [tensor.shape for tensor in placed.case.form.tensors]
    for decoder in decoders:
        assert decoder.root_worth.shape == decoder.roots.shape == (BATCH,)
        assert len(decoder.best.worth) == 2 * sum(cells) * len(placed.case.grammar.symbols) + BATCH + 1


def test_all_is_on_a_fake_cuda_device():
    script = Path(__file__).with_name("fake_cuda.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = [line.split("|") for line in done.stdout.splitlines()]
    assert [name for name, *_ in lines] == [*FORMS, "chain", "chain", "als", "als"]
    for name, made, *devices in lines:
        assert int(made) in {"als": (5,), "chain": (11,)}.get(name, (2, 6))
        assert devices == ["cuda:0"]


@pytest.mark.parametrize("part", ["root", "weights", "closure", "blocks", "symbols"])
def test_a_tensor_left_behind_is_an_error(part):
    """So that the test above would see one."""
    placed = Placed("rule tensors, unary", fake=True)
    if part == "symbols":
        placed.decoder.of_phrases = placed.kept(torch.ones(3, 2, dtype=torch.int64))
    else:
        placed.form = replace(placed.form, **{part: moved(getattr(placed.case.form, part), placed.kept)})
    with pytest.raises(RuntimeError, match="same device"):
        placed.run()


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMS)
def test_cuda_agrees_with_the_cpu(name):
    case = make(name)
    leaf = case.leaf(12, 3)
    found = []
    for device in ("cpu", "cuda"):
        form = moved(case.form, lambda tensor, device=device: tensor.to(device))
        inputs = [tensor.detach().to(device).requires_grad_() for tensor in (leaf, *form.tensors)]
        log_z, _ = log_partition(form.with_tensors(inputs[1:]), inputs[0])
        assert log_z.device.type == device
        log_z.sum().backward()
        trees = None
        if case.grammar:
            grammar = case.grammar.to(device)
            chart = Chart(form, leaf.to(device))
            outside = Outside(chart, torch.ones_like(chart.log_z))
            trees = Exhaustive(grammar, form, PRODUCT).trees(chart, outside)
        found.append((log_z.detach().cpu(), [x.grad.cpu() for x in inputs], trees))
    (one, gradients, trees), (two, others, other_trees) = found
    assert torch.allclose(one, two, rtol=1e-10)
    assert all(torch.allclose(x, y, rtol=1e-8, atol=1e-10) for x, y in zip(gradients, others, strict=True))
    assert trees == other_trees
