"""The trainer's log-probabilities are to the bit those the engine recorded, whatever the engine went through."""

from __future__ import annotations

import pytest
import torch

import moesaic
from moesaic.align.rewards import Judged
from moesaic.align.rollouts.rollout import as_batch, sample_of
from moesaic.model.context import Routing
from moesaic.model.layout import Layout
from moesaic.serve.core.drafters.router import DraftRouter
from moesaic.serve.core.drafters.suffix import Suffix
from moesaic.serve.core.request import Sampling
from moesaic.serve.core.scheduling_policies.chunked import Chunked
from tests.model import oracle
from tests.serve.tiny import serve_all

KINDS = [
    "glm4_moe-groups",
    "glm4_moe-plain-weights",
    "qwen3_moe-normalised-mixed",
    "qwen3_moe-window",
    "mixtral-top1",
    "llama-llama3-biases",
    "deepseek_v3-yarn",
]


def load(case: str, path, mode: str):
    oracle.save(case, path)
    model = moesaic.load(path)
    model.mode = mode
    return model


@pytest.mark.parametrize("case", KINDS)
def test_recorded_log_probabilities_are_the_trainers_to_the_bit(case, tmp_path):
    model = load(case, tmp_path, "invariant")
    generator = torch.Generator().manual_seed(1)
    common = torch.randint(3, 97, (12,), generator=generator).tolist()
    prompts = [common + torch.randint(3, 97, (n % 9,), generator=generator).tolist() for n in range(30)]
    page = sum(torch.Size(shape).numel() for layer in model.cache_shapes() for shape in layer.values()) * 4 * 4
    engine = moesaic.Engine(
        model, page_size=4, cache_bytes=60 * page, policy=Chunked(tokens=29), drafter=Suffix(), max_requests=12
    )
    wishes = {"max_tokens": 24, "temperature": 1.0, "ignore_eos": True, "record_routes": False}
    requests = [engine.request(prompt, Sampling(**wishes, seed=n)) for n, prompt in enumerate(prompts)]
    serve_all(engine, requests)
    assert engine.scheduler.preemptions > 0 and engine.page_pool.hits > 0

    tokens_T = torch.tensor([token for request in requests for token in request.tokens])
    lengths = [len(request.tokens) for request in requests]
    hidden_TD = model(tokens_T, Layout(lengths), Routing())
    assert hidden_TD.requires_grad
    targets_T = torch.cat([torch.tensor([*request.tokens[1:], -100]) for request in requests])
    logprobs_T, _ = model.token_logprobs(hidden_TD, targets_T)
    start = 0
    for request in requests:
        row = start + len(request.prompt) - 1
        learned = logprobs_T[row : row + request.written]
        recorded = torch.tensor([entry.logprob for entry in request.logprobs])
        assert torch.equal(learned, recorded), f"{(learned - recorded).detach().abs().max()} apart"
        start += len(request.tokens)
    assert start == len(tokens_T) and sum(request.written for request in requests) == 30 * 24


@pytest.mark.parametrize("case", KINDS)
def test_gradients_are_those_of_the_reference(case, tmp_path):
    model = load(case, tmp_path, "invariant")
    lengths = [9, 1, 14]
    tokens_T = torch.randint(3, 97, (sum(lengths),), generator=torch.Generator().manual_seed(2))
    weights_TD = torch.randn(sum(lengths), model.config.hidden, generator=torch.Generator().manual_seed(3))
    found = {}
    for mode in ("invariant", "reference"):
        model.mode = mode
        model.zero_grad()
        hidden_TD = model(tokens_T, Layout(lengths))
        (hidden_TD * weights_TD).sum().backward()
        found[mode] = (
            hidden_TD.detach(),
            {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None},
        )
    torch.testing.assert_close(found["invariant"][0], found["reference"][0], rtol=1e-4, atol=1e-4)
    assert set(found["invariant"][1]) == set(found["reference"][1]) != set()
    for name, gradient in found["reference"][1].items():
        scale = float(gradient.abs().max())
        torch.testing.assert_close(found["invariant"][1][name], gradient, rtol=1e-3, atol=1e-4 * scale + 1e-5)


