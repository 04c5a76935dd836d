"""What options may be, in words alone: what is read here is read before torch is imported."""

PRODUCT, RULE_SUM, VARIATIONAL, RECALL, FREE, VITERBI = DECODERS = (
    "max-rule",
    "max-rule-sum",
    "variational",
    "recall",
    "free-recall",
    "viterbi",
)
TAG_DECODERS = (RECALL, PRODUCT)
TAG_COLUMNS = ("upos", "xpos")  # of CoNLL-U
DTYPE_NAMES = ("float32", "float64")
TEXT, JSONL, CONLLU = INPUT_FORMATS = ("text", "jsonl", "conllu")
BRACKETS, _, CONLL = OUTPUT_FORMATS = ("brackets", JSONL, "conll")
TAG_FORMATS = INPUT_FORMATS  # of words with their tags
_, RAY = BACKENDS = ("processes", "ray")
