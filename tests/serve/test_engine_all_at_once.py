"""Speculation, LoRA neighbours, preemption and shared prefixes in one run: 200 requests get what they get alone."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from moesaic.model.transformer import Model
from moesaic.serve.core.drafters.router import DraftRouter
from moesaic.serve.core.drafters.suffix import Suffix
from moesaic.serve.core.engine import Engine
from moesaic.serve.core.request import Request, Sampling
from moesaic.serve.core.scheduling_policies.chunked import Chunked
from moesaic.serve.core.scheduling_policies.flow import FlowPrefill
from tests.serve.tiny import VOCABULARY, LayerClock, page_bytes, tiny_model

REQUESTS = 200
ADAPTERS = (None, "one", "two")


@dataclass(frozen=True)
class Asked:
    prompt: list[int]
    sampling: Sampling
    adapter: str | None
    salt: str


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny_model()


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """As `peft` writes them, for queries and values of both layers."""
    made = {}
    for seed, name in enumerate(ADAPTERS[1:]):
        assert name is not None
        path = tmp_path_factory.mktemp(name)
        generator = torch.Generator().manual_seed(seed)
        settings = {
            "peft_type": "LORA",
            "r": 2,
            "lora_alpha": 4,
            "target_modules": ["q_proj", "v_proj"],
            "bias": "none",
        }
        (path / "adapter_config.json").write_text(json.dumps(settings))
        tensors = {}
        for layer in range(2):
            for part, outputs in (("q_proj", 32), ("v_proj", 16)):
                module = f"base_model.model.model.layers.{layer}.self_attn.{part}"
                tensors[f"{module}.lora_A.weight"] = torch.randn(2, 32, generator=generator)
                tensors[f"{module}.lora_B.weight"] = torch.randn(outputs, 2, generator=generator)
        save_file(tensors, path / "adapter_model.safetensors")
        made[name] = path
    return made


@pytest.fixture(scope="module")
def crowd() -> list[Asked]:
    """Prompts with beginnings in common, many of which repeat themselves, so that there is something to guess."""
    rng = random.Random(3)
    starts = [[rng.randrange(VOCABULARY) for _ in range(24)] for _ in range(4)]
    asked = []
    for number in range(REQUESTS):
        own = [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 8))]
        prompt = rng.choice(starts)[: rng.randint(4, 24)] + own * rng.choice([1, 3])
        sampling = Sampling(
            max_tokens=rng.randint(2, 20), temperature=float(number % 4 == 3), seed=rng.getrandbits(40), ignore_eos=True
        )
        asked.append(Asked(prompt, sampling, ADAPTERS[number % 3], rng.choice(["", "", "other"])))
    return asked


def new_engine(model: Model, adapters: dict[str, Path], **options) -> Engine:
    engine = Engine(model, **options)
    for name, path in adapters.items():
        engine.load_adapter(name, path)
    return engine


@pytest.fixture(scope="module")
def alone(model, adapters, crowd) -> list[list[int]]:
    engine = new_engine(model, adapters, reuse_prefixes=False)
    answers = []
    for asked in crowd:
        request = engine.request(asked.prompt, asked.sampling, adapter=asked.adapter)
        engine.add(request)
        while request.finish_reason is None:
            engine.step()
        answers.append(request.tokens[len(asked.prompt) :])
    return answers


def test_the_adapters_say_different_things(model, adapters, crowd):
    engine = new_engine(model, adapters)
    said = [engine.generate([crowd[0].prompt], adapter=name, max_tokens=8, temperature=0.0) for name in ADAPTERS]
    assert len({tuple(answer[0].tokens) for answer in said}) == 3


@pytest.mark.parametrize("policy", ["chunked", "flow"])
def test_all_at_once(model, adapters, crowd, alone, policy):
    clock = LayerClock(model, base=2e-4, per_token=1e-5)
    engine = new_engine(
        model,
        adapters,
        clock=clock,
        policy=Chunked(tokens=48) if policy == "chunked" else FlowPrefill(itl=0.002, batch=48),
        drafter=DraftRouter.over(Suffix(), always=True),
        page_size=8,
        cache_bytes=40 * page_bytes(model, 8),
        max_requests=24,
    )
    rng = random.Random(1)
    requests: list[Request] = []
    mixed = 0
    for asked in crowd:
        wishes = dict(adapter=asked.adapter, salt=asked.salt, priority=rng.choice([0, 0, 1]))
        requests.append(engine.request(asked.prompt, asked.sampling, **wishes))
    coming = list(requests)
    while coming or engine.working:
        for _ in range(rng.randint(0, 3)):
            if coming:
                engine.submit(coming.pop(0))
        outputs = engine.step()
        mixed += len({output.request.adapter for output in outputs}) > 1
        assert 0 <= engine.page_pool.available <= engine.cache.pages
    clock.remove()
    for number, (asked, request, expected) in enumerate(zip(crowd, requests, alone, strict=True)):
        assert request.tokens[len(asked.prompt) :] == expected, f"request {number}"
    # All of it has happened.
    assert engine.counts.accepted_tokens > REQUESTS / 4
    assert engine.scheduler.preemptions > 0
    assert engine.page_pool.hits > REQUESTS
    assert mixed > 10
    assert engine.page_pool.in_use == 0 and not engine.scheduler.requests
