"""Charts at the ends of floating point: impossible sentences, underflow and what is done about it."""

import math

import pytest
import torch
from cases import (
    FORMS,
    make,
    plain_grammar,
)

from lvpcfg.chart.fast import potentials
from lvpcfg.chart.fast.build import dense_form, tensor_form
from lvpcfg.chart.fast.inside import Chart
from lvpcfg.chart.fast.marginals import marginals
from lvpcfg.chart.fast.partition import (
    LOGARITHMIC,
    NARROW,
    WIDE,
    Problem,
    log_partition,
    solve,
    solve_outside,
)

F64 = torch.float64


class TestImpossible:
    @pytest.mark.parametrize("dtype", [torch.float32, F64])
    @pytest.mark.parametrize("name", FORMS)
    def test_a_word_without_tags(self, name, dtype):
        """One sentence of the two has none; the other is as if alone."""
        case = make(name)
        form, leaf = case.form.to(dtype), case.leaf(4, 2, dtype=dtype)
        leaf[2, 1] = 0
        leaf.requires_grad_()
        log_z, sign = log_partition(form, leaf)
        assert log_z[1] == -math.inf
        assert sign.tolist() == [1, 0]
        log_z.sum().backward()
        assert (leaf.grad[:, 1] == 0).all()
        alone = leaf.detach()[:, :1].requires_grad_()
        log_partition(form, alone)[0].sum().backward()
        assert torch.allclose(leaf.grad[:, :1], alone.grad, rtol=1e-5)
        posteriors = marginals(form, leaf.detach())
        assert posteriors.top.isfinite().all()
        assert (posteriors.top[1] == 0).all()

    @pytest.mark.parametrize("dtype", [torch.float32, F64])
    def test_most_rules_are_zero(self, dtype):
        """3 % of the rules are left, with which some sentences have derivations and some do not."""
        generator = torch.Generator().manual_seed(0)
        rules = torch.rand(12, 20, 20, generator=generator, dtype=dtype)
        rules = torch.where(torch.rand(rules.shape, generator=generator) < 0.03, rules, 0).requires_grad_()
        leaf = torch.rand(6, 40, 8, generator=generator, dtype=dtype)
        leaf = torch.where(torch.rand(leaf.shape, generator=generator) < 0.3, leaf, 0).requires_grad_()
        root = torch.nn.functional.pad(torch.ones(1, dtype=dtype), (0, 19)).requires_grad_()
        log_z, _ = log_partition(dense_form(root, rules), leaf)
        possible = log_z > -math.inf
        assert 5 <= possible.sum() <= 35
        log_z.sum().backward()
        assert not log_z.isnan().any()
        assert all(x.grad.isfinite().all() for x in (leaf, rules, root))
        assert (rules * rules.grad).sum().item() == pytest.approx(5 * int(possible.sum()), rel=1e-4)
        posteriors = marginals(dense_form(root.detach(), rules.detach()), leaf.detach())
        assert not posteriors.top.isnan().any()

    @pytest.mark.parametrize("dtype", [torch.float32, F64])
    def test_cells_without_derivations_in_a_sentence_that_has_one(self, dtype):
        """Only spans up to the last word exist: S -> N S .5 | N N .25."""
        grammar = plain_grammar(["S"], ["N"], [("S", "N", "S", 0.5), ("S", "N", "N", 0.25)])
        form = tensor_form(grammar.to(dtype=dtype))
        weights = [tensor.clone().requires_grad_() for tensor in form.tensors]
        leaf = torch.full((7, 1, 1), 0.125, dtype=dtype, requires_grad=True)
        log_z, _ = log_partition(form.with_tensors(weights), leaf)
        assert log_z.item() == pytest.approx(5 * math.log(0.5) + math.log(0.25) + 7 * math.log(0.125), rel=1e-7)
        log_z.sum().backward()
        assert (leaf * leaf.grad).flatten().tolist() == pytest.approx([1.0] * 7, rel=1e-5)
        counts = sorted((w * w.grad).sum().item() for w in weights)
        assert counts == pytest.approx([1, 1, 5], rel=1e-5)  # the root, S -> N N, S -> N S
        posteriors = marginals(form, leaf.detach()).top[0, :, :, 0]
        expected = torch.zeros(7, 7, dtype=dtype)
        expected[:6, 6] = 1
        assert torch.allclose(posteriors, expected, atol=1e-6)

    @pytest.mark.parametrize("length", [1, 3])
    def test_a_grammar_without_binary_rules(self, length):
        grammar = plain_grammar(["S"], ["N", "V"], [], [("S", "N", 0.5)])
        log_z, _ = log_partition(tensor_form(grammar), torch.full((length, 1, 2), 0.5, dtype=F64))
        assert log_z.item() == (pytest.approx(math.log(0.25)) if length == 1 else -math.inf)

    def test_a_root_that_is_a_word(self):
        grammar = plain_grammar(["S"], ["N", "V"], [("S", "N", "V", 1.0)], root="V")
        leaf = torch.tensor([[[0.5, 0.25]]], dtype=F64)
        posteriors = marginals(tensor_form(grammar), leaf)
        assert posteriors.log_z.item() == pytest.approx(math.log(0.25))
        assert posteriors.top.flatten().tolist() == [0, 0, 1]
        assert log_partition(tensor_form(grammar), leaf.expand(2, 1, 2))[0].item() == -math.inf


