"""What options may be, in words alone: what is read here is read before torch is imported."""

from lvpcfg.errors import InputError, show

PRODUCT, RULE_SUM, VARIATIONAL, RECALL, FREE, VITERBI = DECODERS = (
    "max-rule",
    "max-rule-sum",
    "variational",
    "recall",
    "free-recall",
    "viterbi",
)
EXACT = "exact"  # pruning that keeps the best derivation
TAG_DECODERS = (RECALL, PRODUCT)
TAG_COLUMNS = ("upos", "xpos")  # of CoNLL-U
DTYPE_NAMES = ("float32", "float64")
TEXT, JSONL, CONLLU = INPUT_FORMATS = ("text", "jsonl", "conllu")
BRACKETS, _, CONLL = OUTPUT_FORMATS = ("brackets", JSONL, "conll")
TAG_FORMATS = INPUT_FORMATS  # of words with their tags
_, RAY = BACKENDS = ("processes", "ray")


def expect_prune(prune: object, decoder: str | None) -> None:
    """A posterior, or "exact" for best derivations."""
    if prune == EXACT:
        if decoder != VITERBI:
            raise InputError(f"prune=exact is for decoder=viterbi: expected a posterior for {decoder or PRODUCT}.")
    elif type(prune) not in (int, float) or not 0 <= prune < 1:  # type: ignore[operator]
        raise InputError(f"prune is {show(prune)}: expected a posterior from 0 to 1, such as 5e-5.")
