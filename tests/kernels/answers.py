"""Prompts of tests of an engine's graphs, and whether two engines answer alike."""

import pytest
import torch

from tests.serve.tiny import VOCABULARY


def prompts(*lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]


def same(given, wanted):
    for one, other in zip(given, wanted, strict=True):
        assert one.tokens == other.tokens
        found, expected = ([entry.logprob for entry in answer.logprobs] for answer in (one, other))
        assert found == pytest.approx(expected, abs=1e-4)
