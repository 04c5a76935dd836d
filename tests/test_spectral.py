"""The method of moments: against plain loops and dense matrices, and what its signed models can do."""

import itertools
from dataclasses import replace

import pytest
import torch
from matplotlib.figure import Figure
from running import run
from test_training import TREES

import lvpcfg
from lvpcfg import Binarisation, InputError, build_treebank, corpus, write_trees
from lvpcfg.chart.textbook import log_partition
from lvpcfg.estimate import projections
from lvpcfg.estimate.estimator import Task
from lvpcfg.estimate.features import INSIDE, OUTSIDE, RARE, Nodes, values_of
from lvpcfg.estimate.moments import FeatureMatrix, singular
from lvpcfg.estimate.projections import Projections
from lvpcfg.estimate.spectral import SpectralOptions
from lvpcfg.estimate.spectral_grammar import SpectralGrammar, pair, triple
from lvpcfg.jobs import board
from lvpcfg.nn import GrammarLayer
from lvpcfg.options import DECODERS
from lvpcfg.trees.brackets import trees_from_text
from lvpcfg.trees.heads import head_words

TRAIN = corpus("dev")[:60]
SHORT = [tree.leaves() for tree in TRAIN if len(tree.leaves()) <= 12][:5]
SENTENCES = [*SHORT, ["door"], ["Xyzzy"], ["a", "xyzzying"]]


@pytest.fixture(autouse=True)
def small_symbols_have_states(monkeypatch):
    monkeypatch.setattr(projections, "FEW", 2)
    monkeypatch.setattr(projections, "MANY", 20)


def projected(states=4, trees=TRAIN, **options):
    task = Task(build_treebank(trees))
    return task, Projections.of(SpectralOptions(states=states, **options), task, task.seed)


def in_loops(task, nodes, words=1.0):
    """The grammar without back-off of rules."""
    return SpectralGrammar(task.treebank, task.observed, nodes, 0.0, words)


@pytest.fixture(scope="module")
def model():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(projections, "FEW", 2)
        patch.setattr(projections, "MANY", 20)
        return lvpcfg.train(TRAIN, "spectral", states=3)


# ---------------------------------------------------------------- features


def test_features_of_a_node():
    task = Task(build_treebank(trees_from_text(TREES)))
    bank, nodes = task.treebank, Nodes(task.treebank, task.observed.lexicon)
    names = [bank.symbols.names[symbol] for symbol in bank.symbol.tolist()]
    vp, saw = names.index("VP"), names.index("VB")  # of the first tree
    cat = next(node for node in range(len(names)) if names[node] == "NN" and int(bank.start[node]) == 4)

    def texts(features, node):
        found = values_of(None, features, nodes)
        return {name: found[name].text(node) for name in found if int(found[name].number[node]) >= 0}

    assert texts(INSIDE, vp) == {
        "rule": "VP -> VB NP",
        "left child": "VB",
        "right child": "NP",
        "rule and right rule": "VP -> VB NP, NP -> DT NN",
        "head tag": "VB",
        "length": "3",
    }
    assert texts(OUTSIDE, vp) == {
        "rule above": "S -> NP VP*",
        "parent": "S",
        "words to the left": "2",
        "words to the right": "0",
    }  # no other head: that of S is the same
    assert texts(INSIDE, saw).keys() == {"word"}
    assert texts(OUTSIDE, cat) == {
        "rule above": "NP -> DT NN*",
        "two rules above": "NP -> DT NN*, VP -> VB NP*",
        "three rules above": "NP -> DT NN*, VP -> VB NP*, S -> NP VP*",
        "parent": "NP",
        "parent and grandparent": "NP, VP",
        "other head tag": "VB",
        "words to the left": "4",
        "words to the right": "0",
    }


HEADS = [
    ("(TOP (S (NP (DT the) (NN dog)) (VP (MD may) (VP (VB bark)))))", {"S": "may", "NP": "dog", "VP": "may"}),
    ("(TOP (NP (NP (NNP Ann) (POS 's)) (JJ old) (NN car) (NN door)))", {"NP": "door", "@NP": "door"}),
    ("(TOP (PP (IN in) (NP (NN town))))", {"PP": "in", "NP": "town"}),
    ("(TOP (S (X (A a) (B b)) (VP (VBD went))))", {"S": "went", "VP": "went"}),
    ("(TOP (VP (ADVP (RB now)) (VBD went) (NP (NN home)) (PP (IN by) (NP (NN car)))))", {"VP": "went", "@VP": "went"}),
    ("(TOP (sn (d el) (n perro)))", {"sn": None}),
    ("(TOP (FRAG (RB not) (NN today)))", {"FRAG": "not"}),
]


