"""The engine on a real GPU, steps overlapped as CUDA graphs: the same bits alone and in a batch, and transformers' own.

pytest tests/gpu/test_gpu_engine.py
"""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no CUDA device: these tests run on a GPU", allow_module_level=True)

import transformers

import moesaic
from moesaic.kernels.triton.attention import prompt_rows
from moesaic.serve.core.drafters.router import DraftRouter
from moesaic.serve.core.drafters.suffix import Suffix
from moesaic.serve.core.engine import Engine
from moesaic.serve.core.forward_pass import Runner
from moesaic.serve.core.request import Sampling
from moesaic.serve.core.scheduling_policies.chunked import Chunked
from moesaic.serve.gpu.overlap import OverlapLoop
from tests.gpu.models import CONFIGS, error, tokens_of

DEVICE = "cuda"
pytestmark = pytest.mark.usefixtures("exact_float32")


@pytest.fixture(scope="module")
def model(directories):
    return moesaic.load(directories["qwen3_moe"], dtype=torch.bfloat16, device=DEVICE)


def engine_of(model, **options):
    engine = Engine(model, **{"cache_bytes": 1 << 26, **options})
    assert isinstance(engine.runner, OverlapLoop), "steps overlap"
    return engine


def tokens_and_bits(answers):
    """Tokens, and log-probabilities to the bit."""
    return [(answer.tokens, [entry.logprob for entry in answer.logprobs]) for answer in answers]


@pytest.mark.parametrize("name", CONFIGS)
def test_the_first_requests_capture_nothing_after_a_warm_up(directories, name):
    model = moesaic.load(directories[name], dtype=torch.bfloat16, device=DEVICE)
    options = {"max_requests": 8, "policy": Chunked(tokens=300)}
    warm, cold = engine_of(model, **options), engine_of(model, **options)
    warm.warm_up()
    ready = set(warm.runner.steps.graphs)
    prompts = tokens_of(5, 100, 33, *(17 + 13 * i for i in range(12)))
    found, wanted = (engine.generate(prompts, max_tokens=20, temperature=0.0) for engine in (warm, cold))
    assert tokens_and_bits(found) == tokens_and_bits(wanted)
    if not warm.runner.steps.tiling.prompt_rows:  # else a prompt that is read in parts may be new
        assert set(warm.runner.steps.graphs) == ready


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_text_is_that_of_transformers(directories, name):
    prompts = tokens_of(12, 150, 31)
    exact = moesaic.load(directories[name], dtype=torch.float32, device=DEVICE)
    engine = engine_of(exact)
    together = engine.generate(prompts, max_tokens=30, temperature=0.0)
    assert engine.runner.steps.graphs, "and run as graphs"
    wide = transformers.AutoModelForCausalLM.from_pretrained(directories[name], dtype=torch.float32).to(DEVICE).eval()
    for prompt, answer in zip(prompts, together, strict=True):
        given = torch.tensor([prompt], device=DEVICE)
        wanted = wide.generate(given, max_new_tokens=30, do_sample=False, eos_token_id=None, pad_token_id=0)
        assert answer.tokens == wanted[0, len(prompt) :].tolist()
        (whole,) = exact.logprobs([prompt + answer.tokens])
        apart = whole[len(prompt) - 1 :].cpu() - torch.tensor([entry.logprob for entry in answer.logprobs])
        assert apart.abs().max() < 1e-3


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"temperature": 0.9, "seed": 3}], ids=["greedy", "drawn"])
@pytest.mark.parametrize("name", CONFIGS)
def test_the_same_bits_alone_and_in_a_batch(directories, name, options):
    """Read whole or in parts, with much memory or so little that requests lose their pages, beside others or not."""
    model = moesaic.load(directories[name], dtype=torch.bfloat16, device=DEVICE)
    prompts = tokens_of(5, 260, 33, *(17 + 13 * i for i in range(30)))
    batch = engine_of(model).generate(prompts, max_tokens=40, **options)
    chosen = [0, 1, 2, 20]
    alone = [engine_of(model).generate([prompts[i]], max_tokens=40, **options)[0] for i in chosen]
    assert tokens_and_bits(alone) == tokens_and_bits([batch[i] for i in chosen])
    page = sum(slab[0].nbytes for layer in model.new_cache(1, 16).layers for slab in layer.values())
    small = engine_of(model, cache_bytes=60 * page, policy=Chunked(tokens=100), max_requests=12)
    assert tokens_and_bits(small.generate(prompts, max_tokens=40, **options)) == tokens_and_bits(batch)
    assert small.scheduler.preemptions > 0 and small.page_pool.in_use == 0


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"temperature": 0.6, "seed": 3}], ids=["greedy", "drawn"])
@pytest.mark.parametrize("name", CONFIGS)
def test_draft_tokens_change_no_bit(directories, name, options):
    """Checked in graphs, right ones and wrong ones; and through the router, which rests and is asked by turns."""
    model = moesaic.load(directories[name], dtype=torch.bfloat16, device=DEVICE)
    prompts = tokens_of(40, 9, 130)
    wanted = tokens_and_bits(engine_of(model).generate(prompts, max_tokens=60, **options))
    always = engine_of(model, drafter=DraftRouter.over(Suffix(), always=True))
    routed = engine_of(model, drafter=Suffix())
    for engine in (always, routed, always, routed):
        assert tokens_and_bits(engine.generate(prompts, max_tokens=60, **options)) == wanted
    assert always.counts.accepted_tokens > 120 and always.counts.drafted_tokens > always.counts.accepted_tokens


