"""Each sampler against its definition: figures that llama.cpp publishes, transformers where it has the same, and else a
plain reference."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest
import torch
from transformers.generation import logits_process as theirs

from moesaic.errors import UserError
from moesaic.serve.core.dry import dry_penalties
from moesaic.serve.core.processors import penalized, processed
from moesaic.serve.core.request import Request, Sampling
from moesaic.serve.core.sampler import Sampler
from moesaic.serve.core.truncation import distribution

LLAMA_CPP = ("penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature")


def request(tokens=(3, 5), seed=0, **sampling) -> Request:
    return Request(list(tokens), Sampling(**sampling), seed=seed)


def left(probs, seed=0, **sampling) -> list[float]:
    """The probabilities of all tokens after temperature and cuts."""
    logits_V = torch.tensor(probs).log()
    tokens, kept = distribution(logits_V, request(seed=seed, **sampling))
    found = torch.zeros(len(probs))
    found[torch.arange(len(probs)) if tokens is None else tokens] = kept / kept.sum()
    return found.tolist()


def random_logits(seed: int, vocab: int = 300) -> torch.Tensor:
    return torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * 2


FOUR = [0.1, 0.2, 0.3, 0.4]


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        ({"top_n_sigma": 1.0}, [0, 0, 3 / 7, 4 / 7]),
        ({"top_n_sigma": 3.0}, FOUR),
        ({"xtc_probability": 1.0, "xtc_threshold": 0.09}, [1, 0, 0, 0]),
        ({"xtc_probability": 1.0, "xtc_threshold": 0.19}, [1 / 3, 2 / 3, 0, 0]),
        ({"xtc_probability": 1.0, "xtc_threshold": 0.29}, [1 / 6, 2 / 6, 3 / 6, 0]),
        ({"xtc_probability": 1.0, "xtc_threshold": 0.39}, FOUR),
        ({"xtc_probability": 1.0, "xtc_threshold": 0.51}, FOUR),
        ({"samplers": ("top_k",), "top_k": 2, "top_p": 0.1}, [0, 0, 3 / 7, 4 / 7]),
        ({"samplers": ("top_p",), "top_p": 0.65, "top_k": 1}, [0, 0, 3 / 7, 4 / 7]),
        ({"samplers": ("min_p",), "min_p": 0.49}, [0, 2 / 9, 3 / 9, 4 / 9]),
        ({"samplers": ("temperature",), "temperature": 0.5}, [1 / 30, 4 / 30, 9 / 30, 16 / 30]),
        ({"samplers": (), "temperature": 0.5, "min_p": 0.9}, FOUR),
    ],
    ids=str,
)
def test_what_is_left_of_four_tokens(sampling, expected):
    assert left(FOUR, **sampling) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("probs", "expected"),
    [([0.97, 0.01, 0.01, 0.01], [1, 0, 0, 0]), ([0.4, 0.2, 0.2, 0.2], [0, 1 / 3, 1 / 3, 1 / 3])],
)
def test_typical_tokens_are_nearest_to_the_entropy(probs, expected):
    assert left(probs, typical_p=0.5) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("mass", [0.05, 0.3, 0.9, 0.999])
@pytest.mark.parametrize("vocab", [300, 5000])
def test_typical_is_that_of_transformers(mass, vocab):
    for seed in range(3):
        row = random_logits(seed, vocab)
        expected = theirs.TypicalLogitsWarper(mass)(None, row[None])[0].softmax(-1)
        tokens, probs = distribution(row, request(typical_p=mass))
        found = torch.zeros(vocab)
        found[tokens] = probs
        torch.testing.assert_close(found, expected)


def test_a_masked_token_is_never_left():
    row = random_logits(1)
    row[::2] = float("-inf")
    cuts = {"typical_p": 0.9, "top_n_sigma": 2.0, "xtc_probability": 1.0, "dynatemp_range": 0.5, "min_p": 0.01}
    for name, value in cuts.items():
        tokens, probs = distribution(row.clone(), request(**{name: value}))
        tokens = torch.arange(len(row)) if tokens is None else tokens
        assert torch.isfinite(probs).all()
        assert (tokens[probs > 0] % 2 == 1).all(), name
    for version in (1, 2):
        tokens, probs = distribution(row.clone(), request(mirostat=version))
        assert (tokens[probs > 0] % 2 == 1).all()


def test_the_order_of_samplers_is_the_one_given():
    hot = {"temperature": 3.0, "min_p": 0.4}
    assert left(FOUR, **hot) != pytest.approx(left(FOUR, samplers=LLAMA_CPP, **hot))
    first = left(FOUR, **hot)  # by default, the temperature comes first
    assert first == pytest.approx(left(FOUR, samplers=("temperature", "min_p"), **hot))
    assert left(FOUR, samplers=LLAMA_CPP, **hot)[0] == 0
    assert first[0] > 0


def test_llama_cpps_order_is_a_chain_of_transformers_warpers():
    """All cuts before the temperature."""
    for seed in range(5):
        row = random_logits(seed)[None]
        wanted = theirs.TopKLogitsWarper(80)(None, row)
        wanted = theirs.TypicalLogitsWarper(0.95)(None, wanted)
        wanted = theirs.TopPLogitsWarper(0.9)(None, wanted)
        wanted = theirs.MinPLogitsWarper(0.02)(None, wanted)
        expected = (wanted[0] / 1.7).softmax(-1)
        asked = request(top_k=80, typical_p=0.95, top_p=0.9, min_p=0.02, temperature=1.7, samplers=LLAMA_CPP)
        tokens, probs = distribution(row[0], asked)
        found = torch.zeros(row.shape[1])
        found[tokens] = probs
        torch.testing.assert_close(found, expected)


def test_usual_cuts_are_the_same_one_by_one():
    for seed in range(5):
        row = random_logits(seed)
        usual = {"temperature": 1.3, "top_k": 40, "top_p": 0.8, "min_p": 0.05}
        order = ("temperature", "top_k", "top_p", "min_p")
        (tokens, probs), (others, more) = (
            distribution(row, request(**usual)),
            distribution(row, request(**usual, samplers=order)),
        )
        assert sorted(tokens.tolist()) == sorted(others.tolist())
        by_token = dict(zip(others.tolist(), (more / more.sum()).tolist()))
        assert [by_token[token] for token in tokens.tolist()] == pytest.approx((probs / probs.sum()).tolist())


def test_xtc_strikes_as_often_as_asked():
    struck = sum(left(FOUR, seed=seed, xtc_probability=0.3, xtc_threshold=0.19)[3] == 0 for seed in range(2000))
    assert 520 < struck < 680


def test_dynamic_temperature_follows_the_entropy():
    flat, sure = [0.25] * 4, [0.97, 0.01, 0.01, 0.01]
    assert left(flat, temperature=1.0, dynatemp_range=0.5) == pytest.approx(flat)
    entropy = -sum(p * math.log(p) for p in sure) / math.log(4)
    value = 0.5 + (1.5 - 0.5) * entropy**2.0
    raised = [p ** (1 / value) for p in sure]
    expected = [p / sum(raised) for p in raised]
    found = left(sure, temperature=1.0, dynatemp_range=0.5, dynatemp_exponent=2.0)
    assert found == pytest.approx(expected, rel=1e-4)
    assert left(sure, temperature=0.5, dynatemp_range=1.0, dynatemp_exponent=100.0) == [1, 0, 0, 0]


# DRY


def plain_dry(tokens, sampling, breakers=()):
    """The definition, as slowly as it can be read: for every earlier place, how much of the end stands before it."""
    window = list(tokens)[-sampling.dry_penalty_last_n :] if sampling.dry_penalty_last_n > 0 else list(tokens)
    limit = next((n for n, token in enumerate(reversed(window)) if token in breakers), len(window))
    longest: Counter[int] = Counter()
    for place in range(1, len(window)):
        length = 0
        while length < min(place, limit) and window[place - 1 - length] == window[len(window) - 1 - length]:
            length += 1
        longest[window[place]] = max(longest[window[place]], length)
    return {
        token: sampling.dry_multiplier * sampling.dry_base ** (length - sampling.dry_allowed_length)
        for token, length in longest.items()
        if length >= sampling.dry_allowed_length and token not in breakers and len(window) > sampling.dry_allowed_length
    }


@pytest.mark.parametrize("seed", range(40))
def test_dry_is_its_definition(seed):
    rng = random.Random(seed)
    vocab = rng.choice([2, 3, 6])
    tokens = [rng.randrange(vocab) for _ in range(rng.randint(1, 80))]
    sampling = Sampling(
        dry_multiplier=rng.choice([0.5, 1.0, 2.0]),
        dry_base=rng.choice([1.0, 1.1, 1.75]),
        dry_allowed_length=rng.randint(1, 4),
        dry_penalty_last_n=rng.choice([-1, 5, 20, 64]),
    )
    breakers = set(range(vocab)[:1]) if seed % 3 == 0 else set()
    found = dry_penalties(tokens, sampling, {token: ((),) for token in breakers})
    assert found == pytest.approx(plain_dry(tokens, sampling, breakers))


@pytest.mark.parametrize(
    ("tokens", "expected", "options"),
    [
        ([0, 1], [0.25] * 4, {}),
        ([0, 1, 2, 0, 1], [0.296923, 0.296923, 0.109232, 0.296923], {}),
        ([0, 1, 2, 0, 1], [0.241818, 0.241818, 0.032727, 0.241818, 0.241818], {"dry_multiplier": 2.0}),
        ([0, 1, 2, 3, 4, 0, 1], [0.2] * 5, {"dry_allowed_length": 4}),
    ],
)
def test_dry_figures_of_llama_cpp(tokens, expected, options):
    asked = request(tokens, **{"dry_multiplier": 1.0, "dry_base": 1.1, "dry_allowed_length": 2} | options)
    found = penalized(torch.zeros(len(expected)), asked).softmax(-1)
    assert found.tolist() == pytest.approx(expected, abs=1e-5)


def test_a_breaker_of_several_tokens_ends_a_repetition():
    sampling = Sampling(dry_multiplier=1.0, dry_allowed_length=1)
    tokens = [1, 2, 3, 7, 8, 1, 2]
    assert set(dry_penalties(tokens, sampling, {})) == {3}
    assert dry_penalties([1, 2, 3, 1, 7, 8, 2], sampling, {}) == {3: 1.0}
    # Only what comes after the breaker (7, 8) can be repeated: one token, not two.
    wide = Sampling(dry_multiplier=1.0, dry_allowed_length=1, dry_base=2.0)
    assert dry_penalties([9, 7, 8, 2, 3, 9, 7, 8, 2], wide, {}) == {3: 8.0}
    assert dry_penalties([9, 7, 8, 2, 3, 9, 7, 8, 2], wide, {7: ((8,),)}) == {3: 1.0}
    assert dry_penalties([9, 7, 8, 2, 3, 9, 7, 8, 2], wide, {7: ((5,),)}) == {3: 8.0}


def test_a_prompt_that_is_one_token_over_and_over_is_bounded():
    tokens = [4] * 20_000
    assert dry_penalties(tokens, Sampling(dry_multiplier=1.0, dry_base=1.0001, dry_penalty_last_n=-1), {}).keys() == {4}
    huge = dry_penalties(tokens, Sampling(dry_multiplier=1.0, dry_penalty_last_n=-1), {})[4]
    assert math.isfinite(torch.tensor(huge, dtype=torch.float32))


# Mirostat


def mirostat_reference(rows, version, tau, eta, draws, vocab):
    """The paper's algorithms as llama.cpp runs them: tokens, and `mu` after each."""
    mu, found = 2 * tau, []
    for row, point in zip(rows, draws, strict=True):
        probs, order = row.softmax(-1).double().sort(descending=True)
        if version == 1:
            top, bottom = 0.0, 0.0
            for i in range(min(99, vocab - 1)):
                step = math.log((i + 2) / (i + 1))
                top += step * math.log(probs[i] / probs[i + 1])
                bottom += step * step
            slope = top / bottom
            epsilon = slope - 1
            k = ((epsilon * 2**mu) / (1 - vocab**-epsilon)) ** (1 / slope)
            count = min(max(int(k), 1), vocab)
        else:
            count = max(1, int((-probs.log2() <= mu).sum()))
        mass = float(probs[:count].sum())
        found.append((set(order[:count].tolist()), mass, mu))
        # Which token is drawn is up to the sampler: any that the cut has left.
        token = point(found[-1][0])
        place = order.tolist().index(token)
        mu -= eta * (-math.log2(float(probs[place]) / mass) - tau)
    return found, mu


