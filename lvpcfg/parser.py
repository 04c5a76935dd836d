"""lvpcfg.Parser: a model and sentences in, trees out."""

import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from nltk.parse.api import ParserI
from nltk.tree import Tree
from torch import Tensor
from tqdm import tqdm

from lvpcfg.chart.decode.chains import Chains
from lvpcfg.chart.decode.coarse_to_fine import CoarseToFine
from lvpcfg.chart.decode.decode import Decoder
from lvpcfg.chart.decode.exhaustive import Exhaustive
from lvpcfg.chart.decode.viterbi import best_derivations
from lvpcfg.chart.derivations import Node, Skeletal, Skeleton, only
from lvpcfg.chart.fast.build import form
from lvpcfg.chart.fast.inside import FastForm
from lvpcfg.chart.fast.partition import LOGARITHMIC, WIDE, Problem, Solution, log_partition, solve_outside
from lvpcfg.chart.forest.observed import ObservedTrees, RuleNumbers
from lvpcfg.chart.forest.prune import FineRules
from lvpcfg.chart.stages import Stages
from lvpcfg.decompose.coarse import covered
from lvpcfg.distributions import encoded
from lvpcfg.errors import InputError, expect, is_out_of_memory, show
from lvpcfg.files import PathLike
from lvpcfg.grammar.coarse import projected_coarse
from lvpcfg.grammar.expectations import expected_states
from lvpcfg.grammar.model import Model
from lvpcfg.options import DECODERS, DTYPE_NAMES, FREE, PRODUCT, VITERBI
from lvpcfg.trees.binarise import debinarise, unbinarised
from lvpcfg.trees.lexicon import Lexicon
from lvpcfg.trees.normalise import TOP

DTYPES = {name: getattr(torch, name) for name in DTYPE_NAMES}
CELLS = 1 << 27  # numbers held by a batch at the most, roughly
SPANS = 1 << 19  # of the sentences of a batch, where charts are pruned
TOKENS = 1 << 14
THRESHOLD = 5e-5  # rules at splits with a smaller posterior are pruned
LOOSER = (1, 1e-3, 1e-6, 1e-9)  # times the threshold, for sentences of which it left nothing


@dataclass(frozen=True)
class Parse:
    """A tree and what is known about it."""

    tree: Tree
    # log p(tree, sentence), summed over states and over unary chains with the same ends; -inf for a tree that the
    # grammar does not have: a flat one, or one whose rules are possible each, but not together.
    log_prob: float
    posterior: float  # p(tree | sentence); at most 1, which negative parameters could exceed
    sentence_log_prob: float  # log p(sentence); where charts are pruned, of what is left
    flat: bool  # the grammar has no tree for the sentence


@dataclass
class Counts:
    """What happened while parsing."""

    sentences: int = 0
    fallbacks: int = 0  # no path through the grammar: a flat tree
    float64: int = 0  # float32 was not enough
    log_sum_exp: int = 0  # float64 was not enough: decoded by Viterbi
    looser: int = 0  # pruning left nothing: parsed again with a lower threshold
    exhaustive: int = 0  # nor did lower thresholds: parsed without one
    split: int = 0  # batches that were too large for the memory, and were parsed in halves
    negative_rules: int = 0  # posteriors below zero, through signed parameters
    by_recall: int = 0  # sentences that those left without a tree: labelled recall instead


