import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from nltk.tree import Tree

from lvpcfg import InputError, build_treebank, corpus, register_signature
from lvpcfg.estimate.latent import observed_counts
from lvpcfg.trees.lexicon import LexicalPairs, LexicalTable, Lexicon, build_lexicon, emissions
from lvpcfg.trees.signatures import SIGNATURES, english, suffix


def treebank(*tagged):
    """One flat tree for each string of word/TAG pairs."""
    return build_treebank(
        [Tree("S", [Tree(tag, [word]) for word, tag in (item.split("/") for item in text.split())]) for text in tagged]
    )


def tag_table(bank, lexicon, unseen):
    """p(tag | entry) and p(entry) of a treebank."""
    latent, counts = observed_counts(bank, lexicon, unseen)
    return latent.pairs.tags(counts.lexical)


def smoothed_tags(lexicon, entry, state, counts, states):
    """The same from counts in any order, which may repeat."""
    key, index = torch.unique(entry * states + state, return_inverse=True)
    total = counts.new_zeros(len(key)).index_add(0, index, counts)
    return LexicalPairs(lexicon, key // states, key % states, states).tags(total)


def test_p_tag_given_word_by_hand():
    bank = treebank(*["run/N run/V the/D"] * 6, "new/N the/D", "New/V the/D")
    lexicon, unseen = build_lexicon(bank)
    assert lexicon.words == ("run", "the", "new", "New")
    # Only "new" and "New" occur once; one is N, one is V: u(N) = u(V) = 1/2.
    assert sorted(lexicon.classes) == ["<unknown>-INITIAL-KNOWN", "<unknown>-lower"]
    tags, prior = tag_table(bank, lexicon, unseen)
    d, n, v = (bank.symbols.preterminals.index(tag) for tag in "DNV")
    table = tags.lookup(torch.arange(len(lexicon)))
    run, new, other = table[0], table[2], table[-1]
    lower = table[lexicon.unknown("frogs", first=False)]
    assert lower[n] == pytest.approx((1 + 0.5 / 2) / 1.5)  # of <unknown>-lower: of <unknown>-lower-s there is no sample
    assert lower[v] == pytest.approx((0.5 / 2) / 1.5)
    assert run[n] == pytest.approx((6 + 1e-4 * lower[n]) / (12 + 1e-4))  # 12 occurrences: common
    assert run[d] == 0
    assert new[n] == pytest.approx((1 + 0.5 * lower[n]) / 1.5)  # once: rare
    assert new[v] == pytest.approx((0.5 * lower[v]) / 1.5)
    assert lexicon.unknown("Frogs", first=False) == len(lexicon) - 1  # nothing like it was met
    assert other[n] == other[v] == pytest.approx(0.5)
    assert torch.allclose(table.sum(1), torch.ones(len(lexicon), dtype=torch.float64))
    # 22 tokens, 2 samples of unseen words, and half a token for whatever else may come
    assert prior.tolist() == pytest.approx([count / 24.5 for count in (12, 8, 1, 1, 1, 1, 0.5)])


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.integers(0, 10_000))
def test_emissions_sum_to_one_for_any_number_of_states(states_per_tag, seed):
    generator = torch.Generator().manual_seed(seed)
    lexicon = Lexicon(("a", "b", "c"), ("<unknown>", "<unknown>-lower"), "english")
    states = sum(states_per_tag)
    size = 30
    entry = torch.randint(0, 5, (size,), generator=generator)  # words and classes, not the last entry
    state = torch.randint(0, states, (size,), generator=generator)
    counts = 20 * torch.rand(size, generator=generator, dtype=torch.float64)
    tags, prior = smoothed_tags(lexicon, entry, state, counts, states)
    assert torch.allclose(tags.lookup(torch.arange(6)).sum(1), torch.ones(6, dtype=torch.float64))
    q = emissions(tags, prior)
    dense = q.lookup(torch.arange(6))  # [entries, states]
    assert torch.allclose(q.column_sums(), dense.sum(0))
    reached = torch.zeros(states, dtype=torch.bool).index_fill(0, state, True)
    assert torch.allclose(dense.sum(0)[reached], torch.ones(int(reached.sum()), dtype=torch.float64))
    assert bool((dense[:, ~reached] == 0).all())