@pytest.mark.parametrize("name", ["rule list, unary", "rule tensors", "cp"])
def test_float32_on_a_long_sentence(name):
    case = make(name, seed=3)
    form = case.form.with_tensors([tensor * 0.5 for tensor in case.form.tensors]).to(torch.float32)
    leaf = case.leaf(200, 1, dtype=torch.float32) * 1e-5
    narrow, wide = marginals(form, leaf), marginals(form.to(F64), leaf.to(F64))
    assert solve(Problem(form, leaf))[0].level == NARROW
    assert wide.log_z.item() < -1500
    assert abs(narrow.log_z - wide.log_z).item() <= 2e-3
    assert (narrow.top - wide.top).abs().max() <= 1e-3
    assert wide.top.max() > 0.5


def losing(length: int, dtype: torch.dtype, words: float = 0.001, unary: bool = False):
    """A -> A A .5 | x .5, B -> B B .5 | x .001, root B: beside A, what B is worth soon underflows."""
    if unary:
        binary, chains = [("A", "A", "A", 0.5), ("B", "B", "B", 0.5)], [("A", "XA", 1.0), ("B", "XB", 1.0)]
    else:
        pairs = [(a, x, y) for a in "AB" for x in (a, "X" + a) for y in (a, "X" + a)]
        binary, chains = [(*rule, 0.5) for rule in pairs], []
    grammar = plain_grammar(["A", "B"], ["XA", "XB"], binary, chains, root="B")
    leaf = torch.tensor([0.5, words], dtype=F64).expand(length, 1, 2)
    return tensor_form(grammar.to(dtype=dtype)), leaf.to(dtype)