@pytest.mark.parametrize("scheme", [Binarisation(), Binarisation(direction="left", vertical=2, unaries="collapse")])
@pytest.mark.parametrize(("text", "expected"), HEADS)
def test_head_words(text, expected, scheme):
    bank = build_treebank(trees_from_text(text), scheme)
    head = head_words(bank).tolist()
    first = {}
    for node, symbol in enumerate(bank.symbol.tolist()):
        name = bank.symbols.names[symbol].partition("^")[0].partition("+")[0]
        if bank.left[node] >= 0:
            word = bank.words[bank.lexical_rules[bank.rule[head[node]], 1]] if head[node] >= 0 else None
            first.setdefault(name, word)
        else:
            assert head[node] == node
    if scheme.direction == "right":
        assert {name: first[name] for name in expected} == expected
    else:
        names = first.keys() & {name for name in expected if name != "NP" and not name.startswith("@")}
        assert {name: first[name] for name in names} == {name: expected[name] for name in names}


def test_a_feature_of_ones_own(monkeypatch):
    monkeypatch.setattr(projections, "SHOWN", 100)
    for registry in (INSIDE, OUTSIDE):
        for name in ("width of the left child", "is first", "wrong", "no tensor"):
            monkeypatch.setitem(registry, name, None)
            del registry[name]

    @lvpcfg.inside_feature("width of the left child")
    def left_width(nodes):
        return nodes.of(nodes.left, nodes.length)

    @lvpcfg.outside_feature("is first")
    def is_first(nodes):
        return (nodes.treebank.start == 0).long()

    @lvpcfg.inside_feature("wrong")
    def wrong(nodes):
        return torch.zeros(3)

    @lvpcfg.inside_feature("no tensor")
    def no_tensor(nodes):
        return [1, 2]

    inside, outside = ["width of the left child", "rule"], ["is first", "parent"]
    model = lvpcfg.train(TRAIN, "spectral", states=3, inside=inside, outside=outside)
    found = model.provenance["symbols"]["NP"]
    lines = {side: "\n".join(line for state in found[side] for line in state) for side in ("inside", "outside")}
    assert " width of the left child: 1" in lines["inside"]
    assert " is first: 1" in lines["outside"]
    with pytest.raises(InputError, match=r"the feature 'wrong' has \(3,\) values: expected one for each of"):
        lvpcfg.train(TRAIN, "spectral", states=3, inside=["wrong"])
    with pytest.raises(InputError, match=r"the feature 'no tensor' is \[1, 2\]: expected a tensor"):
        lvpcfg.train(TRAIN, "spectral", states=3, inside=["no tensor"])
    with pytest.raises(InputError, match="there is no feature 'nose': expected some of rule, left child, "):
        lvpcfg.train(TRAIN, "spectral", inside=["nose"])
    with pytest.raises(InputError, match="there is a feature 'is first' already"):
        lvpcfg.outside_feature("is first")(lambda nodes: nodes.symbol)


# ---------------------------------------------------------------- moments


def dense(matrix):
    """phi or psi, [nodes, columns], less the mean over the nodes of a symbol."""
    full = torch.zeros(len(matrix.symbol), len(matrix.owner), dtype=torch.float64)
    for node, (columns, values) in enumerate(zip(matrix.column.tolist(), matrix.value.tolist(), strict=True)):
        for column, value in zip(columns, values, strict=True):
            full[node, column] += value
    for symbol in range(len(matrix.sizes)):
        rows = (matrix.symbol == symbol).nonzero()
        own = (matrix.owner == symbol).nonzero().squeeze(1)
        full[rows, own] -= full[rows, own].mean(0)
    return full


def matrices(text=TREES):
    task, found = projected(1, trees_from_text(text))
    return task.treebank, found.matrices


