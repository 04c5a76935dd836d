"""Relative frequencies: the treebank PCFG, m = 1.

    pi(a) = count(root a) / trees,   p(a -> b c) = count(a -> b c) / count(a)

and q(a -> x) from the smoothed lexicon.
"""

from lvpcfg.estimate.latent import observed_counts
from lvpcfg.grammar.model import Model
from lvpcfg.trees.lexicon import build_lexicon
from lvpcfg.trees.treebank import Treebank


def count(treebank: Treebank, signature: str = "english") -> Model:
    """The relative-frequency estimate of a treebank."""
    lexicon, unseen = build_lexicon(treebank, signature)
    latent, counts = observed_counts(treebank, lexicon, unseen)
    provenance = {"estimator": "count", "trees": len(treebank), "words": int(treebank.lengths.sum())}
    return Model(latent.grammar(counts), lexicon, treebank.binarisation, provenance)
