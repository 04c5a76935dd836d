"""What options may be, in words alone: what is read here is read before torch is imported."""

PRODUCT, RULE_SUM, VARIATIONAL, RECALL, FREE, VITERBI = DECODERS = (
    "max-rule",
    "max-rule-sum",
    "variational",
    "recall",
    "free-recall",
    "viterbi",
)
DTYPE_NAMES = ("float32", "float64")