@pytest.mark.parametrize("version", [1, 2])
def test_mirostat_is_its_algorithm(version):
    rows = [random_logits(seed, 200) for seed in range(30)]
    asked = request(mirostat=version, mirostat_tau=3.0, mirostat_eta=0.2, seed=5)
    cuts, chosen = [], []
    for row in rows:
        tokens, _ = distribution(row, asked)
        cuts.append(set(tokens.tolist()))
        chosen.append(Sampler(row[None]).sample(0, asked, set()))
        asked.tokens.append(chosen[-1].token)
    order = iter([one.token for one in chosen])
    expected, mu = mirostat_reference(rows, version, 3.0, 0.2, [lambda kept: next(order)] * len(rows), 200)
    assert cuts == [kept for kept, _, _ in expected]
    assert asked.mu == pytest.approx(mu, rel=1e-5)
    assert len({len(kept) for kept in cuts}) > 3  # it does cut, and not always alike


def test_mirostat_holds_the_surprise_near_its_target():
    for version in (1, 2):
        asked = request(mirostat=version, mirostat_tau=2.0, mirostat_eta=0.1, seed=3)
        seen = []
        for seed in range(400):
            chosen = Sampler(random_logits(seed % 50, 1000)[None]).sample(0, asked, set())
            asked.tokens.append(chosen.token)
            assert chosen.drawn is not None
            seen.append(-chosen.drawn / math.log(2))
        assert sum(seen[100:]) / 300 == pytest.approx(2.0, abs=0.15)


