import hashlib
import statistics
from itertools import pairwise

import pytest
from cky import dev_scores, erased
from nltk.tree import Tree

from lvpcfg import InputError, corpus
from lvpcfg.trees.brackets import format_tree
from lvpcfg.trees.normalise import normalise_all
from lvpcfg.trees.walk import preorder, tagged_words, words

DIGEST = "6cd6167da1eedf9093126b2793eb8d7919a8168df811f9f4d4def29f81ed1942"


def test_the_same_bytes_everywhere():
    text = "\n".join(format_tree(tree) for split in ("train", "dev", "test") for tree in corpus(split))
    assert hashlib.sha256(text.encode()).hexdigest() == DIGEST


def test_sizes_and_lengths():
    assert [len(corpus(split)) for split in ("train", "dev", "test")] == [2000, 250, 250]
    lengths = [len(words(tree)) for tree in normalise_all(corpus("train"))]
    assert min(lengths) == 1
    assert 35 <= max(lengths) <= 40
    assert 12 <= statistics.mean(lengths) <= 20


def test_it_is_penn_style_and_needs_cleaning():
    labels = {node.label() for tree in corpus("train") for node in preorder(tree)}
    assert {"", "NP-SBJ", "PP-TMP", "WHNP-1", "-NONE-", "PRP$", "SBAR", "SQ", "FRAG", "PRT"} <= labels
    assert not any(mark in label for label in labels for mark in "{}/~")


def test_some_words_are_rare_and_some_are_never_seen_in_training():
    counts = {}
    for tree in normalise_all(corpus("train")):
        for word in words(tree):
            counts[word] = counts.get(word, 0) + 1
    assert len(counts) > 700
    assert sum(count == 1 for count in counts.values()) > 300
    for split in ("dev", "test"):
        tokens = [word for tree in normalise_all(corpus(split)) for word in words(tree)]
        assert 0.01 < sum(word not in counts for word in tokens) / len(tokens) < 0.06


def test_verbs_agree_with_their_subjects():
    for tree in corpus("train", features=True):
        for node in preorder(tree):
            children = [child.label() for child in node if isinstance(child, Tree)]
            for subject, predicate in pairwise(children):
                if subject.startswith("NP~SBJ.sg"):
                    assert not predicate.startswith("VP~VBP")
                if subject.startswith("NP~SBJ.pl"):
                    assert not predicate.startswith("VP~VBZ")


def test_features_are_erased_and_nothing_else():
    plain, featured = normalise_all(corpus("dev")), normalise_all(corpus("dev", features=True))
    for one, other in zip(plain, featured, strict=True):
        assert tagged_words(one) == tagged_words(erased(other))


def test_unknown_split():
    with pytest.raises(InputError, match="'devel': expected train, dev or test"):
        corpus("devel")


def test_a_pcfg_parses_it_visibly_worse_than_a_grammar_that_knows_the_features():
    """The features stand in for the best latent states one could hope to find."""
    erased, known = (dev_scores(features, sentences=80).f1_all for features in (False, True))
    assert known > erased + 6