def test_lookup_keeps_the_shape_and_lets_gradients_through():
    value = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    table = LexicalTable(
        row=torch.tensor([0, 2, 2, 3]),
        state=torch.tensor([0, 2, 1]),
        value=value,
        weight=torch.tensor([0.0, 1.0, 10.0]),
        source=torch.tensor([1, 0, 1]),
        backoff=torch.tensor([[0.4, 0.5, 0.6], [0.1, 0.2, 0.3]]),
        widest=2,
    )
    rows = table.lookup(torch.tensor([[2, 0], [1, 2]]))
    assert rows.shape == (2, 2, 3)
    expected = torch.tensor([[[1.0, 5.0, 3.0], [1.0, 0.0, 2.0]], [[0.4, 0.5, 0.6], [1.0, 5.0, 3.0]]])
    assert torch.allclose(rows, expected)
    assert torch.allclose(table.column_sums(), table.lookup(torch.arange(3)).sum(0))
    scaled = table.scale(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0, 5.0, 6.0])).lookup(torch.arange(3))
    factor = torch.tensor([1.0, 2.0, 3.0]).unsqueeze(1) * torch.tensor([4.0, 5.0, 6.0])
    assert torch.allclose(scaled, table.lookup(torch.arange(3)) * factor)
    rows.sum().backward()
    assert value.grad.tolist() == [1.0, 1.0, 2.0]


@pytest.mark.parametrize(("tokens", "weight"), [(9, 0.5), (10, 0.5), (11, 1e-4)])
def test_a_word_is_rare_up_to_ten_occurrences_also_in_expected_counts(tokens, weight):
    lexicon = Lexicon(("a",), (), "english")
    shares = torch.rand(50, 4, generator=torch.Generator().manual_seed(tokens)).softmax(1)
    for dtype in (torch.float32, torch.float64):
        posterior = shares[:tokens].to(dtype)
        counts = posterior.reshape(-1)
        tags, _ = smoothed_tags(
            lexicon, torch.zeros_like(counts, dtype=torch.int64), torch.arange(4).repeat(tokens), counts, 4
        )
        assert float(tags.weight[0]) == pytest.approx(weight / (tokens + weight), rel=1e-4)


def test_a_signature_is_told_the_same_of_a_word_in_training_and_in_parsing():
    told = []
    register_signature("spy", lambda word, first, known: told.append((word, known)) or "x")
    lexicon, _ = build_lexicon(treebank("a/X", "frog/X A/X"), "spy")
    del told[:]
    lexicon.unknown("frog", False), lexicon.unknown("toad", False), lexicon.unknown("Frog", False)
    assert told == [("frog", False), ("toad", False), ("Frog", True)]
    del SIGNATURES["spy"]


def test_unknown_words_are_like_those_that_occur_once():
    bank = treebank("a/X b/X", "a/X c/X", "d/Y a/X", "b/X E/Z d/Y")
    _, unseen = build_lexicon(bank)
    met = [bank.words[bank.lexical_rules[rule, 1]] for rule in bank.rule[unseen.node]]
    assert met == ["c", "E"]


def test_where_no_word_occurs_once_all_words_stand_in_for_the_unknown():
    bank = treebank("a/X b/Y", "a/X a/X b/Y")
    lexicon, unseen = build_lexicon(bank)
    assert lexicon.classes == ()
    tags, _ = tag_table(bank, lexicon, unseen)
    assert tags.backoff.tolist() == [[0.6, 0.4]]


def test_a_class_is_as_fine_as_its_sample_allows():
    """Twelve words in -sing, three in -ring, one in -tted: the last two share a coarser class or have their own."""
    once = [f"{letter}{letter}sing/A" for letter in "abcdefghijkl"] + ["paring/B", "boring/B", "daring/B", "netted/C"]
    lexicon, unseen = build_lexicon(treebank(*once))
    assert lexicon.classes == ("<unknown>-lower", "<unknown>-lower~sing")
    numbers = {word: lexicon.classes[lexicon.unknown(word, False) - 16] for word in ("missing", "caring", "fitted")}
    assert numbers == {"missing": "<unknown>-lower~sing", "caring": "<unknown>-lower", "fitted": "<unknown>-lower"}
    tags, _ = tag_table(treebank(*once), lexicon, unseen)
    assert lexicon.source.tolist() == [1] * 12 + [0] * 4 + [2] * 3
    table = tags.lookup(torch.arange(len(lexicon)))
    assert table[0] @ table[0] > 0.9  # like its neighbours
    assert torch.allclose(table.sum(1), torch.ones(len(lexicon), dtype=torch.float64))


