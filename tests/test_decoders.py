"""Decoders of whole charts: against all trees of a sentence."""

from dataclasses import replace

import pytest
import torch
from cases import WITH_GRAMMAR, Case, Posteriors, decoded, listable, make, small

from lvpcfg.chart.decode.decode import BestTrees
from lvpcfg.chart.fast.build import cp_form
from lvpcfg.errors import InputError
from lvpcfg.options import FREE, PRODUCT, RECALL, RULE_SUM, VARIATIONAL

F64 = torch.float64


def bracketings(start: int, width: int):
    """All binary trees over a span, as lists of (start, width)."""
    if width == 1:
        return [[(start, 1)]]
    return [
        [(start, width), *left, *right]
        for split in range(1, width)
        for left in bracketings(start, split)
        for right in bracketings(start + split, width - split)
    ]


def as_cp(case: Case) -> Case:
    """The rules of a grammar as a sum of as many terms of rank one."""
    full = case.full.rules[0]
    places = full.nonzero()
    one_hot = [torch.nn.functional.one_hot(places[:, i], full.shape[i]).to(F64) for i in range(3)]
    u = one_hot[0] * full[tuple(places.T)].unsqueeze(1)
    return replace(case, form=cp_form(case.full.root, u, *one_hot[1:], case.grammar))


class TestDecoders:
    @pytest.fixture(params=[0, 1])
    def seed(self, request):
        return request.param

    @pytest.fixture(params=[*WITH_GRAMMAR, "as CP"])
    def case(self, request, seed):
        name = request.param
        return as_cp(small("rule list, unary", seed)) if name == "as CP" else small(name, seed)

    def test_find_the_best_of_all_trees(self, case, seed):
        leaf = case.leaf(listable(case), 2, seed)
        truths = [Posteriors(case, leaf[:, b]) for b in range(2)]
        for decoder in (PRODUCT, RULE_SUM, VARIATIONAL, RECALL):
            for tree, truth in zip(decoded(case, leaf, decoder), truths, strict=True):
                assert tuple(tree) in truth.trees
                best = max(truth.objective(decoder, nodes) for nodes in truth.trees)
                assert truth.objective(decoder, tuple(tree)) == pytest.approx(best, rel=1e-9)

    def test_free_recall_finds_the_best_of_all_bracketings(self, case, seed):
        leaf = case.leaf(listable(case), 2, seed)
        for b, tree in enumerate(decoded(case, leaf, FREE)):
            truth = Posteriors(case, leaf[:, b])
            spans = [(node.start, node.width) for node in tree]
            assert spans in bracketings(0, len(leaf))
            best = max(sum(truth.label(*span) for span in one) for one in bracketings(0, len(leaf)))
            assert sum(truth.label(*span) for span in spans) == pytest.approx(best, rel=1e-9)
            for node in tree:
                most = max(truth.top[node.start, node.width, s] for s in range(len(truth.real)))
                assert truth.top[node.start, node.width, node.top] == pytest.approx(most, rel=1e-9)

    @pytest.mark.parametrize("decoder", [PRODUCT, RULE_SUM, VARIATIONAL, RECALL])
    def test_one_word(self, decoder):
        case = make("rule list, unary")
        leaf = case.leaf(1, 2)
        for b, tree in enumerate(decoded(case, leaf, decoder)):
            truth = Posteriors(case, leaf[:, b])
            best = max(truth.objective(decoder, nodes) for nodes in truth.trees)
            assert truth.objective(decoder, tuple(tree)) == pytest.approx(best, rel=1e-9)

    @pytest.mark.parametrize("decoder", [PRODUCT, RULE_SUM, VARIATIONAL, RECALL])
    def test_an_impossible_sentence_has_no_tree(self, decoder):
        case = make("rule tensors, unary")
        leaf = case.leaf(4, 2)
        leaf[1, 0] = 0
        nothing, tree = decoded(case, leaf, decoder)
        assert nothing is None
        assert [tree] == decoded(case, leaf[:, 1:], decoder)

    def test_a_cp_form_needs_its_rules(self):
        case = replace(make("cp"), grammar=make("rule list").grammar)
        with pytest.raises(InputError, match="no list of rules"):
            decoded(case, case.leaf(3, 1), PRODUCT)


def test_a_tree_with_a_gap_is_none():
    """Nodes 0 to 5 are the bottoms and tops of two words and of both; the right word has lost its bottom, or not."""
    start, width = torch.tensor([0, 0, 1, 1, 0, 0]), torch.tensor([1, 1, 1, 1, 2, 2])
    for lost in (False, True):
        best = BestTrees(6, torch.zeros(1))
        nodes, left, right = (
            torch.tensor([1, 3, 4, 5]),
            torch.tensor([0, 6 if lost else 2, 1, 4]),
            torch.tensor([6, 6, 3, 6]),
        )
        best.put(nodes, left, right, torch.zeros(4))
        (tree,) = best.skeletons(
            torch.tensor([5]), torch.tensor([2]), lambda node: (start[node], width[node], torch.zeros_like(node))
        )
        assert (tree is None) == lost
        if not lost:
            assert [(node.start, node.width, node.split) for node in tree] == [(0, 2, 1), (0, 1, 0), (1, 1, 0)]