@pytest.mark.parametrize("name", CONFIGS)
def test_a_cache_of_eight_bits(directories, name):
    """Twice the tokens in the same memory; the same bits alone, in a batch, prefilled in chunks and with draft tokens;
    kernels that write the cache round as plain blocks do."""
    model = moesaic.load(directories[name], dtype=torch.bfloat16, device=DEVICE)
    prompts, options = tokens_of(5, 260, 33, 130), {"max_tokens": 40, "temperature": 0.0}
    float8 = {"cache_dtype": "float8", "cache_bytes": 1 << 22}
    batch = engine_of(model, **float8)
    assert batch.cache.pages // 2 == engine_of(model, cache_bytes=1 << 22).cache.pages
    wanted = batch.generate(prompts, **options)
    alone = [engine_of(model, **float8).generate([prompt], **options)[0] for prompt in prompts]
    in_parts = engine_of(model, policy=Chunked(tokens=100), drafter=DraftRouter.over(Suffix(), always=True), **float8)
    assert tokens_and_bits(alone) == tokens_and_bits(wanted) == tokens_and_bits(in_parts.generate(prompts, **options))
    plain = engine_of(model, **float8)
    plain.runner = Runner(plain)
    first = engine_of(model, **float8)
    for engine in (plain, first):
        engine.generate(prompts[1:2], max_tokens=1, temperature=0.0)
    for slab in first.cache.layers[0]:
        found, expected = (engine.cache.layers[0][slab].flatten(0, 1)[:260].float() for engine in (first, plain))
        assert found.isfinite().all() and expected.abs().max() > 0.5
        assert (found != expected).float().mean() < 0.01 and error(found, expected) < 0.01
    exact = engine_of(model).generate(prompts, **options)
    apart = [abs(one.logprobs[0].logprob - other.logprobs[0].logprob) for one, other in zip(wanted, exact, strict=True)]
    assert 0 < max(apart) < (2.0 if name == "glm_moe_dsa" else 0.5)  # rounded keys choose other tokens


@pytest.mark.parametrize("name", CONFIGS)
def test_the_same_bits_whatever_was_read_before(directories, name):
    """A prompt that holds what another request wrote, in an engine that wrote it and in one that did not."""
    model = moesaic.load(directories[name], dtype=torch.bfloat16, device=DEVICE)
    options = {"max_tokens": 30, "temperature": 0.0}
    engine = engine_of(model)
    (first,) = engine.generate(tokens_of(100), **options)
    (tail,) = tokens_of(45, seed=5)
    longer = [tokens_of(100)[0] + first.tokens + tail]
    (again,) = engine.generate(longer, **options)
    assert again.cached_tokens >= 96
    assert tokens_and_bits([again]) == tokens_and_bits(engine_of(model).generate(longer, **options))


def test_latents_expanded_in_rounds(directories, monkeypatch):
    """As much of a prompt as fits into a round, the rest in latent space; many prompts in many rounds: the same bits
    alone and in a batch, and nearly those of one round."""
    model = moesaic.load(directories["deepseek_v3"], dtype=torch.bfloat16, device=DEVICE)
    prompts, options = tokens_of(500, 900, 70, 700, 333), {"max_tokens": 20, "temperature": 0.0}
    whole = engine_of(model).generate(prompts, **options)
    monkeypatch.setattr(prompt_rows, "LIMIT", 512)
    batch = engine_of(model)
    wanted = batch.generate(prompts, **options)
    assert max(shape.rounds for shape in batch.runner.steps.graphs) == 8  # of which five are used
    alone = [engine_of(model, policy=Chunked(tokens=200)).generate([prompt], **options)[0] for prompt in prompts]
    assert tokens_and_bits(alone) == tokens_and_bits(wanted)
    for number in (0, 2, 4):  # what fits is the same, in one round or in several
        assert tokens_and_bits([wanted[number]]) == tokens_and_bits([whole[number]])
    apart = [abs(one.logprobs[0].logprob - other.logprobs[0].logprob) for one, other in zip(wanted, whole, strict=True)]
    assert 0 < max(apart) < 0.5