class Parser(ParserI):  # type: ignore[misc]
    """Parses sentences with a model, or with several: a product of grammars, trained on the same trees.

    `decoder` is one of DECODERS (None: max-rule, or free-recall for grammars of one phrase symbol), `device`
    where the charts are computed ("cuda", "cpu"; None: CUDA if there is one),
    `dtype` "float32" or "float64". Charts of models with a coarse grammar are pruned: rules at splits whose posterior
    by that grammar is below `prune` are dropped; 0 drops nothing. Batches have up to
    `batch_tokens` words, or less where charts are large.
    """

    def __init__(
        self,
        model: Model | Sequence[Model],
        decoder: str | None = None,
        device: str | torch.device | None = None,
        dtype: str = "float32",
        prune: float = THRESHOLD,
        batch_tokens: int = TOKENS,
    ) -> None:
        if decoder is not None:
            expect("decoder", decoder, DECODERS)
        expect("dtype", dtype, DTYPE_NAMES)
        if not isinstance(prune, int | float) or not 0 <= prune < 1:
            raise InputError(f"prune is {show(prune)}: expected a posterior from 0 to 1, such as {THRESHOLD}.")
        if not isinstance(batch_tokens, int) or batch_tokens < 1:
            raise InputError(f"batch_tokens is {show(batch_tokens)}: expected a number of words, such as {TOKENS}.")
        self.batch_tokens = batch_tokens
        self.models: list[Model] = list(model) if isinstance(model, list | tuple) else [model]  # type: ignore[list-item]
        if not all(isinstance(each, Model) for each in self.models):
            raise InputError(f"a parser takes a model, or several: found {show(model)}. Parser.load takes folders.")
        decoder = decoder or default_decoder(self.models)
        _check_product(self.models, decoder)
        self.model, self.decoder, self.prune = self.models[0], decoder, prune
        self.device = usable_device(device)
        self._grammars = [model.grammar.to(self.device, DTYPES[dtype]) for model in self.models]
        if decoder == VITERBI:  # derivations are those of tensors
            self._grammars = [replace(grammar, binary=grammar.binary.for_charts()) for grammar in self._grammars]
        self._grammar = replace(self._grammars[0], binary=self._grammars[0].binary.for_charts())
        self._signed = any(grammar.signed for grammar in self._grammars)
        if self._signed and decoder == VITERBI:
            raise InputError("the decoder viterbi needs non-negative parameters: this model has negative ones.")
        coarse = self.model.coarse
        if coarse is None and len(self.models) > 1:  # a product is always pruned
            coarse = projected_coarse(self.model.grammar)
        prunable = coarse is not None and self._grammar.binary.prunable
        self._pruned = len(self.models) > 1 or (prunable and prune > 0)
        self.counts = Counts()
        self._stages = Stages(self.device)
        if self._pruned and coarse is not None:
            coarse = covered(coarse).to(self.device, DTYPES[dtype])
            self._coarse_words = coarse.grammar.lexical
            self._coarse_to_fine = CoarseToFine(self._grammars, coarse, decoder, self._stages)

    @staticmethod
    def load(
        path: PathLike | Sequence[PathLike],
        decoder: str | None = None,
        device: str | torch.device | None = None,
        dtype: str = "float32",
        prune: float = THRESHOLD,
        batch_tokens: int = TOKENS,
    ) -> "Parser":
        """A parser for the model in a folder, or for the product of those in several."""
        paths = [path] if isinstance(path, str | os.PathLike) else path
        return Parser([Model.load(path) for path in paths], decoder, device, dtype, prune, batch_tokens)

    def parse(self, sent: Sequence[str]) -> Tree:
        """The tree of one tokenised sentence."""
        return self.parse_sents([sent])[0]

    def parse_one(self, sent: Sequence[str]) -> Tree:
        return self.parse(sent)

    def parse_all(self, sent: Sequence[str]) -> list[Tree]:
        return [self.parse(sent)]

    def parse_sents(
        self, sents: Iterable[Sequence[str]], progress: bool = False, update: Callable[[int], object] | None = None
    ) -> list[Tree]:
        """The trees of many sentences, in their order; every sentence gets one.

        `progress` shows a bar; `update` is called with the number of sentences done, for another bar.
        """
        return [parse.tree for parse in self._parse(list(sents), progress, update, probabilities=False)]

    def analyse(self, sents: Iterable[Sequence[str]], progress: bool = False) -> list[Parse]:
        """Trees with their probabilities."""
        return self._parse(list(sents), progress, None, probabilities=True)

    def grammar(self) -> object:
        """The model's grammar (ParserI)."""
        return self.model.grammar

    @property
    def lexicon(self) -> Lexicon:
        """The words that were seen in training."""
        return self.model.lexicon

    def _parse(
        self,
        sentences: list[Sequence[str]],
        progress: bool,
        update: Callable[[int], object] | None,
        probabilities: bool,
    ) -> list[Parse]:
        for number, words in enumerate(sentences):
            if isinstance(words, str) or not words or not all(isinstance(word, str) for word in words):
                raise InputError(f"sentence {number + 1} is {show(words)}: expected a list of one or more words.")
        found: dict[int, Parse] = {}
        with tqdm(
            total=len(sentences), unit=" sentences", desc="parsing", disable=None if progress else True, leave=False
        ) as bar:
            for batch in self._batches([len(words) for words in sentences]):
                parses = self._parse_some([sentences[number] for number in batch], probabilities)
                found.update(zip(batch, parses, strict=True))
                bar.update(len(batch))
                if update is not None:
                    update(len(batch))
        return [found[number] for number in range(len(sentences))]

    def _parse_some(self, sentences: list[Sequence[str]], probabilities: bool) -> list[Parse]:
        """Together, or in halves where the memory is too small for all of them."""
        counts = replace(self.counts)
        try:
            return (self._parse_pruned if self._pruned else self._parse_batch)(sentences, probabilities)
        except (MemoryError, RuntimeError) as error:
            if len(sentences) == 1 or not is_out_of_memory(error):
                raise
        # Behind the handler, since the error keeps all that was in use.
        self.counts = replace(counts, split=counts.split + 1)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        half = len(sentences) // 2
        return [*self._parse_some(sentences[:half], probabilities), *self._parse_some(sentences[half:], probabilities)]

    def _batches(self, lengths: list[int]) -> Iterator[list[int]]:
        """Sentences that are parsed together, longest first: of one length, unless charts are pruned."""
        order = sorted(range(len(lengths)), key=lambda number: -lengths[number])
        begin = 0
        while begin < len(order):
            longest = lengths[order[begin]]
            size = SPANS // longest**2 if self._pruned else self._batch(longest)
            batch = order[begin : begin + max(1, min(size, self.batch_tokens // longest))]
            if not self._pruned:
                batch = [number for number in batch if lengths[number] == longest]
            yield batch
            begin += len(batch)

    def _batch(self, length: int) -> int:
        """How many sentences of a length are parsed at once: as many as keep charts and rule scores within bounds."""
        lanes = self._form.lanes + max(self._grammar.binary.state_counts)
        between_phrases = int((self._grammar.binary.child_types == 0).sum())  # rules that have a score at every split
        numbers = length * length * (16 * lanes + 2 * between_phrases) + 2 * length * self._form.matrix_size
        return min(64, CELLS // max(1, numbers))

    def _parse_batch(self, sentences: list[Sequence[str]], probabilities: bool) -> list[Parse]:
        leaf = self._leaf(sentences)
        log_z = torch.full((len(sentences),), -torch.inf, dtype=torch.float64)
        skeletons: list[Skeleton | None] = [None] * len(sentences)
        if self.decoder == VITERBI:
            with self._stages.stage("fine"):
                skeletons = self._viterbi(leaf)
            if probabilities:
                log_z = log_partition(self._form, leaf)[0].cpu()
        else:
            ones = torch.ones(len(sentences), dtype=torch.float64, device=leaf.device)
            with self._stages.stage("fine"):
                solutions = solve_outside(Problem(self._form, leaf), ones)
            for solution in solutions:
                numbers = solution.sentences.tolist()
                log_z[numbers] = solution.chart.log_z.cpu()
                with self._stages.stage("decode"):
                    found = self._decode(solution, leaf)
                for number, skeleton in zip(numbers, found, strict=True):
                    skeletons[number] = skeleton
        self.counts.sentences += len(sentences)
        self.counts.fallbacks += sum(skeleton is None for skeleton in skeletons)
        return self._parses(sentences, skeletons, log_z.tolist(), probabilities)

    def _parses(
        self,
        sentences: Sequence[Sequence[str]],
        skeletons: Sequence[Skeleton | None],
        log_z: Sequence[float],
        probabilities: bool,
    ) -> list[Parse]:
        """Of sentences, with flat trees for those that have none."""
        trees = [self._tree(skeleton, words) for skeleton, words in zip(skeletons, sentences, strict=True)]
        weights = self._log_probs(sentences, skeletons) if probabilities else [-torch.inf] * len(sentences)
        return [
            Parse(tree, weight, _ratio(weight, total), total, skeleton is None)
            for tree, weight, total, skeleton in zip(trees, weights, log_z, skeletons, strict=True)
        ]

    def _log_probs(self, sentences: Sequence[Sequence[str]], skeletons: Sequence[Skeleton | None]) -> list[float]:
        """log p(tree, sentence) of each; -inf for what is no tree of the grammar."""
        found = torch.full((len(sentences),), -torch.inf, dtype=torch.float64, device=self.device)
        trees = [Skeletal(tuple(skeleton or ())) for skeleton in skeletons]
        observed = ObservedTrees.of(trees, self._rules, self._rule_numbers)
        if observed is not None:
            words, _ = self._words(sentences)
            found.index_copy_(0, observed.sentences, observed.log_weights(self._rules, words))
        listed = set() if observed is None else set(observed.sentences.tolist())
        others = [number for number, tree in enumerate(trees) if tree.nodes and number not in listed]
        if others:  # a CP form gives weight to rules that are not listed too
            words, lengths = self._words([sentences[number] for number in others])
            allowed = only([trees[number] for number in others], self._symbol_of_state, words)
            found[others] = log_partition(self._form, words, lengths, allowed)[0]
        return found.tolist()

    def _words(self, sentences: Sequence[Sequence[str]]) -> tuple[Tensor, Tensor | None]:
        """What words are worth, [length, batch, tag states], and the lengths of sentences, if they differ."""
        tokens, lengths = encoded(self.model.lexicon, sentences, self.device)
        return self._grammar.lexical.values_of(tokens).transpose(0, 1), lengths

    @cached_property
    def _rules(self) -> FineRules:
        return FineRules(self._grammar)

    @cached_property
    def _rule_numbers(self) -> RuleNumbers:
        return RuleNumbers(self._rules)

    def _parse_pruned(self, sentences: list[Sequence[str]], probabilities: bool) -> list[Parse]:
        """Coarse to fine. Sentences that lose all their trees are parsed again with lower thresholds, and then without
        pruning: by charts, or for a product, which has none, in forests of which nothing is dropped."""
        found: dict[int, Parse] = {}
        waiting = list(range(len(sentences)))
        product = len(self.models) > 1
        for factor in (*LOOSER, 0) if product else LOOSER:
            if waiting:
                parses = self._parse_forests(
                    [sentences[number] for number in waiting], self.prune * factor, probabilities
                )
                found |= {number: parse for number, parse in zip(waiting, parses, strict=True) if parse is not None}
                waiting = [number for number in waiting if number not in found]
                self.counts.looser += len(waiting) if factor == 1 else 0
        self.counts.sentences += len(found)
        for number in waiting:
            if product:
                self.counts.sentences += 1
                self.counts.fallbacks += 1
                found[number] = Parse(self._flat(sentences[number]), -math.inf, 0.0, -math.inf, True)
            else:
                self.counts.exhaustive += 1
                (found[number],) = self._parse_batch([sentences[number]], probabilities)
        return [found[number] for number in range(len(sentences))]

    def _parse_forests(
        self, sentences: list[Sequence[str]], threshold: float, probabilities: bool
    ) -> list[Parse | None]:
        tokens = [model.lexicon.tokens(sentences).to(self.device) for model in self.models]
        words = [grammar.lexical.values_of(some) for grammar, some in zip(self._grammars, tokens, strict=True)]
        coarse_words = self._coarse_words.values_of(tokens[0])
        lengths = torch.tensor([len(sentence) for sentence in sentences], device=self.device)
        skeletons, log_z = self._coarse_to_fine.parse(words, coarse_words, lengths, threshold)
        self._count(self._coarse_to_fine.decoder)
        ways = self._coarse_to_fine.ways
        self.counts.float64 += ways.pop(WIDE, 0)
        self.counts.log_sum_exp += ways.pop(LOGARITHMIC, 0)
        found = [number for number, skeleton in enumerate(skeletons) if skeleton is not None]
        sums = log_z.tolist()
        parses = self._parses(
            [sentences[number] for number in found],
            [skeletons[number] for number in found],
            [sums[number] for number in found],
            probabilities,
        )
        of_sentence = dict(zip(found, parses, strict=True))
        return [of_sentence.get(number) for number in range(len(sentences))]

    @property
    def times(self) -> dict[str, float]:
        """Seconds spent so far, by stage: fine (inside-outside) and decode; where charts are pruned, before them
        coarse, gather (what is left), middle (grammars with few states) and plan (how to compute the fine one)."""
        return dict(self._stages.seconds)

    @cached_property
    def _form(self) -> FastForm:
        return form(self._grammar, fixed=True)

    def _leaf(self, sentences: list[Sequence[str]]) -> Tensor:
        return self._words(sentences)[0]

    @cached_property
    def _exhaustive(self) -> Exhaustive:
        return Exhaustive(self._grammar, self._form, self.decoder)

    def _decode(self, solution: Solution, leaf: Tensor) -> list[Skeleton | None]:
        self.counts.float64 += len(solution.sentences) if solution.level == WIDE else 0
        self.counts.log_sum_exp += len(solution.sentences) if solution.level == LOGARITHMIC else 0
        if solution.sums is None:  # the best derivation never underflows
            some = bool((solution.chart.log_z > -torch.inf).any())
            return self._viterbi(leaf.index_select(1, solution.sentences)) if some else [None] * len(solution.sentences)
        found = self._exhaustive.trees(*solution.sums)
        self._count(self._exhaustive.decoder)
        return found

    def _count(self, decoder: Decoder) -> None:
        """What a decoder met since it was asked last."""
        self.counts.negative_rules += decoder.negative
        self.counts.by_recall += decoder.recalled
        decoder.negative = decoder.recalled = 0

    def _viterbi(self, leaf: Tensor) -> list[Skeleton | None]:
        """Best derivations, with the chains of unary rules written into their symbols."""
        found, _ = best_derivations(self._viterbi_form, leaf)
        symbol = self._symbol_of_state
        return [
            None
            if nodes is None
            else [
                Node(
                    node.start,
                    node.width,
                    symbol[node.top],
                    symbol[node.bottom],
                    node.split,
                    chain=tuple(symbol[state] for state in self._state_chains.path(node.top, node.bottom))
                    if node.top != node.bottom
                    else (),
                )
                for node in nodes
            ]
            for nodes in found
        ]

    @cached_property
    def _state_chains(self) -> Chains:
        return Chains.of_states(self._grammar)

    @cached_property
    def _symbol_chains(self) -> Chains:
        return Chains.of_symbols(self._grammar)

    @cached_property
    def _viterbi_form(self) -> FastForm:
        """The rules with the best unary chain between two states instead of their sum."""
        if self._form.closure is None:
            return self._form
        closure, promotion = self._state_chains.closure(self._form.interminals)
        return replace(self._form, closure=closure, promotion=promotion)

    def _tree(self, skeleton: Skeleton | None, words: Sequence[str]) -> Tree:
        """The tree without binarisation."""
        if skeleton is None:
            return self._flat(words)
        names = self._grammar.symbols.names
        built: list[list[Tree | str]] = []
        for node in reversed(skeleton):  # children before their parents
            subtrees = unbinarised(names[node.bottom], built.pop() + built.pop() if node.split else [words[node.start]])
            chain = node.chain
            if not chain and node.top != node.bottom:
                chain = tuple(self._symbol_chains.path(node.top, node.bottom))
            for symbol in reversed(chain[:-1]):
                subtrees = unbinarised(names[symbol], subtrees)
            built.append(subtrees)
        top = Tree(TOP, built.pop())
        return top[0] if top[0].label() == TOP else top

    def _flat(self, words: Sequence[str]) -> Tree:
        """The commonest root over each word's likeliest tag: for sentences the grammar has no tree for."""
        grammar, inner = self._grammar, len(self._grammar.symbols.interminals)
        states = self._leaf([words]).squeeze(1) * self._tag_frequency
        phrases, tags_of_states = grammar.symbol_of_state.split([grammar.interminal_states, states.shape[1]])
        by_tag = states.new_zeros(len(words), len(grammar.symbols.preterminals))
        by_tag = by_tag.index_add(1, tags_of_states - inner, states)
        names = grammar.symbols.preterminals
        tags = [Tree(names[tag], [word]) for tag, word in zip(by_tag.argmax(1).tolist(), words, strict=True)]
        roots = grammar.root.new_zeros(max(1, inner)).index_add(0, phrases, grammar.root[: len(phrases)])
        label = grammar.symbols.interminals[int(roots.argmax())] if inner and len(tags) > 1 else None
        if label is None or label == TOP:
            return debinarise(Tree(TOP, tags))
        return debinarise(Tree(TOP, [Tree(label, tags)]))

    @cached_property
    def _tag_frequency(self) -> Tensor:
        """[preterminal states]: how often each is expected in a tree of the grammar."""
        return expected_states(self._grammar)[self._grammar.interminal_states :]

    @cached_property
    def _symbol_of_state(self) -> list[int]:
        return self._grammar.symbol_of_state.tolist()


def _ratio(weight: float, total: float) -> float:
    return math.exp(min(0.0, weight - total)) if weight > -math.inf else 0.0


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


def usable_device(name: str | torch.device | None) -> torch.device:
    """The device of that name; None: CUDA if there is one."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise InputError(
            f"device is {show(str(name))}, which cannot be used here: {str(error).splitlines()[0]}."
        ) from None
    return device
