"""lvpcfg: latent-variable PCFGs, learned from treebanks and run in batches with PyTorch."""

import lvpcfg.lazily  # noqa: F401  (first: before anything else imports nltk)
from lvpcfg import distributions
from lvpcfg.decompose.compress import compress
from lvpcfg.errors import InputError
from lvpcfg.estimate.train import train
from lvpcfg.evaluate.evalb import evaluate
from lvpcfg.grammar.berkeley import read_berkeley
from lvpcfg.grammar.grammar import Grammar
from lvpcfg.grammar.model import Model
from lvpcfg.parser import Parse, Parser
from lvpcfg.trees.binarise import Binarisation, binarise, debinarise
from lvpcfg.trees.brackets import read_trees, write_trees
from lvpcfg.trees.conllu import read_conllu
from lvpcfg.trees.corpus import corpus
from lvpcfg.trees.normalise import normalise
from lvpcfg.trees.signatures import register_signature
from lvpcfg.trees.treebank import Treebank, build_treebank

__all__ = [
    "Binarisation",
    "Grammar",
    "InputError",
    "Model",
    "Parse",
    "Parser",
    "Treebank",
    "binarise",
    "build_treebank",
    "compress",
    "corpus",
    "debinarise",
    "distributions",
    "evaluate",
    "normalise",
    "read_berkeley",
    "read_conllu",
    "read_trees",
    "register_signature",
    "train",
    "write_trees",
]