def test_requests_that_come_and_go(model):
    prompts = tokens_of(*(20 + 7 * i for i in range(24)))
    wanted = tokens_and_bits(engine_of(model).generate(prompts, max_tokens=30, temperature=0.0))
    engine = engine_of(model, max_requests=10)
    requests = []
    while len(requests) < len(prompts) or engine.working:
        if len(requests) < len(prompts):
            requests.append(engine.request(prompts[len(requests)], Sampling(max_tokens=30, temperature=0.0)))
            engine.submit(requests[-1])
        if len(requests) == 12:
            engine.abort(requests[3])
        engine.step()
    for number, request in enumerate(requests):
        tokens, logprobs = wanted[number]
        if number != 3:
            assert request.tokens[len(request.prompt) :] == tokens and request.finish_reason == "length"
            assert [entry.logprob for entry in request.logprobs] == logprobs
    assert engine.page_pool.in_use == 0


def test_an_answer_ends_at_a_stop_token(model):
    engine = engine_of(model)
    prompts = tokens_of(9, 40)
    free = engine.generate(prompts, max_tokens=30, temperature=0.0)
    end = free[0].tokens[7]
    cut = engine.generate(prompts, max_tokens=30, temperature=0.0, stop_tokens=frozenset([end]))
    for one, other in zip(cut, free, strict=True):
        place = other.tokens.index(end) + 1 if end in other.tokens else 30
        assert one.tokens == other.tokens[:place]


def test_a_prompt_that_was_read_is_not_read_again(model):
    engine = engine_of(model)
    (prompt,) = tokens_of(200)
    first = engine.generate([prompt], max_tokens=20, temperature=0.0)
    read = engine.counts.prompt_tokens
    again = engine.generate([prompt, prompt[:150]], max_tokens=20, temperature=0.0)
    assert tokens_and_bits(again[:1]) == tokens_and_bits(first) and again[0].cached_tokens >= 192
    assert engine.counts.prompt_tokens - read < 30
    fresh = engine_of(model, reuse_prefixes=False).generate([prompt[:150]], max_tokens=20, temperature=0.0)
    assert tokens_and_bits(again[1:]) == tokens_and_bits(fresh)


def test_sampling_params_the_device_does_not_implement(model):
    """Chosen on the host from the same logits, beside requests of the other kind."""
    engine = engine_of(model)
    prompts = tokens_of(30, 60)
    plain = engine.generate(prompts, max_tokens=20, temperature=0.0)
    bounded = engine.generate(prompts, max_tokens=20, temperature=0.7, top_k=1)
    assert [answer.tokens for answer in bounded] == [answer.tokens for answer in plain]
    params = {"presence_penalty": 1.0, "frequency_penalty": 1.0, "repetition_penalty": 1.1, "logit_bias": {3: 100.0}}
    biased = engine.generate(prompts, max_tokens=20, temperature=0.0, **params)
    assert [answer.tokens for answer in biased] == [[3] * 20] * 2
    drawn = engine.generate(prompts, max_tokens=20, temperature=0.8, seed=5)
    by_host = engine.generate(prompts, max_tokens=20, temperature=0.8, seed=5, logprobs=1)
    assert [answer.tokens for answer in by_host] == [answer.tokens for answer in drawn]
    reported = engine.generate(prompts, max_tokens=5, temperature=0.0, logprobs=3, prompt_logprobs=1)
    assert reported[0].tokens == plain[0].tokens[:5] and len(reported[1].prompt_logprobs) == 60
    assert all(entry.top[0][0] == entry.token for entry in reported[0].logprobs)


def test_new_weights_are_read_in_place_or_where_they_are_now(directories):
    model = moesaic.load(directories["mixtral"], dtype=torch.bfloat16, device=DEVICE)
    engine = engine_of(model)
    prompts = tokens_of(30)

    def wanted():
        return tokens_and_bits(engine_of(model).generate(prompts, max_tokens=10, temperature=0.0))

    first = tokens_and_bits(engine.generate(prompts, max_tokens=10, temperature=0.0))
    with torch.no_grad():
        model.layers[0].attention.out.weight.mul_(-1.0)
    engine.weights_changed()
    second = tokens_and_bits(engine.generate(prompts, max_tokens=10, temperature=0.0))
    assert second == wanted() != first
    model.layers[0].attention.out.weight = torch.nn.Parameter(-model.layers[0].attention.out.weight.detach())
    engine.weights_changed()
    assert tokens_and_bits(engine.generate(prompts, max_tokens=10, temperature=0.0)) == wanted() == first
