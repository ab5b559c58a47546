"""The engine's overlap loop in Triton's interpreter: it generates what plain forwards generate, whatever happens.

pytest tests/kernels/test_triton_engine.py
"""

import weakref
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from moesaic.kernels.cuda import invariant as cuda_invariant
from moesaic.kernels.cuda.fused_forward import outside
from moesaic.kernels.triton.attention import prompt_rows
from moesaic.kernels.triton.sample import logprobs_of
from moesaic.model.config import Dense, Experts, GroupedQuery, Layer, ModelConfig, Rope
from moesaic.model.layout import Layout
from moesaic.model.transformer import Model
from moesaic.serve.core.drafters.router import DraftRouter
from moesaic.serve.core.drafters.suffix import Suffix
from moesaic.serve.core.engine import Engine
from moesaic.serve.core.request import Sampling
from moesaic.serve.core.scheduling_policies.chunked import Chunked
from moesaic.serve.core.scheduling_policies.flow import FlowPrefill
from moesaic.serve.gpu.overlap import OverlapLoop, step_weights
from tests.kernels import interpreter
from tests.serve.tiny import VOCABULARY, page_bytes, serve_all, tiny_latent_model, tiny_model

interpreter.require()


@pytest.fixture(scope="module")
def model():
    made = tiny_model(layers=1)
    assert outside(step_weights(made)) is None
    return made


def engines(model, **options):
    """One that queues steps, and one that does not."""
    queued, plain = Engine(model, **options), Engine(model, **options)
    queued.runner = OverlapLoop(queued)
    return queued, plain


def prompts(*lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]


def same(given, wanted):
    for one, other in zip(given, wanted, strict=True):
        assert one.tokens == other.tokens and one.finish_reason == other.finish_reason
        found, expected = ([entry.logprob for entry in answer.logprobs] for answer in (one, other))
        assert found == pytest.approx(expected, abs=1e-4)


def test_before_a_capture_one_layer_of_each_kind_runs():
    engine, _ = engines(tiny_latent_model(layers=4), page_size=4)
    steps = engine.runner.steps
    mixtures = [layer.is_mixture for layer in steps.forward.weights.layers]
    kept = [layer.number for layer in steps.sample.weights.layers]
    assert mixtures == [False, True, True, True] and kept == [0, 1]
    assert [id(cache) for cache in steps.sample.caches] == [id(engine.cache.layers[number]) for number in kept]
    (counts,) = steps.sample.counts
    assert counts.data_ptr() == steps.forward.counts[0].data_ptr()


def test_an_engine_that_is_gone_is_collected_by_the_next(model):
    queued, _ = engines(model, page_size=4)
    gone = weakref.ref(queued)
    del queued, _
    engines(model, page_size=4)
    assert gone() is None


def test_what_was_warmed_up_is_not_captured_again(model):
    queued, plain = engines(model, page_size=4, max_requests=2, policy=Chunked(tokens=16))
    queued.warm_up()
    ready = set(queued.runner.steps.graphs)
    asked = prompts(3, 17, 9)
    same(*(engine.generate(asked, max_tokens=3, temperature=0.0) for engine in (queued, plain)))
    assert set(queued.runner.steps.graphs) == ready
    assert queued.experts.by_layer() == plain.experts.by_layer()


def test_greedy_and_drawn_answers(model):
    queued, plain = engines(model, page_size=4, seed=5)
    asked = prompts(3, 17, 9)
    for options in ({"temperature": 0.0}, {"temperature": 0.8, "seed": 11}):
        same(*(engine.generate(asked, max_tokens=5, **options) for engine in (queued, plain)))
    assert queued.counts.generated_tokens == plain.counts.generated_tokens == 30
    assert queued.counts.prompt_tokens == plain.counts.prompt_tokens
    assert not queued.scheduler.requests and queued.page_pool.in_use == 0
    # A prompt that was read before is not read again, and gives the same answer.
    assert queued.generate(asked[1:2], max_tokens=1, temperature=0.0)[0].cached_tokens >= 16


