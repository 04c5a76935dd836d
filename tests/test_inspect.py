"""What states stand for: as data, as HTML, in the terminal."""

from dataclasses import replace
from html.parser import HTMLParser
from io import StringIO
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from strategies import random_model

from lvpcfg import InputError, Model, compress, corpus, train
from lvpcfg.estimate import projections
from lvpcfg.evaluation.inspect import OTHER, RULES, look_inside
from lvpcfg.evaluation.page import page
from lvpcfg.evaluation.pictures import draw_singular_values
from lvpcfg.grammar.expectations import expected_states
from lvpcfg.grammar.grammar import Grammar
from lvpcfg.jobs import inspect
from lvpcfg.jobs.run import Run
from lvpcfg.trees.lexicon import Lexicon
from lvpcfg.trees.treebank import Symbols


def of_state(model):
    return {state.number: state for symbol in look_inside(model) for state in symbol.states}


def probabilities(grammar: Grammar) -> dict[tuple[int, ...], float]:
    """Every rule between states, one by one."""
    first, found = grammar.first_state.tolist(), {}
    for rules, tensor in ((grammar.binary_rules, grammar.binary.tensor), (grammar.unary_rules, grammar.unary_tensor)):
        for number, rule in enumerate(rules.tolist()):
            for place in tensor(number).nonzero().tolist():
                states = tuple(first[symbol] + state for symbol, state in zip(rule, place, strict=True))
                found[states] = float(tensor(number)[tuple(place)])
    return found


@pytest.mark.parametrize("states", [(2, 3, 1, 4), (1, 1, 1, 1)])
def test_rules_and_words_are_the_likeliest_of_the_grammar(states):
    model = random_model(5, states)
    grammar, lexicon = model.grammar, model.lexicon
    rules = probabilities(grammar)
    table = grammar.lexical.lookup(torch.arange(len(lexicon)))
    names = [*lexicon.words, *lexicon.classes, OTHER]
    inner = int(grammar.first_state[2])
    for number, state in of_state(model).items():
        wanted = sorted((p for (parent, *_), p in rules.items() if parent == number), reverse=True)[:RULES]
        assert [rule.probability for rule in state.rules] == wanted
        assert all(rules[(number, *rule.children)] == rule.probability for rule in state.rules)
        if number >= inner:
            q = table[:, number - inner]
            assert [word.probability for word in state.words] == q[q > 0].sort(descending=True).values.tolist()
            assert all(float(q[names.index(word.text)]) == word.probability for word in state.words)
            assert all(word.known == (word.text in lexicon.words) for word in state.words)


def test_how_often_states_are_expected():
    model = train(corpus("dev"))
    found, expected = of_state(model), expected_states(model.grammar)
    assert [found[number].expected for number in range(len(found))] == pytest.approx(expected.tolist())
    symbols = look_inside(model)
    assert [symbol.expected for symbol in symbols] == sorted((symbol.expected for symbol in symbols), reverse=True)
    assert all(sum(state.share for state in symbol.states) == pytest.approx(1) for symbol in symbols)
    assert {state.name for state in found.values()} >= {"NP", "NN"}  # one state: no number


def test_typical_words_are_those_that_other_states_do_not_have():
    """`the` is likeliest everywhere; of ten words more each state has some of its own."""
    model = random_model(0, (1, 1, 1, 2))
    words = ("the", *(f"common{i}" for i in range(9)), *(f"rare{i}" for i in range(4)))
    rows = [[0.3, 0.3], *[[0.05, 0.05]] * 9, *[[0.04, 0.001]] * 2, *[[0.001, 0.04]] * 2, [0, 0], [0, 0]]
    full = torch.tensor([[0, *row] for row in rows], dtype=torch.float64)
    lexical = replace(
        model.grammar.lexical,
        row=torch.arange(len(rows) + 1) * 3,
        state=torch.arange(3).repeat(len(rows)),
        value=full.flatten(),
        weight=torch.zeros(len(rows), dtype=torch.float64),
        source=torch.zeros(len(rows), dtype=torch.int64),
        backoff=torch.zeros(1, 3, dtype=torch.float64),
        widest=3,
    )
    grammar = replace(model.grammar, lexical=lexical)
    found = of_state(replace(model, grammar=grammar, lexicon=Lexicon(words, ("<unknown>",), "english")))
    assert found[3].words[0].text == "the"
    assert set(found[3].typical) == {"rare0", "rare1"}
    assert set(found[4].typical) == {"rare2", "rare3"}