def test_features_are_scaled_by_their_frequency():
    bank, _ = matrices()
    sizes = torch.bincount(bank.symbol)
    matrix = FeatureMatrix.of(bank.symbol, sizes, [bank.start, bank.symbol])
    for node in range(len(bank.symbol)):
        same = bank.symbol == bank.symbol[node]
        both = (int((same & (bank.start == bank.start[node])).sum()), int(same.sum()))
        expected = [(int(same.sum()) / (count + 5)) ** 0.5 for count in both]
        assert matrix.value[node].tolist() == pytest.approx(expected)


def test_any_number_of_features_keeps_symbols_apart():
    bank, _ = matrices()
    sizes = torch.bincount(bank.symbol)
    matrix = FeatureMatrix.of(bank.symbol, sizes, [torch.zeros_like(bank.symbol)] * 300)
    assert matrix.owner.tolist() == [symbol for symbol in range(len(sizes)) for _ in range(300)]
    assert torch.equal(matrix.owner[matrix.column], bank.symbol.unsqueeze(1).expand(-1, 300))


def test_products_with_feature_matrices():
    bank, (inside, _) = matrices()
    full, generator = dense(inside), torch.Generator().manual_seed(0)
    right = torch.randn(full.shape[1], 3, generator=generator, dtype=torch.float64)
    left = torch.randn(full.shape[0], 3, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(inside.times(right), full @ right)
    weights = 1 / inside.sizes[bank.symbol].unsqueeze(1)
    torch.testing.assert_close(inside.transposed_times(left), full.T @ (weights * left))


@pytest.mark.parametrize("k", [1, 4])
def test_singular_vectors_of_omega(k):
    bank, (inside, outside) = matrices()
    found = singular(inside, outside, k, torch.Generator().manual_seed(0))
    phi, psi = dense(inside), dense(outside)
    for symbol in range(len(bank.symbols)):
        nodes, rows, columns = bank.symbol == symbol, inside.columns_of()[symbol], outside.columns_of()[symbol]
        omega = phi[nodes][:, rows].T @ psi[nodes][:, columns] / int(nodes.sum())
        u, s, v = torch.linalg.svd(omega)
        s = torch.nn.functional.pad(s, (0, k))[:k]
        torch.testing.assert_close(found.values[symbol], s)
        kept = int((s > 1e-6).sum())
        left, right = found.left[rows, :kept], found.right[columns, :kept]
        torch.testing.assert_close(left.T @ left, torch.eye(kept).double())
        # The best approximation of this rank, whatever the signs.
        torch.testing.assert_close((left * s[:kept]) @ right.T, (u[:, :kept] * s[:kept]) @ v[:kept])


def test_the_mean_of_y_z_is_the_identity():
    task, found = projected()
    nodes = found.nodes
    assert int(nodes.states.max()) == 4
    for symbol, m in enumerate(nodes.states.tolist()):
        own = task.treebank.symbol == symbol
        y, z = nodes.inside[own], nodes.outside[own]
        assert not y[:, m:].any()
        assert not z[:, m:].any()
        torch.testing.assert_close(y[:, :m].T @ z[:, :m] / len(y), torch.eye(m).double())


def test_small_singular_values_give_no_state():
    _, found = projected()
    values = found.singular.values
    for least, share in ((1.5, 0.0), (0.0, 0.7), (1e9, 0.0)):
        nodes = projected(least=least, share=share)[1].nodes
        good = (values > least) & (values > share * values[:, :1]) & (torch.arange(3) < found.most.unsqueeze(1) - 1)
        assert nodes.states.tolist() == (1 + good.sum(1)).tolist()
        assert nodes.outside.isfinite().all()
    few = projected(least=1e9)[1]
    assert few.figures()["states"] == len(few.nodes.states)
    assert few.figures()["rank_deficient"] == int((few.most > 1).sum())


# ---------------------------------------------------------------- the grammar


@pytest.mark.parametrize("own", [1, 0.3])
def test_back_off_of_binary_rules(own):
    z, y2, y3 = (torch.randn(5, m, generator=torch.Generator().manual_seed(m)).double() for m in (2, 3, 4))
    for rows in (z, y2, y3):
        rows[:, 0] = 1
    found = triple(z, y2, y3, own)
    for i, j, k in itertools.product(range(2), range(3), range(4)):
        a, b, c = z[:, i], y2[:, j], y3[:, k]
        e1, e3, e4 = (a * b * c).mean(), a.mean() * b.mean() * c.mean(), float(i == j == k == 0)
        pairs = ((a * b).mean() * c.mean(), (a * c).mean() * b.mean(), (b * c).mean() * a.mean())
        e2 = sum(pairs) / 3
        expected = own * e1 + (1 - own) * (own * e2 + (1 - own) * (own * e3 + (1 - own) * e4))
        assert float(found[i, j, k]) == pytest.approx(float(expected))


@pytest.mark.parametrize("own", [1, 0.3])
def test_back_off_of_unary_rules(own):
    z, y2 = (torch.randn(5, m, generator=torch.Generator().manual_seed(m)).double() for m in (2, 3))
    found = pair(z, y2, own)
    for i, j in itertools.product(range(2), range(3)):
        a, b = z[:, i], y2[:, j]
        e1, e3, e4 = (a * b).mean(), a.mean() * b.mean(), float(i == j == 0)
        assert float(found[i, j]) == pytest.approx(float(own * e1 + (1 - own) * (own * e3 + (1 - own) * e4)))


def test_parameters_are_means_over_nodes():
    task, found = projected()
    bank, y, z = task.treebank, found.nodes.inside, found.nodes.outside
    grammar = in_loops(task, found.nodes).grammar()
    m, names = grammar.states.tolist(), bank.symbols.names
    binary = [torch.zeros(tuple(m[s] for s in rule)).double() for rule in bank.binary_rules.tolist()]
    unary = [torch.zeros(tuple(m[s] for s in rule)).double() for rule in bank.unary_rules.tolist()]
    root, inner = torch.zeros(len(grammar.root)).double(), len(bank.symbols.interminals)
    for node, (symbol, rule) in enumerate(zip(bank.symbol.tolist(), bank.rule.tolist(), strict=True)):
        weight, children = 1 / int(found.nodes.sizes[symbol]), (int(bank.left[node]), int(bank.right[node]))
        own = [y[child, : m[int(bank.symbol[child])]] for child in children if child >= 0]
        if len(own) == 2:
            binary[rule] += weight * torch.einsum("i,j,k->ijk", z[node, : m[symbol]], *own)
        elif own:
            unary[rule] += weight * torch.outer(z[node, : m[symbol]], *own)
    for node in bank.roots[:-1].tolist():
        symbol = int(bank.symbol[node])
        first = int(grammar.first_state[symbol])
        root[first : first + m[symbol]] += y[node, : m[symbol]] / len(bank)
    torch.testing.assert_close(grammar.binary.values, torch.cat([tensor.flatten() for tensor in binary]))
    torch.testing.assert_close(grammar.unary, torch.cat([tensor.flatten() for tensor in unary]))
    torch.testing.assert_close(grammar.root, root)

    plain = lvpcfg.train(TRAIN).grammar.lexical  # p(x | a)
    entry = bank.words.index("the")
    leaves = [
        node for node in range(len(y)) if int(bank.left[node]) < 0 and bank.lexical_rules[bank.rule[node], 1] == entry
    ]
    assert len(leaves) > RARE
    tag = int(bank.symbol[leaves[0]])
    assert names[tag] == "DT"
    first = int(grammar.first_state[tag] - grammar.first_state[inner])
    q = grammar.lexical.lookup(torch.tensor([entry]))[0, first : first + m[tag]]
    p = plain.lookup(torch.tensor([entry]))[0, tag - inner]
    assert m[tag] > 1
    torch.testing.assert_close(q, p * z[leaves, : m[tag]].mean(0), rtol=1e-3, atol=1e-7)  # other tags back off


def test_all_trees_together_are_worth_one():
    """With children of the vector (1, 0, ...), which is worth 1 in all, each phrase has (1, 0, ...) again."""
    task, found = projected()
    grammar = in_loops(task, found.nodes).grammar()
    total = torch.zeros(grammar.interminal_states).double()
    first = grammar.first_state.tolist()
    for rules, tensor in ((grammar.binary_rules, grammar.binary.tensor), (grammar.unary_rules, grammar.unary_tensor)):
        for number, (parent, *_) in enumerate(rules.tolist()):
            total[first[parent] : first[parent + 1]] += tensor(number).flatten(1)[:, 0]
    ones = torch.zeros(len(grammar.root)).double()
    ones[grammar.first_state[:-1]] = 1
    torch.testing.assert_close(total, ones[: len(total)])
    assert float(grammar.root @ ones) == pytest.approx(1)
    words = grammar.lexical.column_sums()  # the other states: but for the smoothing of words
    constant = ones[len(total) :] == 1
    torch.testing.assert_close(words[constant], torch.ones_like(words[constant]))


@pytest.mark.parametrize("many", [20, 10**6])
def test_one_state_is_the_treebank_pcfg(many, monkeypatch):
    """Also where all symbols are rare."""
    monkeypatch.setattr(projections, "FEW", many - 1)
    monkeypatch.setattr(projections, "MANY", many)
    found = lvpcfg.train(TRAIN, "spectral", states=1 if many == 20 else 4).grammar
    expected = lvpcfg.train(TRAIN, "count").grammar
    assert found.states.tolist() == expected.states.tolist()
    for name in ("unary", "root"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name))
    torch.testing.assert_close(found.binary.values, expected.binary.values)
    for name in ("value", "weight", "backoff"):
        torch.testing.assert_close(getattr(found.lexical, name), getattr(expected.lexical, name))