@pytest.mark.parametrize(
    ("word", "first", "known", "expected"),
    [
        ("IBM", False, False, "<unknown>-CAPS"),
        ("Running", True, True, "<unknown>-INITIAL-KNOWN-ing"),
        ("Running", True, False, "<unknown>-INITIAL-ing"),
        ("Running", False, False, "<unknown>-CAPITAL-ing"),
        ("state-owned", False, False, "<unknown>-lower-DASH-ed"),
        ("12.5", False, False, "<unknown>-DIGIT"),
        ("walks", False, False, "<unknown>-lower-s"),
        ("dogs", False, False, "<unknown>-lower-s"),
        ("tiny", False, False, "<unknown>-lower"),
        ("glass", False, False, "<unknown>-lower"),
        ("%%", False, False, "<unknown>"),
    ],
)
def test_english_signatures(word, first, known, expected):
    assert english(word, first, known)[-2] == expected
    assert expected.startswith(english(word, first, known)[-1])


def test_fine_classes():
    assert english("Running", False, False) == (
        "<unknown>-CAPITAL~ning",
        "<unknown>-CAPITAL~ing",
        "<unknown>-CAPITAL~ng",
        "<unknown>-CAPITAL-ing",
        "<unknown>-CAPITAL",
    )
    assert suffix("ran", False, False) == ("<unknown>-lower",)
    for word, pattern in (("1989-90", "0-0"), ("30-year", "0-a"), ("12.5", "0.0"), ("1980s", "0a"), ("F16", "a0")):
        assert suffix(word, False, False)[0] == f"<unknown>~{pattern}"


def test_signatures_are_a_registry(monkeypatch):
    monkeypatch.delitem(SIGNATURES, "length", raising=False)
    with pytest.raises(InputError, match=r"'length': expected english or suffix"):
        Lexicon((), (), "length")
    register_signature("length", lambda word, first, known: str(len(word)))
    bank = treebank("a/X", "abc/Y")
    lexicon, _ = build_lexicon(bank, "length")
    assert lexicon.encode(["a", "xyz", "xy"]) == [0, 3, 4]
    assert suffix("casas", False, False)[0] == "<unknown>-lower~sas"
    del SIGNATURES["length"]


def test_unknown_words_of_the_corpus_get_sensible_tags():
    bank = build_treebank(corpus("train"))
    lexicon, unseen = build_lexicon(bank)
    tags, _ = tag_table(bank, lexicon, unseen)
    best = tags.lookup(torch.tensor(lexicon.encode(["We", "zorbified", "zorbingly", "Zorbson"]))).argmax(1)
    names = [bank.symbols.preterminals[tag].split("+")[-1] for tag in best[1:]]
    assert names == ["VBD", "RB", "NNP"]


@pytest.mark.parametrize(
    ("sentence", "like"),
    [
        ("THE KING LIVES IN PARIS NOW", "The king lives in Paris now"),
        ("the king lives in paris now", "the king lives in Paris now"),
        ("the king of the usa", "the king of the USA"),
        ("the King lives in paris", None),
        ("King JOHN", None),
        ("KING .", None),
    ],
)
def test_sentences_in_one_case_find_words_in_another(sentence, like):
    lexicon = Lexicon(("The", "the", "king", "lives", "in", "of", "Paris", "now", "USA"), ("<unknown>",), "english")
    words = sentence.split()
    alone = [
        entry
        for place, word in enumerate(words)
        for entry in [lexicon._words.get(word, lexicon.unknown(word, place == 0))]
    ]
    expected = alone if like is None else [lexicon._words[word] for word in like.split()]
    if like == "The king lives in Paris now":
        expected[0] = lexicon._words["the"]
    assert lexicon.encode(words) == expected


def test_unknown_words_of_a_sentence_in_capitals_look_as_they_do_in_lower_case():
    classes = ("<unknown>-CAPS", "<unknown>-lower-ed")
    lexicon = Lexicon(("dog",), classes, "english")
    assert lexicon.encode(["THE", "DOG", "BARKED"])[1:] == [0, lexicon.unknown("barked", False)]
    assert lexicon.encode(["He", "BARKED"])[1] == lexicon.unknown("BARKED", False)