@pytest.mark.parametrize("latent", [False, True], ids=["keys and values", "latents"])
def test_a_cache_of_eight_bits(model, latent):
    """Written and read as in plain passes. The interpreter rounds some numbers to half of what they are (those that
    round up to a power of two), so bits are compared on a GPU only."""
    made = tiny_latent_model(layers=1) if latent else model
    pair = engines(made, page_size=4, policy=Chunked(tokens=8), cache_dtype="float8")
    found, wanted = (engine.generate(prompts(11), max_tokens=1, temperature=0.0)[0] for engine in pair)
    assert found.logprobs[0].logprob == pytest.approx(wanted.logprobs[0].logprob, abs=0.3)
    for name in pair[0].cache.layers[0]:
        given, expected = (engine.cache.layers[0][name].flatten(0, 1)[:11] for engine in pair)
        assert given.dtype == torch.float8_e4m3fn and expected.float().abs().max() > 1
        assert (given.float() == expected.float()).float().mean() > 0.94


def test_latent_attention():
    """Prompts in pieces and at once, answers side by side and alone, a prompt that was read before."""
    model = tiny_latent_model(q_rank=24)
    assert outside(step_weights(model)) is None
    queued, plain = engines(model, page_size=4, policy=Chunked(tokens=8))
    asked = prompts(3, 11)
    wanted = plain.generate(asked, max_tokens=3, temperature=0.0)
    same(queued.generate(asked, max_tokens=3, temperature=0.0), wanted)
    (again,) = queued.generate(asked[1:], max_tokens=3, temperature=0.0)
    assert again.cached_tokens >= 8
    same([again], wanted[1:])


def residual_model():
    """A residual expert (DeepSpeed-MoE) after a dense layer."""
    mixture = Experts(4, 2, 16, shared_hidden=16, residual=True)
    config = ModelConfig(
        "moesaic", VOCABULARY, 32, GroupedQuery(4, 2, 8), Rope(8), (Layer(Dense(32)), Layer(mixture)), context=256
    )
    return drawn(config)


def post_norm_model(activation="silu"):
    """GLM-4: what each half of a layer made is normed before it is added."""
    mixture = Experts(4, 2, 16, shared_hidden=16)
    layers = (Layer(Dense(32)), Layer(mixture)) if activation == "silu" else (Layer(Dense(32)),) * 2
    config = ModelConfig(
        "moesaic", VOCABULARY, 32, GroupedQuery(4, 2, 8), Rope(8), layers, context=256, post_norms=True,
        activation=activation,
    )  # fmt: skip
    return drawn(config)


def sinks_model():
    """gpt-oss: sinks, a window in every other layer, biases everywhere, a clamped gate."""
    attention = GroupedQuery(4, 2, 8, qkv_bias=True, out_bias=True, sinks=True)
    mixture = Experts(4, 2, 16, bias=True)
    layers = (Layer(mixture, window=6), Layer(mixture))
    config = ModelConfig(
        "moesaic", VOCABULARY, 32, attention, Rope(8), layers, context=256, activation="clamped_swiglu"
    )  # fmt: skip
    return drawn(config)


def whole_norms_model():
    """OLMoE's and MiniMax's norms of queries and keys, Qwen2-MoE's shared expert."""
    attention = GroupedQuery(4, 2, 8, qk_norm=True, norm="whole")
    mixture = Experts(4, 2, 16, shared_hidden=16, shared_gate=True)
    config = ModelConfig("moesaic", VOCABULARY, 32, attention, Rope(4), (Layer(mixture),) * 2, context=256)
    return drawn(config)


def drawn(config):
    torch.manual_seed(0)
    model = Model(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.3)
    return model


FORMS = [residual_model, post_norm_model, lambda: post_norm_model("gelu_tanh"), sinks_model, whole_norms_model]


@pytest.mark.parametrize("make", FORMS, ids=["residual", "post-norms", "gelu", "gpt-oss", "whole norms"])
def test_parts_of_other_families_are_graphs_too(make):
    queued, plain = engines(make(), page_size=4)
    assert OverlapLoop.outside(queued) is None
    asked = prompts(5, 9)
    same(*(engine.generate(asked, max_tokens=5, temperature=0.0) for engine in (queued, plain)))