def test_the_same_seed_gives_the_same_model(model):
    again = lvpcfg.train(TRAIN, "spectral", states=3)
    assert torch.equal(model.grammar.binary.values, again.grammar.binary.values)
    assert model.provenance == again.provenance


UNARY = "(TOP (S (A a)))\n(TOP (S (B b)))\n(TOP (T (A a)))\n(TOP (S (A c)))"
BINARY = "(TOP (S (A a) (B b)))\n(TOP (S (B b) (A a)))\n(TOP (S (A c) (A a)))\n(TOP (S (A a) (S (B b) (A a))))"
WORDS = "(TOP (A a))\n(TOP (A b))\n(TOP (B b))"
SPANISH = (
    "(TOP (sn (d el) (grup.nom (n perro))) (grup.verb (v corre)))\n(TOP (sn (d la) (n gata)) (grup.verb (v duerme)))"
)


@pytest.mark.parametrize("text", [UNARY, BINARY, WORDS, SPANISH], ids=["unary", "binary", "words", "no heads"])
@pytest.mark.parametrize("name", ["spectral", "cluster"])
def test_treebanks_that_lack_something(text, name, monkeypatch):
    monkeypatch.setattr(projections, "FEW", 0)
    monkeypatch.setattr(projections, "MANY", 3)
    trees = trees_from_text(text)
    parser = lvpcfg.Parser(lvpcfg.train(trees, name, states=3), device="cpu")
    found = list(parser.parse_sents([trees[0].leaves(), ["a", "b", "zzz"], ["zzz"]]))
    assert [tree.leaves() for tree in found] == [trees[0].leaves(), ["a", "b", "zzz"], ["zzz"]]
    assert found[0] == trees[0]