# What must not come


def test_penalties_over_the_last_tokens_count_the_prompt_too():
    row = random_logits(2, 40)
    asked = request([3, 5, 5, 9], presence_penalty=0.5, frequency_penalty=0.25, repeat_last_n=3)
    expected = row.clone()
    expected[5] -= 0.5 + 2 * 0.25
    expected[9] -= 0.5 + 0.25
    torch.testing.assert_close(penalized(row.clone(), asked), expected)
    asked = request([3, 5, 5, 9], repetition_penalty=1.3, repeat_last_n=2)
    expected = theirs.RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([[5, 9]]), row[None].clone())[0]
    torch.testing.assert_close(penalized(row.clone(), asked), expected)
    off = request([3, 5, 5, 9], repetition_penalty=1.3, presence_penalty=1.0, repeat_last_n=0, temperature=0.0)
    assert off.sampling.plain
    whole = request([3, 5, 5, 9], presence_penalty=0.5, repeat_last_n=-1)
    assert (penalized(row.clone(), whole) != row).nonzero()[:, 0].tolist() == [3, 5, 9]


def test_bad_words_end_where_their_last_token_would_come():
    row = torch.zeros(20)
    asked = request([4, 7], bad_words=((7,), (1, 2, 3), (4, 7, 9)))

    def banned() -> list[int]:
        return (processed(row.clone(), asked, set()) == float("-inf")).nonzero()[:, 0].tolist()

    assert banned() == [7]  # the prompt is nobody's word
    asked.tokens += [1, 2]
    assert banned() == [3, 7]
    asked.tokens += [2]
    assert banned() == [7]


