"""What is found for sentences, by a parser and if asked for by another one, for JSON."""

import math
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from lvpcfg.batch.formats import Writer
from lvpcfg.options import JSONL
from lvpcfg.parser import Parser
from lvpcfg.parses import Counts, Parse
from lvpcfg.serve.asked import Details

ROUNDS = 3  # of each model that is compared: the fastest counts


@dataclass(frozen=True)
class Answers:
    parser: Parser
    compared: Parser | None = None

    def warm(self) -> None:
        """Makes what is made once."""
        for parser in filter(None, (self.parser, self.compared)):
            parser.parse(["."])
            parser.counts = Counts()

    def __call__(self, sentences: list[list[str]], details: Details) -> list[dict[str, Any]]:
        if not details.compare:
            return self._found(self.parser, sentences, details, self._parses(self.parser, sentences, details))
        return [self._compared(words, details) for words in sentences]

    def _parses(self, parser: Parser, sentences: list[list[str]], details: Details) -> list[list[Parse]]:
        return parser.k_best_sents(sentences, details.k_best, spans=details.spans)

    def _found(
        self, parser: Parser, sentences: list[list[str]], details: Details, parses: list[list[Parse]]
    ) -> list[dict[str, Any]]:
        """As job=parse writes them, with log Z and on request with the chart."""
        writer = Writer(JSONL, details.k_best, details.spans)
        found = []
        for words, some in zip(sentences, parses, strict=True):
            log_z = some[0].sentence_log_prob
            about = {"words": words, "sentence_log_prob": log_z if log_z > -math.inf else None}
            found.append(about | writer.known(some))
        if details.chart:
            for one, chart in zip(found, parser.chart(sentences), strict=True):
                one["chart"] = [[span.label, span.start, span.end, span.posterior] for span in chart]
        return found

    def _compared(self, words: list[str], details: Details) -> dict[str, Any]:
        """By both parsers in turns, which are timed."""
        assert self.compared is not None
        parsers = (self.parser, self.compared)
        times, parses = ([math.inf, math.inf], [list[list[Parse]]()] * 2)
        for _ in range(ROUNDS):
            for number, parser in enumerate(parsers):
                begin = perf_counter()
                parses[number] = self._parses(parser, [words], details)
                times[number] = min(times[number], perf_counter() - begin)
        both = [
            self._found(parser, [words], details, some)[0] | {"seconds": seconds}
            for parser, some, seconds in zip(parsers, parses, times, strict=True)
        ]
        return both[0] | {"compared": both[1]}