@pytest.mark.parametrize("scheme", [Binarisation(vertical=2, horizontal=1, unaries="collapse"), Binarisation("left")])
def test_binarisations(scheme):
    model = lvpcfg.train(TRAIN, "spectral", states=3, binarisation=scheme)
    assert int(model.grammar.states.max()) == 3
    assert lvpcfg.Parser(model, device="cpu").parse(SENTENCES[0]).leaves() == SENTENCES[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"states": 0}, "estimator.states is 0: expected 1 or more"),
        ({"inside": []}, r"estimator.inside is \[\]: expected a list of names of features"),
        ({"outside": "rule"}, "estimator.outside is 'rule': expected a list of names of features"),
        ({"words": 1.5}, "estimator.words is 1.5: expected 1 at the most"),
        ({"backoff": -1}, "estimator.backoff is -1: expected 0 or more"),
        ({"share": 2}, "estimator.share is 2: expected 1 at the most"),
    ],
)
def test_options_that_make_no_sense(options, message):
    with pytest.raises(InputError, match=message):
        SpectralOptions(**options)


# ---------------------------------------------------------------- signed models


def by_textbook(trees):
    """log |Z| of one sentence."""
    semiring, grammar, words = trees._for_sums()
    return float(log_partition(grammar, words, trees.lengths, semiring))


