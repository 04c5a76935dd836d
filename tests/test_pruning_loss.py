"""The bound on what pruning loses: never below what it has lost."""

import pytest
import torch
from test_tightness import grown

from lvpcfg import InputError, Parser, compress, corpus, train
from lvpcfg.chart.decode.loss import ROUNDING, LossBound
from lvpcfg.chart.forest.prune import Coarse
from lvpcfg.chart.forest.pruning import pruned
from lvpcfg.chart.stages import Stages
from lvpcfg.decompose.coarse import covered
from lvpcfg.distributions import ModelTrees
from lvpcfg.grammar.coarse import projected_coarse
from lvpcfg.trees.walk import words


@pytest.mark.parametrize("kind", ["tensors", "some rules"])
def test_it_is_never_below_the_loss(kind):
    """Forests that have lost a random part of their edges."""
    losses = []
    for seed in range(2):
        model = grown(2.0, kind, seed)
        grammar, generator = model.grammar, torch.Generator().manual_seed(seed)
        sentences = [["dog", "barks", "dog"], ["barks", "dog", "dog", "cats", "barks"], ["dog", "dog"]]
        truth = ModelTrees(model, sentences).partition
        lengths = torch.tensor([len(sentence) for sentence in sentences])
        leaf = grammar.lexical.lookup(torch.tensor([entry for s in sentences for entry in model.lexicon.encode(s)]))
        coarse = covered(projected_coarse(grammar))
        tags = coarse.grammar.lexical.lookup(
            torch.tensor([entry for s in sentences for entry in model.lexicon.encode(s)])
        )
        forest, nodes = Coarse(coarse.grammar, coarse.cover, Stages(leaf.device)).forest(tags, lengths, 0.0)
        bound = LossBound(grammar)
        for share in (1.0, 0.99, 0.9, 0.5):
            keep = torch.rand(len(forest.rule), generator=generator) < share
            some, kept = pruned(forest, nodes, keep)
            for one, log_z in zip(bound.of(leaf, lengths, some, kept), truth.tolist(), strict=True):
                assert one.log_z <= log_z + 1e-9
                assert one.highest >= log_z - 1e-12
                assert 0 <= one.lost <= 1
                losses.append((share, one.lost))
                if share == 1:
                    assert one.log_z == pytest.approx(log_z, abs=1e-9)
                    assert one.lost < 1e-3
    assert any(lost > 0.1 for share, lost in losses if share < 1)
    assert ROUNDING < 1e-6


def test_parsers_show_it(monkeypatch):
    model = train(corpus("dev")[:80], "em", states=2, iterations=2)
    sentences = [words(tree) for tree in corpus("dev")[80:110] if len(words(tree)) <= 12][:5]
    whole = ModelTrees(model, sentences).partition.tolist()
    loose, tight = (
        Parser(model, device="cpu", dtype="float64", prune=prune).pruning_loss(sentences) for prune in (1e-9, 1e-3)
    )
    for one, other, log_z in zip(loose, tight, whole, strict=True):
        for known in (one, other):
            assert known.log_z <= log_z + 1e-4
            assert known.highest >= log_z - 1e-4
        assert one.lost <= other.lost + 1e-6
    for wrong in (Parser(model, device="cpu", prune=0), Parser(compress(model, "cover"), device="cpu")):
        with pytest.raises(InputError, match="pruning_loss needs one model whose charts are pruned"):
            wrong.pruning_loss(sentences)
