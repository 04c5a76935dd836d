"""The head word of every node of a treebank with Penn labels, by rules in the manner of Collins 1999, appendix A.

The rules of a label are tiers of labels that its head child may have, the best tier first; within a tier the leftmost
child (<) or the rightmost (>) is the head; of children in no tier, the leftmost. A node that binarisation made stands
for what is left of its constituent, so that two children are compared at a time. Labels without rules have no head.
"""

import torch
from jaxtyping import Int64
from torch import Tensor

from lvpcfg.trees.binarisation import CHAIN, INTERMEDIATE, PARENT, SIBLING
from lvpcfg.trees.treebank import Treebank

VERBS = "VBD VBN MD VBZ VB VBG VBP AUX AUXG"
NOUNS = "NN NNS NNP NNPS"
HEADS = {
    "ADJP": "<NNS QP NN $ ADVP JJ VBN VBG ADJP JJR NP JJS DT FW RBR RBS SBAR RB",
    "ADVP": ">RB RBR RBS FW ADVP TO CD JJR JJ IN NP JJS NN",
    "CONJP": ">CC RB IN",
    "FRAG": "",
    "INTJ": "",
    "LST": ">LS :",
    "NAC": f"<{NOUNS} NP NAC EX $ CD QP PRP VBG JJ JJS JJR ADJP FW",
    "NML": f">{NOUNS} NML NX POS JJR; >CD; >JJ JJS VBG FW",
    "NP": f">{NOUNS} NML NX POS JJR PRP EX WP; <NP; >$ ADJP PRN; >CD; >JJ JJS RB QP VBG DT",
    "NX": f">{NOUNS} NML NX; >CD; >JJ",
    "PP": ">IN TO VBG VBN RP FW; >PP",
    "PRN": "",
    "PRT": ">RP",
    "QP": "<$; <CD NN NNS; <JJ RB DT NCD QP JJR JJS IN",
    "RRC": ">VP NP ADVP ADJP PP",
    "S": "<VP; <TO IN; <S SBAR SINV ADJP UCP NP",
    "SBAR": "<WHNP WHPP WHADVP WHADJP IN DT; <S SQ SINV SBAR FRAG",
    "SBARQ": "<SQ S SINV SBARQ FRAG",
    "SINV": f"<VP {VERBS}; <S SINV ADJP NP",
    "SQ": f"<{VERBS} VP; <SQ",
    "TOP": "<S SINV SQ SBARQ NP FRAG VP",
    "UCP": "",
    "VP": f"<TO {VERBS}; <VP; <ADJP NN NNS NP",
    "WHADJP": "<CC WRB JJ ADJP",
    "WHADVP": ">CC WRB",
    "WHNP": "<WDT WP WP$ WHADJP WHPP WHNP; <NN NNS NP",
    "WHPP": ">IN TO FW",
    "X": "",
}
LAST = (99, 0)  # of labels that are in no tier: the leftmost


def head_words(treebank: Treebank) -> Int64[Tensor, "nodes"]:
    """The preterminal node of each node's head word; -1 where there are no rules."""
    names = treebank.symbols.names
    base = [_base(name) for name in names]
    made = [name.startswith(INTERMEDIATE) for name in names]
    ranks = {label: _ranks(label) for label in {*base}}
    symbol, left, right = (column.tolist() for column in (treebank.symbol, treebank.left, treebank.right))
    head, label = [-1] * len(symbol), [""] * len(symbol)  # of what would be the head child, where binarisation made it
    for node in range(len(symbol) - 1, -1, -1):  # children stand behind their parents
        one, other, name = left[node], right[node], symbol[node]
        if one < 0:
            best = head[node] = node
        elif other < 0:
            best = one
        else:
            tiers = ranks[base[name]]
            rank, direction = tiers.get(label[one], LAST)
            best = one if (rank, direction) <= (tiers.get(label[other], LAST)[0], 0) else other
        if one >= 0:
            head[node] = head[best] if base[name] in HEADS else -1
        label[node] = label[best] if made[name] else base[name]
    return torch.tensor(head)


def _ranks(label: str) -> dict[str, tuple[int, int]]:
    """The tier of each label, and 0 if its leftmost child is the head, 1 if its rightmost."""
    tiers = HEADS.get(label, "").split("; ")
    return {child: (number, int(tier[0] == ">")) for number, tier in enumerate(tiers) for child in tier[1:].split()}


def _base(name: str) -> str:
    """The label of the treebank behind a symbol."""
    return name.removeprefix(INTERMEDIATE).partition(SIBLING)[0].partition(CHAIN)[0].partition(PARENT)[0]
