"""lvpcfg: latent-variable PCFGs, learned from treebanks and run in batches with PyTorch.

Names are imported when they are first used (PEP 562), because torch and nltk take seconds to import.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the same names, for type checkers and editors
    from lvpcfg import distributions as distributions
    from lvpcfg import nn as nn
    from lvpcfg import sequence as sequence
    from lvpcfg.calibration import Calibration as Calibration
    from lvpcfg.calibration import calibrate as calibrate
    from lvpcfg.decompose.compress import compress as compress
    from lvpcfg.errors import InputError as InputError
    from lvpcfg.estimate.features import inside_feature as inside_feature
    from lvpcfg.estimate.features import outside_feature as outside_feature
    from lvpcfg.estimate.train import train as train
    from lvpcfg.evaluation.evalb import evaluate as evaluate
    from lvpcfg.evaluation.invariance import check_invariance as check_invariance
    from lvpcfg.generation import generate as generate
    from lvpcfg.grammar.berkeley import read_berkeley as read_berkeley
    from lvpcfg.grammar.grammar import Grammar as Grammar
    from lvpcfg.grammar.model import Model as Model
    from lvpcfg.grammar.tightness import renormalise as renormalise
    from lvpcfg.grammar.tightness import tightness as tightness
    from lvpcfg.parser import Parser as Parser
    from lvpcfg.parses import Certificate as Certificate
    from lvpcfg.parses import Parse as Parse
    from lvpcfg.parses import Span as Span
    from lvpcfg.sequence.tagging import TaggingModel as TaggingModel
    from lvpcfg.tagger import Tagger as Tagger
    from lvpcfg.trees.binarisation import Binarisation as Binarisation
    from lvpcfg.trees.binarise import binarise as binarise
    from lvpcfg.trees.binarise import debinarise as debinarise
    from lvpcfg.trees.brackets import read_trees as read_trees
    from lvpcfg.trees.brackets import write_trees as write_trees
    from lvpcfg.trees.conllu import read_conllu as read_conllu
    from lvpcfg.trees.corpus import corpus as corpus
    from lvpcfg.trees.normalise import normalise as normalise
    from lvpcfg.trees.signatures import register_signature as register_signature
    from lvpcfg.trees.treebank import Treebank as Treebank
    from lvpcfg.trees.treebank import build_treebank as build_treebank

_MODULES = {  # that the names are in
    "Binarisation": "trees.binarisation",
    "Calibration": "calibration",
    "Certificate": "parses",
    "Grammar": "grammar.grammar",
    "InputError": "errors",
    "Model": "grammar.model",
    "Parse": "parses",
    "Parser": "parser",
    "Span": "parses",
    "Tagger": "tagger",
    "TaggingModel": "sequence.tagging",
    "Treebank": "trees.treebank",
    "binarise": "trees.binarise",
    "build_treebank": "trees.treebank",
    "calibrate": "calibration",
    "check_invariance": "evaluation.invariance",
    "compress": "decompose.compress",
    "corpus": "trees.corpus",
    "debinarise": "trees.binarise",
    "distributions": "distributions",
    "evaluate": "evaluation.evalb",
    "generate": "generation",
    "inside_feature": "estimate.features",
    "nn": "nn",
    "normalise": "trees.normalise",
    "outside_feature": "estimate.features",
    "read_berkeley": "grammar.berkeley",
    "read_conllu": "trees.conllu",
    "read_trees": "trees.brackets",
    "register_signature": "trees.signatures",
    "renormalise": "grammar.tightness",
    "sequence": "sequence",
    "tightness": "grammar.tightness",
    "train": "estimate.train",
    "write_trees": "trees.brackets",
}
__all__ = list(_MODULES)

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = import_module(f"lvpcfg.{_MODULES[name]}")
        value = globals()[name] = module if name == _MODULES[name] else getattr(module, name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
