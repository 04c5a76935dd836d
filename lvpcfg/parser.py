"""lvpcfg.Parser: from a model and sentences to trees."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from nltk.parse.api import ParserI
from nltk.tree import Tree
from tqdm import tqdm

from lvpcfg.calibration import Calibration
from lvpcfg.certificates import UNKNOWN, Certificates, check_exact
from lvpcfg.chart.decode.certificate import CertifiedCoarseToFine
from lvpcfg.chart.decode.coarse_to_fine import CoarseToFine
from lvpcfg.chart.decode.decode import Decoder
from lvpcfg.chart.decode.decoded import BEST, Decoded, Wanted
from lvpcfg.chart.decode.exact import ExactViterbi
from lvpcfg.chart.decode.loss import LossBound, PruningLoss
from lvpcfg.chart.decode.probabilities import TreeProbabilities
from lvpcfg.chart.decode.spans import label_posterior, phrases_of
from lvpcfg.chart.decode.whole import WholeCharts
from lvpcfg.chart.decode.written import Writer
from lvpcfg.chart.derivations import Skeleton
from lvpcfg.chart.fast.partition import LOGARITHMIC, WIDE
from lvpcfg.chart.stages import Stages
from lvpcfg.decompose.coarse import covered
from lvpcfg.device import usable_device
from lvpcfg.errors import InputError, expect, is_out_of_memory, listed, show
from lvpcfg.files import PathLike
from lvpcfg.grammar.coarse import CoarseGrammar, projected_coarse
from lvpcfg.grammar.location import parts
from lvpcfg.grammar.model import Model
from lvpcfg.grammar.word_scores import Sentence, WordScores, tag_numbers
from lvpcfg.options import DECODERS, DTYPE_NAMES, EXACT, FREE, PRODUCT, VITERBI, expect_prune
from lvpcfg.parses import Certificate, Counts, Parse, Span, posterior_of
from lvpcfg.trees.lexicon import Lexicon
from lvpcfg.trees.normalise import TOP
from lvpcfg.trees.sentences import sentences_of
from lvpcfg.trees.walk import is_preterminal, preorder

DTYPES = {name: getattr(torch, name) for name in DTYPE_NAMES}
SPANS = 1 << 19  # of the sentences of a batch, where charts are pruned
TOKENS = 1 << 14
THRESHOLD = 5e-5  # rules at splits with a smaller posterior are pruned
MAX_LENGTH = 400
LOOSER = (1, 1e-3, 1e-6, 1e-9)  # times the threshold, for sentences of which it left nothing
NUMBERS = 1 << 25  # of a whole chart, for a sentence of which pruning left nothing
WORTH_SHOWING = 0.01  # phrases of a chart
WORTH_LISTING = 1e-9  # of whole charts, rules at splits whose posterior by the coarse grammar is larger
Tags = Iterable[Sequence[str | None] | None]  # of the words of each sentence


@dataclass(frozen=True)
class Request:
    """What is asked of each sentence."""

    wanted: Wanted = BEST
    probabilities: bool = False
    certify: bool = False


class Parser(ParserI):  # type: ignore[misc]
    """Parses sentences with a model, or with several models that were trained on the same trees: a product of grammars.

    - `decoder`: "max-rule", "max-rule-sum", "variational", "recall", "free-recall" or "viterbi". None is max-rule, or
      free-recall for grammars with one phrase symbol.
    - `device`: where charts are computed, "cuda" or "cpu". None is CUDA if there is one.
    - `dtype`: "float32" or "float64".
    - `prune`: rules at splits with a smaller posterior under the coarse grammar are dropped. 0 drops nothing. "exact",
      for the decoder viterbi, drops only what cannot be in the best derivation.
    - `batch_tokens`: words in a batch; fewer if charts are large.
    - `max_length`: longer sentences get a flat tree.
    - `calibration`: scales the posteriors of trees and phrases.
    - `exact`: the model before it was compressed with a certificate. `parse_sents` then gives the trees of the exact
      model, by the compressed one where they are certain to be the same. Everything else is done by the exact model.
    """

    def __init__(
        self,
        model: Model | Sequence[Model],
        decoder: str | None = None,
        device: str | torch.device | None = None,
        dtype: str = "float32",
        prune: float | str = THRESHOLD,
        batch_tokens: int = TOKENS,
        max_length: int = MAX_LENGTH,
        calibration: Calibration | None = None,
        exact: Model | None = None,
    ) -> None:
        if decoder is not None:
            expect("decoder", decoder, DECODERS)
        expect("dtype", dtype, DTYPE_NAMES)
        expect_prune(prune, decoder)
        for name, number, usual in (("batch_tokens", batch_tokens, TOKENS), ("max_length", max_length, MAX_LENGTH)):
            if not isinstance(number, int) or number < 1:
                raise InputError(f"{name} is {show(number)}: expected a number of words, such as {usual}.")
        if not isinstance(calibration, Calibration | None):
            raise InputError(f"calibration is {show(calibration)}: expected a Calibration. Parser.load takes files.")
        self.batch_tokens, self.max_length, self.calibration = batch_tokens, max_length, calibration
        self.models: list[Model] = list(model) if isinstance(model, list | tuple) else [model]  # type: ignore[list-item]
        if not all(isinstance(each, Model) for each in self.models):
            raise InputError(f"a parser takes a model, or several: found {show(model)}. Parser.load takes folders.")
        decoder = decoder or default_decoder(self.models)
        small = self.models[0] if self.models else None
        if exact is not None:
            check_exact(self.models, exact, decoder)
            self.models = [exact]
        _check_product(self.models, decoder)
        self.model, self.decoder, self._keeps_best = self.models[0], decoder, prune == EXACT
        self.prune = THRESHOLD if isinstance(prune, str) else prune
        self.device = usable_device(device)
        self._grammars = [model.grammar.to(self.device, DTYPES[dtype]) for model in self.models]
        if decoder == VITERBI:  # derivations are those of tensors
            self._grammars = [replace(grammar, binary=grammar.binary.for_charts()) for grammar in self._grammars]
        self._grammar = replace(self._grammars[0], binary=self._grammars[0].binary.for_charts())
        self._signed = any(grammar.signed for grammar in self._grammars)
        if self._signed and decoder == VITERBI:
            raise InputError("the decoder viterbi needs non-negative parameters: this model has negative ones.")
        coarse = self.model.coarse
        if self._keeps_best and not self._grammar.binary.only_listed:
            raise InputError("prune=exact needs a model with a list of rules: this one is a CP form of all of them.")
        if coarse is None and (len(self.models) > 1 or self._keeps_best):  # these are always pruned
            coarse = projected_coarse(self.model.grammar)
        prunable = coarse is not None and self._grammar.binary.prunable
        self._pruned = len(self.models) > 1 or self._keeps_best or (prunable and self.prune > 0)
        self.counts = Counts()
        self._stages = Stages(self.device)
        self._tags = tag_numbers(self.model.grammar.symbols)
        self._words = [
            WordScores(model.lexicon, grammar) for model, grammar in zip(self.models, self._grammars, strict=True)
        ]
        self._writer = Writer(self._grammar)
        self._whole = WholeCharts(self._grammar, decoder, self._stages)
        self._probabilities = TreeProbabilities(self._whole)
        if self._pruned and coarse is not None:
            self._forests = self._forests_by(coarse)
        self._certified: Forests | None = None
        if exact is not None and small is not None:
            if not self._pruned or coarse is None:
                raise InputError("exact needs charts that are pruned: expected a posterior above 0 for prune.")
            certifier = Certificates(small, self.device).certifier
            charts = CertifiedCoarseToFine(self._grammars[0], self._coarse_on_device(coarse), self._stages, certifier)
            self._certified = replace(self._forests, coarse_to_fine=charts)

    @staticmethod
    def load(
        path: PathLike | Sequence[PathLike],
        decoder: str | None = None,
        device: str | torch.device | None = None,
        dtype: str = "float32",
        prune: float | str = THRESHOLD,
        batch_tokens: int = TOKENS,
        max_length: int = MAX_LENGTH,
        calibration: PathLike | None = None,
        exact: PathLike | None = None,
    ) -> "Parser":
        """A parser for the model in a folder, or for the product of those in several; the calibration is a file.

        Models that come with lvpcfg are known by their names: "english".
        """
        paths = [path] if isinstance(path, str | os.PathLike) else listed("model", path, "a folder, or a list of them")
        scaling = None if calibration is None else Calibration.load(calibration)
        models = [Model.load(part) for path in paths for part in parts(path)]
        source = None if exact is None else Model.load(exact)
        return Parser(models, decoder, device, dtype, prune, batch_tokens, max_length, scaling, source)

    def parse(self, sent: Sequence[str]) -> Tree:
        """The tree of one tokenised sentence."""
        return self.parse_sents([sent])[0]

    def parse_one(self, sent: Sequence[str]) -> Tree:
        return self.parse(sent)

    def parse_all(self, sent: Sequence[str]) -> list[Tree]:
        return [self.parse(sent)]

    def parse_sents(
        self,
        sents: Iterable[Sequence[str]],
        progress: bool = False,
        update: Callable[[int], object] | None = None,
        tags: Tags | None = None,
    ) -> list[Tree]:
        """The trees of many sentences, in their order; every sentence gets one.

        `progress` shows a bar; `update` is called with the number of finished sentences. `tags` gives a tag for each
        word of each sentence, or None for any tag. A given tag is used even if the word was never seen with it.
        """
        return [parses[0].tree for parses in self._parse(sents, tags, progress, update, Request())]

    def analyse(
        self,
        sents: Iterable[Sequence[str]],
        progress: bool = False,
        update: Callable[[int], object] | None = None,
        tags: Tags | None = None,
        spans: bool = False,
        certify: bool = False,
    ) -> list[Parse]:
        """Trees with their probabilities, and with `spans` those of their phrases. With `certify`, also what these can
        be under the exact grammar, if the model was compressed with a certificate."""
        if certify:
            _ = self._certificates  # what is wrong with the model shows here
        request = Request(Wanted(1, spans, forest=certify), probabilities=True, certify=certify)
        return [parses[0] for parses in self._parse(sents, tags, progress, update, request)]

    def k_best(
        self, sent: Sequence[str], k: int, tags: Sequence[str | None] | None = None, spans: bool = False
    ) -> list[Parse]:
        """The k best trees of a sentence by the decoder's objective, best first; fewer if there are fewer.

        The first is that of `parse`. All of them differ. If the grammar has no tree for the sentence, the list has its
        flat tree.
        """
        return self.k_best_sents([sent], k, tags=None if tags is None else [tags], spans=spans)[0]

    def k_best_sents(
        self,
        sents: Iterable[Sequence[str]],
        k: int,
        progress: bool = False,
        update: Callable[[int], object] | None = None,
        tags: Tags | None = None,
        spans: bool = False,
    ) -> list[list[Parse]]:
        """The same for many sentences."""
        if not isinstance(k, int) or k < 1:
            raise InputError(f"k is {show(k)}: expected a number of trees, 1, 2, ...")
        return self._parse(sents, tags, progress, update, Request(Wanted(k, spans), probabilities=True))

    def chart(self, sents: Iterable[Sequence[str]], least: float = WORTH_SHOWING) -> list[list[Span]]:
        """The phrases over all spans of each sentence, in the best tree or not, short ones first: those whose posterior
        is `least` or more. None of a sentence that the grammar has no tree for."""
        request = Request(Wanted(1, spans=True, everywhere=True))
        found = self._parse(sents, None, False, None, request)
        return [[span for span in parses[0].spans or () if span.posterior >= least > 0] for parses in found]

    def pruning_loss(self, sents: Iterable[Sequence[str]]) -> list[PruningLoss]:
        """For each sentence, an upper bound of the probability that pruning has lost."""
        if not self._pruned or len(self.models) > 1 or self._signed or not self._grammar.binary.only_listed:
            raise InputError(
                "pruning_loss needs one model whose charts are pruned, with a list of rules and none below zero."
            )
        sentences = self._sentences(sentences_of(sents), None)
        found: dict[int, PruningLoss] = {}
        for batch in self._batches([len(sentence) for sentence in sentences]):
            some = self._forests.loss([sentences[number] for number in batch], self.prune, self._loss_bound)
            found.update(zip(batch, some, strict=True))
        return [found[number] for number in range(len(sentences))]

    @cached_property
    def _certificates(self) -> Certificates:
        if len(self.models) > 1 or self._keeps_best:
            number = f"a product of {len(self.models)} grammars" if len(self.models) > 1 else "prune=exact"
            raise InputError(f"certify needs one grammar, and prune as a posterior: found {number}.")
        return Certificates(self.model, self.device)

    @cached_property
    def _loss_bound(self) -> LossBound:
        return LossBound(self._grammar)

    def grammar(self) -> object:
        """The model's grammar (ParserI)."""
        return self.model.grammar

    @property
    def lexicon(self) -> Lexicon:
        """The words that were seen in training."""
        return self.model.lexicon

    def _parse(
        self,
        sents: Iterable[Sequence[str]],
        tags: Tags | None,
        progress: bool,
        update: Callable[[int], object] | None,
        request: Request,
    ) -> list[list[Parse]]:
        if self._keeps_best and (request.wanted.trees > 1 or request.wanted.spans):
            raise InputError(
                "prune=exact keeps the best tree alone: other trees and posteriors of phrases need another."
            )
        sentences = self._sentences(
            sentences_of(sents), None if tags is None else listed("tags", tags, "a list for each sentence")
        )
        found: dict[int, list[Parse]] = {}
        with tqdm(
            total=len(sentences), unit=" sentences", desc="parsing", disable=None if progress else True, leave=False
        ) as bar:
            for batch in self._batches([len(sentence) for sentence in sentences]):
                some = [sentences[number] for number in batch]
                parse = self._parse_some if len(some[0]) <= self.max_length else self._too_long
                parses = parse(some, request)
                if self.calibration is not None:
                    parses = [[self.calibration.of(one) for one in each] for each in parses]
                found.update(zip(batch, parses, strict=True))
                bar.update(len(batch))
                if update is not None:
                    update(len(batch))
        return [found[number] for number in range(len(sentences))]

    def _sentences(self, sents: list[list[str]], tags: list[Sequence[str | None] | None] | None) -> list[Sentence]:
        """What is asked about, checked. Tags that the model does not know are counted, and any tag is taken instead."""
        if tags is None:
            return [Sentence(words) for words in sents]
        if len(tags) != len(sents):
            raise InputError(f"there are tags of {len(tags)} sentences, and {len(sents)} sentences: expected as many.")
        found = []
        for number, (words, some) in enumerate(zip(sents, tags, strict=True), 1):
            own = [] if some is None else listed(f"tags of sentence {number}", some, "a list of tags, or None")
            if not all(tag is None or isinstance(tag, str) for tag in own):
                raise InputError(f"the tags of sentence {number} are {show(some)}: expected a list of tags, or None.")
            if own and len(own) != len(words):
                raise InputError(f"sentence {number} has {len(words)} words and {len(own)} tags: expected as many.")
            found.append(Sentence(words, [-1 if tag is None else self._tags.get(tag, -1) for tag in own]))
            self.counts.unknown_tags += sum(tag is not None and tag not in self._tags for tag in own)
        return found

    def _parse_some(self, sentences: list[Sentence], request: Request) -> list[list[Parse]]:
        """Together, or in halves where the memory is too small for all of them."""
        counts = replace(self.counts)
        try:
            return (self._parse_pruned if self._pruned else self._parse_whole)(sentences, request)
        except (MemoryError, RuntimeError) as error:
            if len(sentences) == 1 or not is_out_of_memory(error):
                raise
        # Behind the handler, since the error keeps all that was in use.
        self.counts = replace(counts, split=counts.split + 1)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        half = len(sentences) // 2
        return [*self._parse_some(sentences[:half], request), *self._parse_some(sentences[half:], request)]

    def _too_long(self, sentences: list[Sentence], request: Request) -> list[list[Parse]]:
        """Flat trees, for sentences of more words than any may have."""
        self.counts.sentences += len(sentences)
        self.counts.too_long += len(sentences)
        return [[self._flat(sentence, -torch.inf, request, UNKNOWN)] for sentence in sentences]

    def _batches(self, lengths: list[int]) -> Iterator[list[int]]:
        """Sentences that are parsed together, longest first: of one length, unless charts are pruned."""
        order = sorted(range(len(lengths)), key=lambda number: -lengths[number])
        begin = 0
        while begin < len(order):
            longest = lengths[order[begin]]
            if longest > self.max_length:
                yield order[begin : begin + 1]
                begin += 1
                continue
            size = SPANS // longest**2 if self._pruned else self._whole.batch(longest)
            batch = order[begin : begin + max(1, min(size, self.batch_tokens // longest))]
            if not self._pruned:
                batch = [number for number in batch if lengths[number] == longest]
            yield batch
            begin += len(batch)

    def _parse_whole(self, sentences: list[Sentence], request: Request) -> list[list[Parse]]:
        """By whole charts, for sentences of one length."""
        whole, wanted = self._whole, request.wanted
        words = self._words[0].of(sentences)
        others = None
        if wanted.trees > 1 and self.decoder != FREE:
            # A whole chart has far too many edges to list: other trees are looked for among those that are worth it.
            others = self._listed.parse(sentences, WORTH_LISTING, Wanted(wanted.trees)).trees
        leaf = words.view(len(sentences), -1, words.shape[1]).transpose(0, 1)
        decoded = whole.parse(leaf, wanted, request.probabilities, others)
        if others is not None:
            trees = [
                self._writer.distinct([*best, *more])[: wanted.trees] if best else []
                for best, more in zip(decoded.trees, others, strict=True)
            ]
            decoded = replace(decoded, trees=trees)
        self._count(whole)
        parses = self._parses(sentences, decoded, request)
        self.counts.sentences += len(sentences)
        return [
            some or [self._flat(sentence, log_z, request)]
            for some, sentence, log_z in zip(parses, sentences, decoded.log_z.tolist(), strict=True)
        ]

    def _parse_pruned(self, sentences: list[Sentence], request: Request) -> list[list[Parse]]:
        """Coarse to fine. Sentences that lose all their trees are parsed again with lower thresholds, and then without
        pruning: by charts, or for a product, which has none, in forests of which nothing is dropped."""
        found: dict[int, list[Parse]] = {}
        waiting = list(range(len(sentences)))
        product = len(self.models) > 1
        forests = self._certified if self._certified is not None and request == Request() else self._forests
        for factor in (*LOOSER, 0) if product else LOOSER:
            if waiting:
                some = [sentences[number] for number in waiting]
                decoded = forests.parse(some, self.prune * factor, request.wanted)
                self._count(forests.coarse_to_fine)
                parses = self._parses(some, decoded, request)
                found |= {number: known for number, known in zip(waiting, parses, strict=True) if known}
                waiting = [number for number in waiting if number not in found]
                self.counts.looser += len(waiting) if factor == 1 else 0
        self.counts.sentences += len(found)
        for number in waiting:
            too_large = not product and self._whole.numbers(len(sentences[number])) > NUMBERS
            if product or too_large:
                self.counts.sentences += 1
                self.counts.bounded += too_large
                found[number] = [self._flat(sentences[number], -torch.inf, request, UNKNOWN)]
            else:
                self.counts.exhaustive += 1
                (found[number],) = self._parse_whole([sentences[number]], request)
        return [found[number] for number in range(len(sentences))]

    def _parses(self, sentences: list[Sentence], decoded: Decoded, request: Request) -> list[list[Parse]]:
        """What was found of each sentence."""
        log_probs = self._log_probs(sentences, decoded.trees) if request.probabilities else {}
        everywhere = phrases_of(self._writer, decoded.steps, len(sentences)) if request.wanted.everywhere else None
        best = [some[0] if some else None for some in decoded.trees]
        certificates = (
            self._certificates.of(sentences, best, decoded.forest) if request.certify else [None] * len(sentences)
        )
        found: list[list[Parse]] = []
        for number, (sentence, trees, log_z) in enumerate(
            zip(sentences, decoded.trees, decoded.log_z.tolist(), strict=True)
        ):
            parses = []
            for rank, skeleton in enumerate(trees):
                tree, log_prob = self._writer.tree(skeleton, sentence.words), log_probs.get((number, rank), -torch.inf)
                spans = None
                if everywhere is not None:
                    spans = tuple(Span(*phrase) for phrase in everywhere[number])
                elif request.wanted.spans:
                    spans = self._spans(number, skeleton, decoded)
                posterior = posterior_of(log_prob, log_z)
                parses.append(Parse(tree, log_prob, posterior, log_z, False, spans, certificates[number]))
            found.append(parses)
        return found

    def _log_probs(self, sentences: list[Sentence], trees: list[list[Skeleton]]) -> dict[tuple[int, int], float]:
        """log p(tree, sentence) of each tree of each sentence."""
        words = self._words[0].of(sentences).split([len(sentence) for sentence in sentences])
        found: dict[tuple[int, int], float] = {}
        for rank in range(max(map(len, trees))):  # as many at a time as there are sentences
            some = [number for number, known in enumerate(trees) if rank < len(known)]
            known = self._probabilities.log_probs([trees[n][rank] for n in some], [words[n] for n in some])
            found |= {(number, rank): log_prob for number, log_prob in zip(some, known.tolist(), strict=True)}
        return found

    def _spans(self, number: int, skeleton: Skeleton, decoded: Decoded) -> tuple[Span, ...]:
        """The phrases of a tree of a sentence, with their posteriors."""
        return tuple(
            Span(label, node.start, node.start + node.width, label_posterior(self._writer, steps, label))
            for node in skeleton
            for steps in [decoded.steps[number, node.start, node.width]]
            for label in self._writer.phrase_labels(self._writer.chain_of(node))
        )

    def _flat(
        self, sentence: Sentence, log_z: float, request: Request, certificate: Certificate | None = None
    ) -> Parse:
        """For a sentence that the grammar has no tree for, over its whole chart unless a certificate is given."""
        self.counts.fallbacks += 1
        tree = self._writer.flat(sentence.words, self._words[0].of([sentence]))
        labels = [node.label() for node in preorder(tree) if not is_preterminal(node) and node.label() != TOP]
        spans = tuple(Span(label, 0, len(sentence), 0.0) for label in labels) if request.wanted.spans else None
        if not request.certify:
            certificate = None
        elif certificate is None:
            (certificate,) = self._certificates.of([sentence], [None], None)
        return Parse(tree, -torch.inf, 0.0, log_z, True, spans, certificate)

    def _count(self, charts: WholeCharts | CoarseToFine) -> None:
        """What was met since it was asked last."""
        self.counts.float64 += charts.ways.pop(WIDE, 0)
        self.counts.log_sum_exp += charts.ways.pop(LOGARITHMIC, 0)
        if isinstance(charts, WholeCharts) and self.decoder == VITERBI:
            return
        if isinstance(charts, CertifiedCoarseToFine):
            self.counts.certified += charts.certified
            self.counts.uncertified += charts.uncertified
            charts.certified = charts.uncertified = 0
        decoder: Decoder = charts.decoder
        self.counts.negative_rules += decoder.negative
        self.counts.by_recall += decoder.recalled
        decoder.negative = decoder.recalled = 0

    @property
    def times(self) -> dict[str, float]:
        """Seconds spent so far, by stage: fine (inside-outside) and decode. If charts are pruned, the stages before are
        coarse, gather (what is left), middle (grammars with few states) and plan (how to compute the fine one)."""
        return dict(self._stages.seconds)

    @cached_property
    def _listed(self) -> "Forests":
        """For the edges of whole charts that are worth listing."""
        return self._forests_by(self.model.coarse or projected_coarse(self.model.grammar))

    def _coarse_on_device(self, coarse: CoarseGrammar) -> CoarseGrammar:
        return covered(coarse).to(self.device, self._grammar.root.dtype)

    def _forests_by(self, coarse: CoarseGrammar) -> "Forests":
        coarse = self._coarse_on_device(coarse)
        coarse_words = WordScores(self.lexicon, coarse.grammar)
        charts = (
            ExactViterbi(self._grammars[0], coarse, self._stages)
            if self._keeps_best
            else CoarseToFine(self._grammars, coarse, self.decoder, self._stages)
        )
        return Forests(self._words, coarse_words, charts, self.device)


@dataclass(frozen=True)
class Forests:
    """Coarse to fine, from words on."""

    words: list[WordScores]  # of each grammar
    coarse_words: WordScores
    coarse_to_fine: CoarseToFine
    device: torch.device

    def parse(self, sentences: list[Sentence], threshold: float, wanted: Wanted) -> Decoded:
        words = [each.of(sentences) for each in self.words]
        lengths = torch.tensor([len(sentence) for sentence in sentences], device=self.device)
        return self.coarse_to_fine.parse(words, self.coarse_words.of(sentences), lengths, threshold, wanted)

    def loss(self, sentences: list[Sentence], threshold: float, bound: LossBound) -> list[PruningLoss]:
        """Of what the threshold leaves of each sentence."""
        words = self.words[0].of(sentences)
        lengths = torch.tensor([len(sentence) for sentence in sentences], device=self.device)
        pruning = self.coarse_to_fine.pruning
        forest, kept = pruning.forest(words, self.coarse_words.of(sentences), lengths, threshold)
        return bound.of(words.double(), lengths, forest, kept)


def default_decoder(models: Sequence[Model]) -> str:
    """Max-rule; and free recall, the most unlabelled spans, for grammars that tell no phrases apart."""
    return FREE if models and len(models[0].grammar.symbols.interminals) == 1 else PRODUCT


def _check_product(models: Sequence[Model], decoder: str) -> None:
    if not models:
        raise InputError("a parser needs a model: an empty list was given.")
    if len(models) > 1 and decoder == VITERBI:
        raise InputError(
            "the decoder viterbi takes one model: derivations of different grammars have different states."
        )
    first = models[0].grammar
    if len(models) > 1 and not len(first.binary_rules) and not first.binary.only_listed:
        raise InputError(
            "a product takes grammars with a list of rules: expected one model, whose rules are all possible."
        )
    for place, model in enumerate(models[1:], 2):
        grammar = model.grammar
        same = grammar.symbols == first.symbols and all(
            torch.equal(getattr(grammar, name), getattr(first, name)) for name in ("binary_rules", "unary_rules")
        )
        if not same or model.binarisation != models[0].binarisation:
            raise InputError(
                f"model {place} of {len(models)} has other symbols, rules or binarisation than the first: "
                "a product takes grammars that were trained on the same trees."
            )