def test_a_signed_model_parses(model):
    assert model.grammar.signed
    assert not model.coarse.grammar.signed
    whole, pruned = (lvpcfg.Parser(model, device="cpu", dtype="float64", prune=prune) for prune in (0, 1e-12))
    expected = [parse.sentence_log_prob for parse in whole.analyse(SENTENCES)]
    parses = list(pruned.analyse(SENTENCES))
    assert [parse.tree.leaves() for parse in parses] == SENTENCES
    assert not any(parse.flat for parse in parses)
    assert [parse.sentence_log_prob for parse in parses] == pytest.approx(expected)
    layer = GrammarLayer(model, "values")
    with torch.no_grad():
        found = [by_textbook(layer([sentence])) for sentence in SENTENCES]
    assert found == pytest.approx(expected)


@pytest.mark.parametrize("decoder", DECODERS)
def test_decoders(model, decoder):
    if decoder == "viterbi":
        with pytest.raises(InputError, match="the decoder viterbi needs non-negative parameters"):
            lvpcfg.Parser(model, decoder=decoder, device="cpu")
    else:
        found = lvpcfg.Parser(model, decoder=decoder, device="cpu").parse_sents(SENTENCES)
        assert [tree.leaves() for tree in found] == SENTENCES


def test_what_signs_have_no_meaning_for(model):
    trees = GrammarLayer(model, "values")(SENTENCES[:1])
    with pytest.raises(InputError, match="sample needs non-negative parameters"):
        trees.sample()
    with pytest.raises(InputError, match=r"the model has negative parameters: expected .* another method than apr"):
        lvpcfg.compress(model, "apr", rank=10)


@pytest.mark.parametrize(
    ("method", "options"),
    [("als", {"rank": 2, "threshold": 1.0}), ("svd", {"error": 1e-9}), ("cover", {})],
    ids=["als", "svd", "cover"],
)
def test_it_is_compressed(model, method, options):
    small = lvpcfg.compress(model, method, **options)
    found = list(lvpcfg.Parser(small, device="cpu", dtype="float64").analyse(SENTENCES))
    assert [parse.tree.leaves() for parse in found] == SENTENCES
    if method != "als":  # these are exact
        expected = lvpcfg.Parser(model, device="cpu", dtype="float64").analyse(SENTENCES)
        assert [parse.sentence_log_prob for parse in found] == pytest.approx(
            [parse.sentence_log_prob for parse in expected], rel=1e-3
        )


def test_it_is_saved_and_loaded(model, tmp_path):
    model.save(tmp_path / "model")
    loaded = lvpcfg.Model.load(tmp_path / "model")
    assert loaded.provenance == model.provenance
    assert torch.equal(loaded.grammar.binary.values, model.grammar.binary.values)
    values = loaded.provenance["symbols"]["NP"]["singular_values"]
    assert values == sorted(values, reverse=True)


def test_the_job_trains_and_is_taken_up(tmp_path, monkeypatch):
    for name in ("draw_trees", "draw_states"):  # test_board.py looks at pictures
        monkeypatch.setattr(board, name, lambda *_, **__: Figure((0.1, 0.1)))
    write_trees(TRAIN, tmp_path / "train.mrg")
    path = str(tmp_path / "train.mrg")
    settings = {"train": path, "dev": path, "estimator": SpectralOptions(states=3)}
    result, printed = run("train", tmp_path / "run", **settings)
    assert result["negative_numbers"] > 0
    assert result["states"] == int(lvpcfg.Model.load(tmp_path / "run/model").grammar.states.sum())
    again, printed = run("train", tmp_path / "run", **settings, resume=True)
    assert "is finished already" in printed
    assert again == result
    with pytest.raises(InputError, match=r"was made with estimator\.states 3"):
        run("train", tmp_path / "run", **settings | {"estimator": SpectralOptions(states=4)}, resume=True)


def test_words_back_off_to_words_like_them():
    """Half the mean of a frequent word, half that of rare words of its class; an unseen word has that of its class."""
    task, found = projected()
    own, half, none = (in_loops(task, found.nodes, words).lexical() for words in (1.0, 0.5, 0.0))
    torch.testing.assert_close(half.value, (own.value + none.value) / 2)
    assert not torch.allclose(own.value, none.value)
    torch.testing.assert_close(own.backoff, none.backoff)
    assert torch.equal(replace(own, value=none.value).lookup(torch.tensor([0])), none.lookup(torch.tensor([0])))
