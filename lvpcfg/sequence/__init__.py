"""Chains of hidden states, the simplest grammars: HMMs, their distributions, and other ways to learn them."""

from lvpcfg.sequence.chain import Chain as Chain
from lvpcfg.sequence.distribution import HMMDistribution as HMMDistribution
from lvpcfg.sequence.hmm import HMM as HMM
from lvpcfg.sequence.hmm import words_of as words_of
from lvpcfg.sequence.latent_tree import LatentTree as LatentTree
from lvpcfg.sequence.low_rank import nmf as nmf
from lvpcfg.sequence.low_rank import svd as svd
from lvpcfg.sequence.spectral import SpectralHMM as SpectralHMM
from lvpcfg.sequence.spectral import spectral_hmm as spectral_hmm
from lvpcfg.sequence.spectral import triples_of as triples_of