def test_what_is_no_graph_says_why(model):
    assert OverlapLoop.outside(Engine(model, page_size=4)) is None
    flow = Engine(model, page_size=4, policy=FlowPrefill())
    assert OverlapLoop.outside(flow) == "the scheduling policy FlowPrefill"
    gelu = replace(step_weights(model).layers[0].ffn.experts, activation="gelu")
    weights = step_weights(model)
    layer = replace(weights.layers[0], ffn=replace(weights.layers[0].ffn, experts=gelu))
    assert outside(replace(weights, layers=(layer,))) == "experts with the activation gelu"


def test_prompts_are_expanded_and_completions_are_not(monkeypatch):
    """Whole, in parts and after a preemption; in several rounds; beyond the limit in latent space; and what a request
    wrote is not what another one reads."""
    model = tiny_latent_model(layers=1)
    plain = Engine(model, page_size=4)
    asked = prompts(9, 12, 5)
    wanted = plain.generate(asked, max_tokens=8, temperature=0.0)
    shapes = set()
    for limit, tokens, pages in ((32768, 10, 8), (16, 64, 40), (8, 7, 40)):
        monkeypatch.setattr(prompt_rows, "LIMIT", limit)
        monkeypatch.setattr(prompt_rows, "LEAST", 16)
        queued = Engine(model, page_size=4, policy=Chunked(tokens), cache_bytes=pages * page_bytes(model, 4))
        queued.runner = OverlapLoop(queued)
        same(queued.generate(asked, max_tokens=8, temperature=0.0), wanted)
        shapes |= set(queued.runner.steps.graphs)
        assert pages > 8 or queued.scheduler.preemptions > 0
        assert queued.page_pool.in_use == 0
        longer = asked[2] + wanted[2].tokens
        (again,) = queued.generate([longer], max_tokens=1, temperature=0.0)
        assert 0 < again.cached_tokens <= 5
        same([again], plain.generate([longer], max_tokens=1, temperature=0.0))
    assert {shape.rounds for shape in shapes} >= {0, 1, 2}
    assert any(shape.rounds and shape.tiles for shape in shapes) and any(not shape.tiles for shape in shapes)
    model.mode = "invariant"
    queued, _ = engines(model, page_size=4)
    assert not queued.runner.steps.tiling.prompt_rows and not queued.page_pool.prompts_only


def test_draft_tokens_are_verified_in_graphs(model):
    """Right ones and wrong ones, beside a prompt that is being read, greedy, drawn and chosen by the host."""
    drafter = DraftRouter.over(Suffix(), always=True)
    queued, plain = Engine(model, page_size=4, policy=Chunked(tokens=8), drafter=drafter), Engine(model)
    queued.runner = OverlapLoop(queued)
    drafter.start(queued)
    forwards, busy = [], []
    real = queued.runner.forward

    def forward(shares):
        forwards.append(len(shares))
        before, made = queued.counts.busy_seconds, real(shares)
        busy.append(made.seconds > 0 and queued.counts.busy_seconds - before == pytest.approx(made.seconds))
        return made

    queued.runner.forward = forward
    asked = prompts(3, 9)
    for options in (
        {"temperature": 0.0},
        {"temperature": 0.4, "seed": 4},
        {"temperature": 0.4, "top_k": 2, "seed": 4},
    ):
        wanted = plain.generate(asked, max_tokens=5, **options)
        same(queued.generate(asked, max_tokens=5, **options), wanted)
    same(queued.generate(asked, max_tokens=5, **options), wanted)  # all of it was seen before
    assert queued.counts.accepted_tokens >= 6 and len(forwards) == queued.counts.steps
    assert all(busy)  # also of prompts read in part: who sees nothing done waits before the next step
    assert queued.page_pool.in_use == 0 and not queued.scheduler.requests


def test_steps_are_queued_while_the_drafter_rests(model):
    class Tired(DraftRouter):
        turns = 0

        def rests(self, requests):
            self.turns += 1
            return self.turns % 7 > 2

        def rested(self, requests, seconds):
            rests.append(requests)

    rests = []
    drafter = Tired(always=True)
    drafter.drafters = (Suffix(),)
    queued, plain = Engine(model, page_size=4, drafter=drafter), Engine(model)
    queued.runner = OverlapLoop(queued)
    drafter.start(queued)
    asked = prompts(3, 5)
    wanted = plain.generate(asked, max_tokens=16, temperature=0.0)
    same(queued.generate(asked, max_tokens=16, temperature=0.0), wanted)
    assert rests.count(2) >= 2 and queued.counts.accepted_tokens > 0
    assert queued.counts.generated_tokens == 32 and queued.page_pool.in_use == 0


