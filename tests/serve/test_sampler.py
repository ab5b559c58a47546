"""Tokens are drawn from the distribution that was asked for, from the seed alone."""

from __future__ import annotations

import pytest
import torch
from scipy.stats import chisquare
from transformers.generation import logits_process as theirs

from moesaic.serve.core.draws import draw
from moesaic.serve.core.processors import penalized
from moesaic.serve.core.request import Request, Sampling
from moesaic.serve.core.sampler import Sampler
from moesaic.serve.core.truncation import truncated

VOCAB = 40


def logits(seed: int, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * 2


def request(**sampling) -> Request:
    return Request([3, 5, 5, 9], Sampling(**sampling))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [
        (0, 1.0, 0.0),
        (7, 1.0, 0.0),
        (0, 0.8, 0.0),
        (0, 0.05, 0.0),
        (0, 1.0, 0.1),
        (12, 0.9, 0.05),
        (1, 0.5, 0.0),
        (90, 1.0, 0.0),
    ],
)
def test_what_may_be_drawn_is_what_transformers_keeps(seed, top_k, top_p, min_p):
    row = logits(seed)[None]
    wanted = row
    if top_k:
        wanted = theirs.TopKLogitsWarper(top_k)(None, wanted)
    if top_p < 1:
        wanted = theirs.TopPLogitsWarper(top_p)(None, wanted)
    if min_p:
        wanted = theirs.MinPLogitsWarper(min_p)(None, wanted)
    expected = wanted[0].softmax(-1)
    tokens, probs = truncated(row[0].softmax(-1), top_k, top_p, min_p)
    found = torch.zeros(VOCAB)
    found[torch.arange(VOCAB) if tokens is None else tokens] = probs / probs.sum()
    torch.testing.assert_close(found, expected)


def test_a_large_vocabulary_is_cut_where_a_full_sort_would_cut_it():
    probs = (torch.randn(5000, generator=torch.Generator().manual_seed(0)) * 0.3).softmax(-1)
    for top_p, min_p in ((0.05, 0.0), (0.9, 0.0), (1.0, 0.3), (1.0, 0.9)):
        tokens, _ = truncated(probs, 0, top_p, min_p)
        ordered, order = probs.sort(descending=True)
        kept = (
            int((ordered.cumsum(0) - ordered < top_p).sum()) if top_p < 1 else int((probs >= min_p * ordered[0]).sum())
        )
        assert set(tokens.tolist()) == set(order[:kept].tolist())


def test_top_p_is_a_share_of_what_top_k_left_however_many_these_are():
    probs = (torch.randn(5000, generator=torch.Generator().manual_seed(0)) * 2.0).softmax(-1)
    ordered, order = probs.sort(descending=True)
    for top_k in (600, 2000, 5000, 9000):
        left = ordered[:top_k] / ordered[:top_k].sum()
        kept = int((left.cumsum(0) - left < 0.6).sum())
        tokens, _ = truncated(probs, top_k, 0.6, 0.0)
        assert tokens.tolist() == order[:kept].tolist()


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 1.0},
        {"temperature": 0.5},
        {"temperature": 2.0, "top_k": 10},
        {"temperature": 1.0, "top_p": 0.7},
        {"temperature": 1.3, "min_p": 0.08},
    ],
    ids=str,
)
def test_draws_follow_the_distribution(sampling):
    row = logits(1)
    asked = request(**sampling)
    wanted = (row / asked.sampling.temperature).softmax(-1)
    tokens, probs = truncated(wanted, asked.sampling.top_k, asked.sampling.top_p, asked.sampling.min_p)
    expected = torch.zeros(VOCAB)
    expected[torch.arange(VOCAB) if tokens is None else tokens] = probs / probs.sum()
    choices = Sampler(row[None])
    counts = torch.zeros(VOCAB)
    draws = 6000
    for seed in range(draws):
        asked.seed = seed
        counts[choices.sample(0, asked, set()).token] += 1
    assert counts[expected == 0].sum() == 0
    often = expected * draws >= 5  # what the test statistic needs
    rest = expected[~often].sum() * draws
    observed = [*counts[often].tolist(), *([float(counts[~often].sum())] if rest > 0 else [])]
    wanted_counts = [*(expected[often] * draws).tolist(), *([float(rest)] if rest > 0 else [])]
    assert chisquare(observed, wanted_counts, sum_check=False).pvalue > 1e-4


@pytest.mark.parametrize("temperature", [1e-5, 1e-20, 1e-38, 1e-320])
def test_next_to_no_temperature_is_none(temperature):
    row = logits(2)
    chosen = Sampler(row[None]).sample(0, request(temperature=temperature, frequency_penalty=0.1), set())
    assert chosen.token == int(row.argmax())


def test_draws_are_fixed_by_seed_and_place_and_spread_evenly():
    assert draw(7, 3) == draw(7, 3) != draw(7, 4)
    values = torch.tensor([draw(seed, place) for seed in range(100) for place in range(100)])
    assert 0 <= float(values.min()) and float(values.max()) < 1
    counts = torch.histc(values, 20, 0, 1)
    assert chisquare(counts.numpy()).pvalue > 1e-4
    assert draw(-(2**63), 0) != draw(2**63 - 1, 0)


def test_penalties_are_those_of_transformers_and_of_the_api():
    row = logits(2)
    asked = request(repetition_penalty=1.3)
    expected = theirs.RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([asked.tokens]), row[None].clone())[0]
    torch.testing.assert_close(penalized(row.clone(), asked), expected)

    asked = request(presence_penalty=0.5, frequency_penalty=0.25, logit_bias={7: 3.0})
    asked.tokens += [11, 11, 12]
    expected = row.clone()
    expected[11] -= 0.5 + 2 * 0.25
    expected[12] -= 0.5 + 0.25
    expected[7] += 3.0  # the prompt is not counted
    torch.testing.assert_close(penalized(row.clone(), asked), expected)


def test_greedy_takes_the_likeliest_after_bias_and_holds_off_the_end():
    row = logits(3)
    best, second = row.topk(2).indices.tolist()
    choices = Sampler(row[None])
    assert choices.sample(0, request(temperature=0.0), set()).token == best
    assert choices.sample(0, request(temperature=0.0, min_tokens=1), {best}).token == second
    held_off = request(temperature=0.0, min_tokens=1, stop_tokens=frozenset([best]))
    assert choices.sample(0, held_off, set()).token == second
    assert choices.sample(0, request(temperature=0.0, logit_bias={8: 100.0}), set()).token == 8
    assert choices.sample(0, request(temperature=1e-4, seed=5), set()).token == best