def test_masks_that_leave_nothing_give_way_in_their_order():
    row = torch.zeros(6)
    asked = request(allowed_tokens=frozenset([2]), bad_words=((2,),), min_tokens=3, stop_tokens=frozenset([2]))
    assert (processed(row.clone(), asked, {2}) > float("-inf")).nonzero()[:, 0].tolist() == [2]
    asked = request(allowed_tokens=frozenset([1, 2, 4]), bad_words=((2,),), min_tokens=3)
    assert (processed(row.clone(), asked, {4}) > float("-inf")).nonzero()[:, 0].tolist() == [1]


def test_no_params_however_wild_leave_nothing_or_anything_forbidden():
    rng = random.Random(5)
    wild: dict[str, list] = {
        "temperature": [0.0, 1e-5, 0.7, 100.0], "top_k": [0, 1, 7], "top_p": [1.0, 1e-9, 0.5], "min_p": [0.0, 1.0, 0.3],
        "typical_p": [1.0, 1e-9, 0.5], "top_n_sigma": [0.0, 1e-9, 1.0, 100.0], "xtc_probability": [0.0, 1.0],
        "xtc_threshold": [0.0, 0.1, 0.5], "dynatemp_range": [0.0, 0.5, 100.0], "dynatemp_exponent": [0.0, 1.0, 100.0],
        "mirostat": [0, 0, 1, 2], "mirostat_tau": [0.0, 5.0, 100.0], "mirostat_eta": [0.0, 0.1, 100.0],
        "repetition_penalty": [1.0, 1e-3, 100.0], "presence_penalty": [0.0, 2.0], "repeat_last_n": [None, -1, 0, 3],
        "dry_multiplier": [0.0, 100.0], "dry_base": [1.0, 100.0], "dry_allowed_length": [1, 5],
        "dry_penalty_last_n": [-1, 0, 9], "allowed_tokens": [None, frozenset([3]), frozenset([3, 4, 5])],
        "bad_words": [(), ((3,),), ((4, 3), (5,))], "logit_bias": [{}, {3: float("-inf")}, {4: -100.0, 5: 100.0}],
        "min_tokens": [0, 9], "stop_tokens": [frozenset(), frozenset([4])],
        "samplers": [None, None, LLAMA_CPP, (), ("xtc", "typ_p", "min_p", "top_p")],
    }  # fmt: skip
    for turn in range(1500):
        params = {name: rng.choice(values) for name, values in wild.items() if rng.random() < 0.4}
        asked = request([3, 3, 3, 3, 5, 3, 3], seed=turn, **params)
        scale = rng.choice([0.0, 1.0, 30.0, 1e6])
        for place in range(3):
            row = random_logits(turn * 3 + place, 12) * scale
            chosen = Sampler(row[None]).sample(0, asked, {4})
            asked.tokens.append(chosen.token)
            assert 0 <= chosen.token < 12
            allowed = asked.sampling.allowed_tokens
            if allowed is not None and not asked.sampling.logit_bias:
                assert chosen.token in allowed, params
            assert asked.mu is None or not math.isnan(asked.mu), params