def test_the_host_learns_of_a_token_one_step_late(model):
    queued, _ = engines(model, page_size=4)
    request = queued.request(prompts(5)[0], Sampling(max_tokens=4, temperature=0.0))
    queued.add(request)
    seen = [[len(output.tokens) for output in queued.step()] for _ in range(5)]
    assert seen == [[], [1], [1], [1], [1]], "a step is queued before the one before it is read"
    assert request.finish_reason == "length" and not queued.scheduler.requests


def test_an_answer_ends_at_a_token_and_the_step_queued_meanwhile_counts_for_nothing(model):
    queued, plain = engines(model, page_size=4)
    asked = prompts(6, 4)
    words = plain.generate(asked, max_tokens=9, temperature=0.0)[0].tokens
    options = {"max_tokens": 9, "temperature": 0.0, "stop_tokens": frozenset([words[3]])}
    same(*(engine.generate(asked, **options) for engine in (queued, plain)))
    (again,) = queued.generate(asked[:1], **options)
    assert again.tokens == words[: words.index(words[3]) + 1]


def test_little_memory_and_many_requests(model):
    """Requests lose their pages while a step of theirs is under way, and write the same."""
    options = {"page_size": 4, "max_requests": 3, "cache_bytes": 8 * page_bytes(model, 4)}
    queued, plain = engines(model, **options, policy=Chunked(tokens=10))
    asked = prompts(9, 12, 5)
    wanted = [plain.generate([prompt], max_tokens=8, temperature=0.0)[0] for prompt in asked]
    same(queued.generate(asked, max_tokens=8, temperature=0.0), wanted)
    assert queued.scheduler.preemptions > 0
    assert queued.page_pool.in_use == 0


def test_prompts_read_at_once_that_begin_alike(model):
    """Their first pages become one page, and the device knows before the others are given away."""
    queued, plain = engines(model, page_size=4)
    (common,) = prompts(4)
    asked = [common + tail for tail in prompts(3, 3, 1, seed=2)]
    params = {"max_tokens": 7, "temperature": 0.0, "record_routes": True, "ignore_eos": True}
    given, wanted = (engine.generate(asked, **params) for engine in (queued, plain))
    same(given, wanted)
    for one, other in zip(given, wanted, strict=True):
        found, expected = ([entry.logprob for entry in answer.logprobs] for answer in (one, other))
        assert found == pytest.approx(expected, abs=1e-5)


def test_sampling_params_the_device_does_not_implement(model):
    queued, plain = engines(model, page_size=4, seed=1)
    asked = prompts(5, 8)
    for options in (
        {"temperature": 0.9, "top_p": 0.8, "seed": 4},
        {"temperature": 0.0, "repetition_penalty": 1.3},
        {"temperature": 0.0, "presence_penalty": 1.5, "frequency_penalty": 0.5},
        {"temperature": 0.0, "logprobs": 3, "prompt_logprobs": 2},
    ):
        given, wanted = (engine.generate(asked, max_tokens=5, **options) for engine in (queued, plain))
        same(given, wanted)
        assert [len(entry.top) for entry in given[0].logprobs] == [options.get("logprobs", 0)] * 5
    for one, other in zip(given, wanted, strict=True):
        found, expected = ([entry.logprob for entry in x.prompt_logprobs[1:]] for x in (one, other))
        assert found == pytest.approx(expected, abs=1e-4)


def test_given_tokens_and_ranks_are_reported_by_the_host(model):
    queued, plain = engines(model, page_size=4, seed=1)
    options = {"temperature": 0.0, "logprobs": 0, "logprob_tokens": (7, 3), "prompt_logprobs": 0}
    given, wanted = (engine.generate(prompts(5, 8), max_tokens=3, **options) for engine in (queued, plain))
    same(given, wanted)
    for one, other in zip(given, wanted, strict=True):
        assert [[token for token, _ in entry.top] for entry in one.logprobs] == [[7, 3]] * 3
        assert [entry.rank for entry in one.prompt_logprobs[1:]] == [entry.rank for entry in other.prompt_logprobs[1:]]