@pytest.mark.parametrize("case", ["glm4_moe-groups", "qwen3_moe-window", "deepseek_v3-yarn"])
def test_half_precision_learns_too(case, tmp_path):
    oracle.save(case, tmp_path)
    tokens_T = torch.randint(3, 97, (24,), generator=torch.Generator().manual_seed(2))
    routing, found = Routing(), {}
    for mode, kind in (("reference", torch.float32), ("invariant", torch.bfloat16)):
        model = moesaic.load(tmp_path, dtype=kind, mode=mode)
        hidden_TD = model(tokens_T, Layout([9, 1, 14]), routing)
        model.logits_at(hidden_TD).float().log_softmax(-1).gather(1, tokens_T[:, None]).sum().backward()
        found[mode] = {name: parameter.grad.float() for name, parameter in model.named_parameters()}
        routing.replay = True  # rounding may choose other experts
    for name, gradient in found["reference"].items():
        assert (found["invariant"][name] - gradient).norm() < 0.2 * gradient.norm(), name


def test_without_the_mode_the_two_are_close_but_not_equal(tmp_path):
    """So the promise is the mode's doing, and the test above can fail."""
    model = load("glm4_moe-groups", tmp_path, "fast")
    tokens_T = torch.randint(3, 97, (60,), generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        served_TD = model(tokens_T, Layout([60]))
    trained_TD = model(tokens_T, Layout([60])).detach()
    torch.testing.assert_close(trained_TD, served_TD, rtol=1e-4, atol=1e-4)
    assert not torch.equal(trained_TD, served_TD)


@pytest.mark.parametrize("wishes", [{"temperature": 0.7}, {"top_k": 5}, {"temperature": 1.3, "top_p": 0.8}])
def test_what_was_drawn_from_a_part_of_the_tokens_is_learned_as_such_to_the_bit(wishes, tmp_path):
    model = load("qwen3_moe-normalised-mixed", tmp_path, "invariant")
    engine = moesaic.Engine(model, drafter=DraftRouter.over(Suffix(), always=True))  # guesses in every pass
    full = {"max_tokens": 24, "temperature": 1.0, "ignore_eos": True, "record_draws": True} | wishes
    requests = [engine.request([5, 6, 7 + n], Sampling(**full, seed=n)) for n in range(8)]
    serve_all(engine, requests)
    assert engine.counts.drafted_tokens > 100
    samples = [sample_of(request, "", Judged(0.0, {})) for request in requests]
    batch = as_batch(samples, 0, "token", {}, {})
    kept_TK = batch.columns.get("kept")
    assert (kept_TK is not None) == ("top_k" in wishes or "top_p" in wishes)
    hidden_TD = model(batch.tokens_T, Layout(batch.lengths), Routing())
    learned_T, entropy_T = model.token_logprobs(
        hidden_TD,
        batch.targets_T,
        temperature=full["temperature"],
        kept_TK=kept_TK,
    )
    assert torch.equal(learned_T, batch.columns["old"]) and entropy_T.isfinite().all()
    learned_T.sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    # Against the plain way: softmax over what was kept, renormalised.
    logits_TV = model.logits_at(hidden_TD).detach() / full["temperature"]
    for row in (batch.targets_T >= 0).nonzero().flatten().tolist()[:40]:
        probs_V = logits_TV[row].softmax(-1)
        among = torch.arange(len(probs_V)) if kept_TK is None else kept_TK[row].unique()
        expected = probs_V[batch.targets_T[row]] / probs_V[among].sum()
        torch.testing.assert_close(learned_T[row].detach().exp(), expected, rtol=1e-4, atol=1e-6)