class Strict(HTMLParser):
    """Fails on tags that do not match; keeps text, ids and links."""

    def __init__(self, text):
        super().__init__()
        self.open, self.text, self.ids, self.links, self.tags = [], [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        if tag not in ("meta", "img"):
            self.open.append(tag)
        values = dict(attributes)
        self.ids += [values["id"]] if "id" in values else []
        self.links += [values["href"]] if "href" in values else []

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


HOSTILE = "<script>alert('&amp;\")</script>"


@pytest.fixture
def hostile():
    """Labels and words that would be HTML, or markup of the terminal."""
    model = random_model()
    symbols = Symbols((HOSTILE, "[red]A[/red]"), ("[/]", "</td>"))
    lexicon = Lexicon((HOSTILE, "[bold]"), ("<unknown>",), "english")
    return replace(model, grammar=replace(model.grammar, symbols=symbols), lexicon=lexicon)


def test_html_shows_labels_and_words_as_they_are(hostile):
    parsed = Strict(page(look_inside(hostile), HOSTILE, "a & b"))
    assert "script" not in parsed.tags
    assert parsed.tags.count("title") == 1
    text = "".join(parsed.text)
    assert text.count(HOSTILE) > 3
    assert "</td>-3" in text
    assert len(set(parsed.ids)) == len(parsed.ids)
    assert {link.removeprefix("#") for link in parsed.links} <= set(parsed.ids)


def test_html_shows_which_states_came_from_one():
    model = random_model(0, (1, 1, 1, 4))
    hierarchy = torch.tensor([[0] * 7, [0, 0, 0, 0, 1, 0, 1], [0, 0, 0, 0, 2, 1, 2]])
    model = replace(model, grammar=replace(model.grammar, hierarchy=hierarchy))
    symbol = next(symbol for symbol in look_inside(model) if symbol.name == "V")
    assert [state.name for state in symbol.states] == ["V-0", "V-2", "V-1", "V-3"]  # relatives side by side
    text = page(look_inside(model), "", "")
    assert text.count('class="split" rowspan="2">0<') == 1
    assert text.count('class="split" rowspan="2">1<') == 1
    assert text.count('class="split" rowspan="2">2<') == 1
    assert 'colspan="2">splits' in text
    Strict(text)


@pytest.fixture
def job(tmp_path):
    """Runs job=inspect; returns its figures and what it printed."""

    def run(model, symbol=None):
        printed = StringIO()
        result = Run(tmp_path / "run", Console(file=printed, width=120))
        if isinstance(model, Model):
            model.save(tmp_path / "model")
            model = str(tmp_path / "model")
        inspect.run(SimpleNamespace(model=model, symbol=symbol), result)
        return result.result, printed.getvalue()

    return run


def test_job_prints_a_few_symbols_and_writes_all(job, tmp_path):
    model = train(corpus("dev"))
    result, printed = job(model)
    assert result["symbols"] == len(model.grammar.symbols)
    assert "NP, " in printed
    assert "likeliest words" in printed
    assert str(tmp_path / "run" / "grammar.html") in "".join(printed.split("\n"))
    text = "".join(Strict((tmp_path / "run" / "grammar.html").read_text()).text)
    assert all(name in text for name in model.grammar.symbols.names)


def test_job_prints_the_symbols_asked_for(job, hostile):
    _, printed = job(random_model(), symbol=["V", "A"])
    assert printed.index("V, ") < printed.index("A, ")
    assert "S, " not in printed
    assert "A-2" in printed
    _, printed = job(hostile, symbol="[red]A[/red]")
    assert "[red]A[/red]-1" in printed


def test_job_on_symbols_that_are_not_there(job):
    with pytest.raises(InputError, match=r"the grammar has no symbol 'Vx': the nearest are 'V', .*\.$"):
        job(random_model(), symbol="Vx")
    with pytest.raises(InputError, match="has no symbol 7"):
        job(random_model(), symbol=["V", 7])
    with pytest.raises(InputError, match="needs one model folder"):
        job(None)
    with pytest.raises(InputError, match="needs one model folder"):
        job(["a", "b"])


@pytest.mark.parametrize(
    ("estimator", "options"),
    [
        ({"estimator": "em", "states": 2, "iterations": 2}, {"method": "als", "rank": 1, "threshold": 1.0}),
        ({"estimator": "em", "states": 2, "iterations": 2}, {"method": "als", "rank": 1, "threshold": 1e-2}),
        ({}, {"method": "cover"}),
        ({}, {"method": "svd", "error": 0.1}),
        ({}, {"method": "apr", "rank": 20}),
    ],
    ids=str,
)
def test_job_on_compressed_models(job, estimator, options):
    model = train(corpus("dev")[:60], **estimator)
    result, printed = job(compress(model, **options))
    assert result["symbols"] == len(model.grammar.symbols)
    assert "likeliest words" in printed


@pytest.fixture
def spectral(monkeypatch):
    monkeypatch.setattr(projections, "FEW", 2)
    monkeypatch.setattr(projections, "MANY", 20)
    return train(corpus("dev")[:60], "spectral", states=3)


def test_states_of_a_spectral_model_are_directions(job, spectral, tmp_path):
    about = spectral.provenance["symbols"]
    _, printed = job(spectral, symbol=["NP", "DT"])
    for words in ("constant", "largest numbers of rules", "largest numbers of words", "singular", "+0."):
        assert words in printed
    assert "%" not in printed
    assert f"{about['NP']['singular_values'][0]:.3g}" in printed
    assert about["NP"]["inside"][0][0] in printed
    assert (tmp_path / "run/singular_values.png").read_bytes().startswith(b"\x89PNG")
    page_of = (tmp_path / "run/grammar.html").read_text()
    parsed = Strict(page_of)
    assert parsed.tags.count("img") == 1
    assert 'src="data:image/png;base64,iVBOR' in page_of
    text = "".join(parsed.text)
    for symbol in about.values():
        assert all(line in text for side in ("inside", "outside") for lines in symbol[side] for line in lines)


def test_numbers_of_a_spectral_model_are_the_largest_of_any_sign(spectral):
    grammar = spectral.grammar
    rules = probabilities(grammar)
    symbols = look_inside(spectral)
    coarse = dict(zip(grammar.symbols.names, expected_states(spectral.coarse.grammar).tolist(), strict=True))
    for symbol in symbols:
        assert symbol.expected == pytest.approx(coarse[symbol.name])
        assert symbol.directions is not None or len(symbol.states) == 1
        for state in symbol.states:
            assert state.expected is state.share is None
            if not symbol.preterminal:
                wanted = sorted((abs(p) for (parent, *_), p in rules.items() if parent == state.number), reverse=True)
                assert [abs(rule.probability) for rule in state.rules] == wanted[:RULES]
                assert all(rules[(state.number, *rule.children)] == rule.probability for rule in state.rules)
    assert any(word.probability < 0 for symbol in symbols for state in symbol.states for word in state.words)


def test_compressed_spectral_models_and_those_of_one_state(job, spectral):
    _, printed = job(compress(spectral, "svd"), symbol="NP")
    assert "singular" in printed
    _, printed = job(train(corpus("dev")[:60], "spectral", states=1), symbol="NP")
    assert "likeliest rules" in printed
    assert "singular" not in printed


def test_the_line_in_the_picture_stands_behind_the_states():
    figure = draw_singular_values({"A": [3.0, 2.0, 1.0], "B": [1.0, 0.5]}, {"A": 3, "B": 2, "C": 1})
    (line,) = figure.axes[0].lines
    assert line.get_xdata().tolist() == [1.5, 1.5, 0.5, 0.5]
    assert line.get_ydata().tolist() == [-0.5, 0.5, 0.5, 1.5]


@pytest.mark.parametrize("change", [None, {"NP": {}}, {"NP": {"singular_values": [1.0], "inside": [], "outside": []}}])
def test_a_spectral_model_that_does_not_tell_its_directions(spectral, change):
    made = spectral.provenance | {"symbols": change}
    with pytest.raises(InputError, match="but not what its states are"):
        look_inside(replace(spectral, provenance=made))


def test_features_stand_on_the_page_as_they_are(spectral):
    symbols = spectral.provenance["symbols"]
    hostile = symbols["NP"] | {"inside": [[HOSTILE], *symbols["NP"]["inside"][1:]]}
    made = spectral.provenance | {"symbols": symbols | {"NP": hostile}}
    parsed = Strict(page(look_inside(replace(spectral, provenance=made)), "", ""))
    assert "script" not in parsed.tags
    assert HOSTILE in "".join(parsed.text)