def test_sampling_on_the_device_and_on_the_host_side_by_side(model):
    queued, plain = engines(model, page_size=4)
    params = [Sampling(max_tokens=6, temperature=0.0), Sampling(max_tokens=6, top_k=5, seed=3)]
    texts = []
    for engine in (queued, plain):
        requests = [engine.request(prompt, param) for prompt, param in zip(prompts(7, 7), params, strict=True)]
        serve_all(engine, requests)
        texts.append([request.tokens for request in requests])
    assert texts[0] == texts[1]


def test_routes_counts_and_embeddings(model):
    queued, plain = engines(model, page_size=4, policy=Chunked(tokens=8))
    asked = prompts(11, 3)
    given, wanted = (
        engine.generate(asked, max_tokens=4, temperature=0.0, record_routes=True) for engine in (queued, plain)
    )
    for one, other in zip(given, wanted, strict=True):
        assert one.routes.keys() == other.routes.keys()
        for layer, routes in one.routes.items():
            assert torch.equal(routes.sort(-1).values, other.routes[layer].long().sort(-1).values)
    assert queued.experts.by_layer() == plain.experts.by_layer()
    hidden = []
    for engine in (queued, plain):
        request = engine.request(asked[0], embed=True)
        engine.add(request)
        while engine.working:
            engine.step()
        assert request.finish_reason == "stop"
        hidden.append(request.hidden_D)
    torch.testing.assert_close(*hidden, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("attention, temperature", [("grouped", 1.0), ("grouped", 0.7), ("latent", 0.7)])
def test_the_trainer_finds_the_bits_that_were_recorded(model, attention, temperature):
    if attention == "latent":
        model = tiny_latent_model(q_rank=24)
        model.mode = "invariant"  # in which prompts are read as completions are written
    queued, _ = engines(model, page_size=4, policy=Chunked(tokens=8))
    params = {"max_tokens": 5, "temperature": temperature, "record_draws": True, "ignore_eos": True}
    answers = queued.generate(asked := prompts(11, 3, 6), **params, seed=3)
    slots = queued.runner.slots.by_number.values()
    assert slots and all(slot.on_device for slot in slots), "all were sampled on the device"
    whole = [prompt + answer.tokens for prompt, answer in zip(asked, answers, strict=True)]
    with torch.enable_grad():
        tokens_T = torch.tensor([token for tokens in whole for token in tokens])
        hidden_TD = model(tokens_T, Layout([len(tokens) for tokens in whole]), ops=cuda_invariant)
        assert hidden_TD.requires_grad
    logits_TV = cuda_invariant.linear(hidden_TD.detach(), model.output.detach())
    found_T = logprobs_of(logits_TV, tokens_T.roll(-1), temperature)
    start = 0
    for prompt, answer in zip(asked, answers, strict=True):
        row = start + len(prompt) - 1
        assert found_T[row : row + 5].tolist() == [entry.drawn for entry in answer.logprobs]
        start += len(prompt) + 5


def test_new_weights_abort_and_pause_in_the_middle(model):
    queued, plain = engines(model, page_size=4)
    asked = prompts(6, 9)
    requests = [queued.request(prompt, Sampling(max_tokens=8, temperature=0.0)) for prompt in asked]
    for request in requests:
        queued.add(request)
    queued.step(), queued.step(), queued.step()
    queued.weights_changed(recompute=True)  # the same weights, in the same place
    queued.step()
    queued.abort(requests[0])
    queued.pause()
    queued.step()
    assert queued.step() == [] and len(requests[1].tokens) < 17
    queued.resume()
    while queued.working:
        queued.step()
    (wanted,) = plain.generate(asked[1:], max_tokens=8, temperature=0.0)
    assert requests[1].tokens[9:] == wanted.tokens
    assert requests[0].finish_reason == "abort" and queued.page_pool.in_use == 0
    assert set(requests[1].versions) == {0, 1}