def log_z_of_losing(leaf: torch.Tensor) -> float:
    """Catalan(n - 1) .5^(n - 1) times the words."""
    n = len(leaf)
    words = leaf[:, 0, 1].to(F64).log().sum().item()
    return math.log(math.comb(2 * n - 2, n - 1) // n) + (n - 1) * math.log(0.5) + words


class TestUnderflow:
    @pytest.mark.parametrize(
        ("length", "dtype", "level", "unary"),
        [
            (12, torch.float32, NARROW, False),
            (40, torch.float32, WIDE, False),
            (40, torch.float32, WIDE, True),
            (200, torch.float32, LOGARITHMIC, True),
            (200, F64, LOGARITHMIC, False),
        ],
    )
    def test_takes_the_next_way(self, length, dtype, level, unary):
        form, leaf = losing(length, dtype, unary=unary)
        assert [solution.level for solution in solve(Problem(form, leaf))] == [level]
        tensors = [tensor.clone().requires_grad_() for tensor in form.tensors]
        leaf = leaf.clone().requires_grad_()
        log_z, _ = log_partition(form.with_tensors(tensors), leaf)
        exactness = 1e-6 if level == NARROW else 1e-9
        assert log_z.item() == pytest.approx(log_z_of_losing(leaf.detach()), rel=exactness)
        log_z.sum().backward()
        exactness = 1e-6 if dtype == F64 else 1e-4
        assert (leaf * leaf.grad)[:, 0, 1].tolist() == pytest.approx([1.0] * length, rel=exactness)
        assert (leaf.grad[:, 0, 0] == 0).all()
        assert all(tensor.grad.isfinite().all() for tensor in tensors)
        counts = sum((w * w.grad).sum().item() for w in tensors[1 + len(form.unary) :])
        assert counts == pytest.approx(length - 1, rel=exactness)

    def test_of_one_sentence_leaves_the_others(self):
        form, hard = losing(40, torch.float32)
        _, easy = losing(40, torch.float32, words=0.5)
        batch = torch.cat([easy, hard, easy * 0.5], 1)
        levels = {int(i): s.level for s in solve(Problem(form, batch)) for i in s.sentences}
        assert levels == {0: NARROW, 1: WIDE, 2: NARROW}
        batch.requires_grad_()
        log_z, _ = log_partition(form, batch)
        expected = [log_z_of_losing(batch.detach()[:, b : b + 1]) for b in range(3)]
        assert log_z.tolist() == pytest.approx(expected, rel=1e-6)
        assert log_z[1].item() == pytest.approx(expected[1], rel=1e-9)
        easy_z, _ = log_partition(form, batch.detach()[:, ::2])
        assert torch.equal(log_z[::2], easy_z)
        (log_z * torch.tensor([1, 2, 3])).sum().backward()
        counts = (batch * batch.grad).sum(0)[:, 1]
        assert counts.tolist() == pytest.approx([40, 80, 120], rel=1e-4)
        posteriors = marginals(form, batch.detach())
        assert posteriors.log_z.tolist() == pytest.approx(expected, rel=1e-6)
        assert torch.allclose(posteriors.top[:, 0, -1], torch.tensor([0.0, 1, 0, 0]), atol=1e-5)

    def test_that_shows_in_the_outside_pass_alone(self):
        """Eighteen words as A or as B, and then a choice: what B lost in its cell it makes up for above.

        S -> C Z 1e18 | D Z, where C holds B and D holds A.
        """
        a, b = ([(p, x, y, 0.5) for x in (p, "X" + p) for y in (p, "X" + p)] for p in "AB")
        above = [("C1", "PB", "Z", 1e18), ("C2", "C1", "Z", 1e18), ("S", "C2", "Z", 1e18)]
        below = [("D1", "PA", "Z", 1.0), ("D2", "D1", "Z", 1.0), ("S", "D2", "Z", 1.0)]
        first = [("PA", "L", "A", 1.0), ("PB", "L", "B", 1.0)]
        inner = ["S", "A", "B", "PA", "PB", "C1", "C2", "D1", "D2"]
        grammar = plain_grammar(inner, ["XA", "XB", "L", "Z"], [*a, *b, *first, *above, *below])
        form = tensor_form(grammar.to(dtype=torch.float32))
        leaf = torch.zeros(22, 1, 4)
        leaf[0, 0, 2] = leaf[-3:, 0, 3] = 1
        leaf[1:-3, 0, :2] = torch.tensor([0.5, 0.001])
        problem = Problem(form, leaf)
        assert [solution.level for solution in solve(problem, certify=False)] == [NARROW]
        assert [solution.level for solution in solve(problem)] == [WIDE]
        assert [solution.level for solution in solve_outside(problem, torch.ones(1, dtype=F64))] == [WIDE]
        narrow, wide = marginals(form, leaf), marginals(form.to(F64), leaf.to(F64))
        assert narrow.log_z.item() == pytest.approx(wide.log_z.item(), rel=1e-9)
        assert torch.allclose(narrow.top.to(F64), wide.top, atol=1e-6)
        assert wide.top[0, 0, 18, 4] > 0.5  # B is what it comes to
        leaf.requires_grad_()
        log_z, _ = log_partition(form, leaf)
        assert log_z.item() == pytest.approx(wide.log_z.item(), rel=1e-9)
        log_z.sum().backward()
        assert (leaf * leaf.grad).sum(-1).flatten().tolist() == pytest.approx([1.0] * 22, rel=1e-5)

    @pytest.mark.parametrize("length", [14, 15, 16, 17])
    def test_that_begins_is_seen_before_it_matters(self, length):
        """Where B is a subnormal number beside A, and where it is nothing yet."""
        form, leaf = losing(length, torch.float32)
        log_z, sign = log_partition(form, leaf)
        assert log_z.item() == pytest.approx(log_z_of_losing(leaf), rel=1e-6)
        assert sign.item() == 1

    @pytest.mark.parametrize("length", [40, 200])
    @pytest.mark.parametrize("unlikely", [1e-3, 1e-12])
    def test_of_a_part_of_the_sentence_is_seen(self, length, unlikely):
        """Half of the words make phrases that are far less probable than those of the other half."""
        half = length // 2
        rules = [("S", "A", "B", 1.0)]
        for phrase, tag, p in (("A", "X", 0.5), ("B", "Y", unlikely)):
            rules += [(phrase, tag, phrase, p), (phrase, tag, tag, p)]
        form = tensor_form(plain_grammar(["S", "A", "B"], ["X", "Y"], rules).to(dtype=torch.float32))
        leaf = torch.zeros(length, 1, 2)
        leaf[:half, :, 0] = leaf[half:, :, 1] = 0.1
        log_z = log_partition(form, leaf)[0].item()
        expected = length * math.log(0.1) + (half - 1) * (math.log(0.5) + math.log(unlikely))
        assert log_z == pytest.approx(expected, abs=2e-3)
        posteriors = marginals(form, leaf)
        assert posteriors.top[0, 0, half - 1, 1].item() == pytest.approx(1, abs=1e-3)
        assert posteriors.top[0, half, length - 1, 2].item() == pytest.approx(1, abs=1e-3)

    def test_before_a_sentence_is_scaled_anew_is_seen(self):
        """What B lost in spans of seven words is scaled up with all else by those of eight, and looks large enough."""
        unlikely = 10**-6.25
        rules = [("A", "X", "X", 1.0), ("A", "A", "Y", unlikely), ("B", "X", "X", 1e-8), ("B", "B", "Y", unlikely)]
        rules += [("S", "A", "Z", 1e-9), ("S", "B", "Z", 1.0)]
        form = tensor_form(plain_grammar(["S", "A", "B"], ["X", "Y", "Z"], rules).to(dtype=torch.float32))
        leaf = torch.nn.functional.one_hot(torch.tensor([0, 0, 1, 1, 1, 1, 1, 1, 2])).float().unsqueeze(1)
        expected = 6 * math.log(unlikely) + math.log(1e-8 + 1e-9)
        assert log_partition(form, leaf)[0].item() == pytest.approx(expected, rel=1e-6)
        posteriors = marginals(form, leaf)
        assert posteriors.log_z.item() == pytest.approx(expected, rel=1e-6)
        assert posteriors.top[0, 0, 7, :3].tolist() == pytest.approx([0, 1 / 11, 10 / 11], abs=1e-5)

    def test_of_a_product_of_numbers_that_are_not_small_themselves_is_seen(self):
        """Q -> P P comes to nothing at once, and is what S needs; all other ways are nearly as small."""
        p = 10**-5.8
        rules = [("P", "X", "X", 2e-29), ("Q", "P", "P", 1.0), ("R", "Y2", "Y3", p), ("S", "Q", "R", 1.0)]
        rules += [("R", "Y1", "R", 1.0), ("R", "Y", "R", 1.0)]
        rules += [("A", "X", "X", p), ("A", "A", "X", 1.0), ("A", "A", "Y", 1.0)]
        rules += [("A1", "A", "Y1", 1e-19), ("A2", "A1", "Y2", 1e-19), ("S", "A2", "Y3", 1e-22)]
        grammar = plain_grammar(["S", "P", "Q", "R", "A", "A1", "A2"], ["X", "Y", "Y1", "Y2", "Y3"], rules)
        form = tensor_form(grammar.to(dtype=torch.float32))
        tags = torch.tensor([0] * 4 + [1] * 52 + [2, 3, 4])
        leaf = torch.nn.functional.one_hot(tags).float().unsqueeze(1)
        wide = log_partition(form.to(F64), leaf.to(F64))[0].item()
        assert log_partition(form, leaf)[0].item() == pytest.approx(wide, rel=1e-6)


class TestPotentials:
    def test_of_words_are_those_of_the_likeliest_states(self):
        words = torch.tensor([[[0.0, 1e-40]], [[0.0, 0.0]], [[3.0, 0.5]], [[-0.3, 0.1]]])
        potential = potentials.of_words(words)
        assert potential.diff(dim=0).flatten().tolist() == [-126, 0, 1, -2]
        assert (words.flatten(0, 1) * potentials.scales(potential, 1)).isfinite().all()

    def test_of_parts_add_up_to_those_of_the_whole(self):
        potential = potentials.of_spans(torch.rand(6, 2, 3), 4, 9)
        one, two, both = (potentials.scales(potential, width).view(-1, 2) for width in (3, 4, 7))
        assert torch.equal(one[:3] * two[3:], both)

    def test_of_sentences_without_such_spans_change_nothing(self):
        spans = torch.rand(3, 2, 4)
        spans[:, 1] = 0
        potential = potentials.of_spans(spans, 2, 4)
        assert not potential[:, 1].any()

    def test_keep_ordinary_charts_far_from_the_ends_of_the_range(self):
        """Whatever a word takes: 200 words, of 1e-30 each, and rules of 1e-6."""
        rules = [("S", x, y, 1e-6) for x in ("S", "X") for y in ("S", "X")]
        form = tensor_form(plain_grammar(["S"], ["X"], rules).to(dtype=torch.float32))
        chart = Chart(form, torch.full((200, 1, 1), 1e-30))
        assert chart.log_z.item() < -16000
        assert chart.bottom.cells[200:].min() > 1e-12
        assert chart.bottom.cells.max() < 1e12


def test_not_a_number_stays_one():
    case = make("dense")
    for place in range(len(case.form.tensors)):
        tensors = [tensor.clone() for tensor in case.form.tensors]
        tensors[place].view(-1)[0] = math.nan
        assert log_partition(case.form.with_tensors(tensors), case.leaf(4, 1))[0].isnan().all()
