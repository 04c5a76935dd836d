"""How many tags are right."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from lvpcfg.trees.conllu import TaggedSentence


@dataclass(frozen=True)
class TagScores:
    sentences: int
    words: int
    right_sentences: int
    right_words: int
    unknown_words: int  # those that the model has not seen
    right_unknown: int
    unseen_tags: int  # gold tags that the model does not have, which it cannot find

    def figures(self) -> dict[str, float]:
        """Percentages; the accuracy on unknown words where there are any."""
        found: dict[str, float] = {
            "token_accuracy": _percent(self.right_words, self.words),
            "sentence_accuracy": _percent(self.right_sentences, self.sentences),
            "sentences": self.sentences,
            "unknown_words": self.unknown_words,
            "unseen_tags": self.unseen_tags,
        }
        if self.unknown_words:
            found["unknown_accuracy"] = _percent(self.right_unknown, self.unknown_words)
        return found


def score_tags(
    gold: Sequence[TaggedSentence], found: Sequence[Sequence[str]], known: Collection[str], tags: Collection[str]
) -> TagScores:
    """`known` are the words and `tags` the tags that the model has seen."""
    right = [
        [tag == mine for (_, tag), mine in zip(sentence, other, strict=True)]
        for sentence, other in zip(gold, found, strict=True)
    ]
    unknown = [[word not in known for word, _ in sentence] for sentence in gold]
    both = [
        here and there
        for one, other in zip(right, unknown, strict=True)
        for here, there in zip(one, other, strict=True)
    ]
    return TagScores(
        sentences=len(gold),
        words=sum(map(len, gold)),
        right_sentences=sum(map(all, right)),
        right_words=sum(map(sum, right)),
        unknown_words=sum(map(sum, unknown)),
        right_unknown=sum(both),
        unseen_tags=sum(tag not in tags for sentence in gold for _, tag in sentence),
    )


def _percent(part: int, whole: int) -> float:
    return 100 * part / whole if whole else 0.0