def test_a_bias_of_minus_infinity_is_never():
    row = random_logits(4, 20)
    best, second = row.topk(2).indices.tolist()
    asked = request(temperature=0.0, logit_bias={best: float("-inf")})
    assert Sampler(row[None]).sample(0, asked, set()).token == second


def test_log_probabilities_are_the_models_own_or_the_processed_ones():
    row = random_logits(4, 20)
    bias = {"temperature": 0.0, "logit_bias": {3: 50.0}, "logprobs": 2}
    own = Sampler(row[None]).sample(0, request(**bias), set())
    assert own.token == 3 and own.logprob == pytest.approx(float(row.log_softmax(-1)[3]))
    biased = row.clone()
    biased[3] += 50.0
    found = Sampler(row[None]).sample(0, request(**bias, processed_logprobs=True), set())
    assert found.top[0] == (3, pytest.approx(float(biased.log_softmax(-1)[3])))


def test_plain_and_whole_know_every_param():
    greedy = {"temperature": 0.0}
    assert Sampling(**greedy).plain and Sampling().whole
    changing = [
        {"dry_multiplier": 1.0}, {"bad_words": ((1,),)}, {"allowed_tokens": frozenset([1])}, {"min_tokens": 1},
        {"logit_bias": {1: 1.0}}, {"presence_penalty": 1.0}, {"repetition_penalty": 1.1}, {"frequency_penalty": 1.0},
    ]  # fmt: skip
    for one in changing:
        assert not Sampling(**greedy, **one).plain, one
        assert Sampling(**one).changes_logits, one
    cutting = [
        {"typical_p": 0.9}, {"top_n_sigma": 1.0}, {"xtc_probability": 0.5}, {"dynatemp_range": 0.5}, {"mirostat": 2},
        {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}, {"samplers": ("min_p",), "min_p": 0.1},
    ]  # fmt: skip
    for one in cutting:
        assert not Sampling(**one).whole, one
        assert Sampling(**greedy, **{name: value for name, value in one.items() if name != "samplers"}).plain, one


@pytest.mark.parametrize(
    "wrong",
    [
        {"typical_p": 0.0}, {"top_n_sigma": -1.0}, {"xtc_probability": 1.1}, {"mirostat": 3}, {"dry_base": 0.5},
        {"dry_allowed_length": 0}, {"repeat_last_n": -2}, {"bad_words": ("",)}, {"allowed_tokens": frozenset()},
        {"samplers": ("best",)}, {"dynatemp_range": -1.0}, {"dry_sequence_breakers": ("",)},
        {"record_draws": True, "mirostat": 2},
    ],
    ids=str,
)  # fmt: skip
def test_what_makes_no_sense_is_refused_by_name(wrong):
    with pytest.raises(UserError) as refused:
        Sampling(**wrong)
    assert refused.value.place == next(iter(wrong))
