"""Bayesian estimation with grammars that are not tight: ignored, left out, or renormalised.

    python benchmarks/bayes.py                                  # the posterior of one tree, where the answer is known
    python benchmarks/bayes.py --train train.mrg --dev dev.mrg  # induction from sentences of up to 10 words

The first draws grammars S -> S S S (p) | S S (q) | x given "x x x" under a uniform prior: the flat tree has the
posterior 7/11 = 0.6364, 0.6492 and 0.6199. Each seed is a chain, and the error shown heeds that a draw depends on
the one before it. The second draws grammars of a few states from a random start, and shows how unlabelled sentence-F1
on dev is distributed over draws and seeds, by the mean tree of each draw.
"""

import argparse
import math
import time
from dataclasses import replace
from statistics import mean, stdev

import torch
from nltk.tree import Tree
from torch import Tensor

import lvpcfg
from lvpcfg.estimate.bayes import TREATMENTS, Gibbs
from lvpcfg.estimate.em import EMOptions
from lvpcfg.estimate.estimator import Task
from lvpcfg.estimate.induction import full_rows, random_model, training_sentences
from lvpcfg.estimate.sentences import SENTENCE
from lvpcfg.grammar.grammar import Grammar
from lvpcfg.grammar.model import Model
from lvpcfg.grammar.rule_tensors import RuleTensors
from lvpcfg.grammar.tightness import mass_of
from lvpcfg.trees.binarisation import Binarisation
from lvpcfg.trees.lexicon import Lexicon
from lvpcfg.trees.sentences import without_punctuation
from lvpcfg.trees.treebank import Symbols, build_treebank
from lvpcfg.trees.walk import words

KNOWN = {"ignore": 7 / 11, "tight": 0.6492, "renormalised": 0.6199}


def three_rules() -> Model:
    """S -> S @S, @S -> S S, S -> S S, S -> X, X -> x."""
    grammar = Grammar(
        symbols=Symbols(("S", "@S"), ("X",)),
        binary=RuleTensors(
            (1, 1, 1), 2, torch.tensor([[0, 0, 1], [1, 0, 0], [0, 0, 0]]), torch.tensor([0.2, 1.0, 0.2]).double()
        ),
        unary_rules=torch.tensor([[0, 2]]),
        unary=torch.tensor([0.6]).double(),
        root=torch.tensor([1.0, 0.0, 0.0]).double(),
        lexical=full_rows(torch.tensor([[1.0], [0.0]]).double()),
    )
    return Model(grammar, Lexicon(("x",), (), "english"), Binarisation())


def autocorrelation_time(values: Tensor) -> float:
    """How many draws of a chain are worth one: 1 + 2 sum_k rho_k, over k up to five times itself (Sokal)."""
    centred = values - values.mean()
    time = 1.0
    for lag in range(1, len(values) // 2):
        if lag > 5 * time:
            break
        time += 2 * float(centred[lag:] @ centred[:-lag]) / float(centred @ centred)
    return time


def one_tree(sweeps: int, seeds: list[int]) -> None:
    for number, treatment in enumerate(TREATMENTS):
        begin, chains = time.process_time(), []
        for seed in seeds:  # others for each treatment, or all would be off in the same direction
            sampler = Gibbs(three_rules(), [["x"] * 3], treatment, seed=len(TREATMENTS) * seed + number)
            rules = torch.stack([draw.model.grammar.binary.tensors["values"] for draw in sampler.run(sweeps)])
            p, _, q = rules.T
            chains.append(p / (p + 2 * q * q))
        shares = torch.stack(chains)
        times = [autocorrelation_time(chain) for chain in chains]
        error = math.sqrt(float(shares.var()) * mean(times) / shares.numel())
        print(
            f"{treatment:>13}: {float(shares.mean()):.4f} +- {error:.4f}, expected {KNOWN[treatment]:.4f}; "
            f"{mean(times):.1f} draws are worth one, {time.process_time() - begin:.0f} s",
            flush=True,
        )


def short(path: str, most: int) -> list[Tree]:
    trees = (without_punctuation(tree) for tree in map(lvpcfg.normalise, lvpcfg.read_trees(path)))
    return [tree for tree in trees if tree is not None and 2 <= len(tree.leaves()) <= most]


def induction(given: argparse.Namespace) -> None:
    train, dev = short(given.train, 10), short(given.dev, 10)
    print(f"{len(train)} sentences, {len(dev)} of dev; {given.states} phrase states, {given.tags} tags.")
    scores: dict[str, list[float]] = {treatment: [] for treatment in TREATMENTS}
    for seed in given.seeds:
        options = EMOptions(objective=SENTENCE, interminals=given.states, preterminals=given.tags, iterations=1)
        task = Task(build_treebank(train), seed=seed, dev=dev)
        sentences = training_sentences(task)
        start = random_model(options, 0, task, sentences)
        start = replace(start, grammar=start.grammar.to(dtype=torch.float64))
        for treatment in TREATMENTS:
            begin, found, accepted, lost, mass = time.process_time(), [], 0, 0, []
            sampler = Gibbs(start, sentences, treatment, given.prior, seed)
            for sweep, draw in enumerate(sampler.run(given.sweeps), 1):
                accepted, lost = accepted + draw.accepted, lost + draw.thrown_away
                if sweep > given.sweeps // 2 and sweep % given.every == 0:
                    parsed = lvpcfg.Parser(draw.model, device="cpu").parse_sents([words(tree) for tree in dev])
                    found.append(lvpcfg.evaluate(dev, parsed).figures()["unlabelled_sentence_f1"])
                    mass.append(mass_of(draw.model.grammar))
            scores[treatment] += found
            seconds = time.process_time() - begin
            print(
                f"seed {seed}, {treatment:>13}: F1 {mean(found):.1f} ({min(found):.1f} to {max(found):.1f}), "
                f"accepted {accepted}/{given.sweeps}, thrown away {lost}, Z {min(mass):.6f} to {max(mass):.6f}, "
                f"log-likelihood {draw.log_likelihood:.0f}, {seconds:.0f} s",
                flush=True,
            )
    for treatment, found in scores.items():
        print(f"{treatment:>13}: F1 {mean(found):.2f}, standard deviation {stdev(found):.2f}, {len(found)} draws")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", help="file of trees")
    parser.add_argument("--dev", help="file of trees")
    parser.add_argument("--sweeps", type=int, default=400)
    parser.add_argument("--every", type=int, default=20, help="sweeps between two looks at dev")
    parser.add_argument("--states", type=int, default=8)
    parser.add_argument("--tags", type=int, default=15)
    parser.add_argument("--prior", type=float, default=0.1)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.train is None:
        one_tree(given.sweeps, given.seeds)
    else:
        induction(given)


if __name__ == "__main__":
    main()
