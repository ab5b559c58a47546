"""Chains of drafters: a draft model verifies what those before it drafted, and the answer stays the model's own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from moesaic.methods import Method, build
from moesaic.model.directory import save
from moesaic.model.transformer import Model
from moesaic.serve.core.drafters import Drafter
from moesaic.serve.core.drafters.model import DraftModel
from moesaic.serve.core.drafters.router import DraftRouter
from moesaic.serve.core.drafters.suffix import Suffix
from moesaic.serve.core.engine import Engine
from tests.serve.test_drafters import chi_square
from tests.serve.tiny import LayerClock, page_bytes, tiny_model

# Seconds of a layer: the smaller a draft model, the cheaper, and the less it agrees with the model.
MODEL, MIDDLE, SMALL = 0.1, 0.02, 0.001
NOISE = {"middle": 0.02, "small": 0.1}


@pytest.fixture(scope="module")
def family(tmp_path_factory: Any) -> tuple[Model, dict[str, Path]]:
    """A model, and the directories of one that resembles it and of one that resembles that."""
    model, other, paths = tiny_model(), tiny_model(), {}
    for number, (name, noise) in enumerate(NOISE.items()):
        generator = torch.Generator().manual_seed(number)
        with torch.no_grad():
            for weight in other.parameters():
                if weight.dim() > 1:
                    weight += noise * weight.std() * torch.randn(weight.shape, generator=generator)
        paths[name] = tmp_path_factory.mktemp(name) / name
        save(other, paths[name])
    return model, paths


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 97, (6 + number,), generator=generator).tolist() for number in range(count)]


def engine_with(model: Model, drafters: Sequence[Drafter], linked: bool = True, **options: Any) -> Engine:
    """With `linked` False, the same drafters without chains."""
    always = options.pop("always", False)
    engine = Engine(model, drafter=DraftRouter.over(*drafters, always=always) if drafters else None, **options)
    if not linked:
        for drafter in drafters:
            if isinstance(drafter, DraftModel):
                drafter.below = None
    return engine


@pytest.mark.parametrize("temperature", [0.0, 1.2])
@pytest.mark.parametrize("always", [True, False])
def test_a_chain_changes_no_token(family, temperature, always):
    """While the cache is so small that requests lose their pages, and draft models their shadows."""
    model, paths = family
    wishes = {"max_tokens": 20, "temperature": temperature, "seed": 3, "ignore_eos": True}
    plain = Engine(model, reuse_prefixes=False).generate(prompts(4), **wishes)
    middle = DraftModel(str(paths["middle"]), length=6, cache_bytes=16 * page_bytes(model, 4))
    drafters = [Suffix(), DraftModel(str(paths["small"]), length=4), middle]
    engine = engine_with(model, drafters, page_size=4, cache_bytes=16 * page_bytes(model, 4), always=always)
    for _ in range(2):  # the second time, suffix trees know the answers
        answers = engine.generate(prompts(4), **wishes)
        assert [answer.tokens for answer in answers] == [answer.tokens for answer in plain]
    assert engine.page_pool.in_use == 0 and middle.page_pool.in_use == 0
    assert middle.below is not None and [one.label for one in middle.below.drafters] == ["suffix", "model small"]
    if always:
        assert sum(middle.below.accepted.values()) > 0 and engine.counts.accepted_tokens > 0
        assert not any(candidate.acceptance.request for candidate in middle.below.candidates)


def test_draws_of_a_chain_follow_the_softmax(family):
    model, paths = family
    prompt, temperature = [5, 6, 7, 8, 5, 6], 0.6
    drafters = [Suffix(), DraftModel(str(paths["small"]), length=2), DraftModel(str(paths["middle"]), length=2)]
    engine = engine_with(model, drafters, always=True)
    wishes = {"max_tokens": 3, "temperature": temperature, "ignore_eos": True}
    answers = [answer for seed in range(10) for answer in engine.generate([prompt], n=60, seed=seed, **wishes)]
    assert engine.counts.accepted_tokens > len(answers) / 10
    first = torch.tensor([answer.tokens[0] for answer in answers])
    likeliest = int(first.mode().values)
    after = torch.tensor([answer.tokens[1] for answer in answers if answer.tokens[0] == likeliest])
    assert chi_square(after, model.logits([[*prompt, likeliest]])[0][-1] / temperature) > 1e-3


def timed(
    family: tuple[Model, dict[str, Path]], kinds: Sequence[str], linked: bool = True
) -> tuple[float, Engine, list[list[int]]]:
    """Virtual seconds in which three answers come, one after the other, each model's layers costing what they cost."""
    model, paths = family
    drafters = [Suffix() if kind == "suffix" else DraftModel(str(paths[kind]), length=8) for kind in kinds]
    clock = LayerClock(model, base=MODEL, per_token=MODEL / 200)
    engine = engine_with(model, drafters, linked, clock=clock)
    for kind, drafter in zip(kinds, drafters):
        if isinstance(drafter, DraftModel):
            seconds = {"small": SMALL, "middle": MIDDLE}[kind]
            for layer in drafter.model.layers:
                layer.register_forward_hook(
                    lambda layer, given, out, each=seconds: clock.advance(each * (1 + len(given[0]) / 200))
                )
    tokens = [engine.generate([prompt], max_tokens=150, temperature=0.0, ignore_eos=True) for prompt in prompts(2)]
    for hook in clock.hooks:
        hook.remove()
    return clock.now, engine, [one[0].tokens for one in tokens]


def test_a_chain_beats_its_links(family):
    """Of a model, one that agrees often and one that is cheap: the middle one verifying the small one's drafts takes
    less time than either alone, than both side by side, and than none."""
    chain, engine, answers = timed(family, ["small", "middle"])
    others = [timed(family, kinds) for kinds in [(), ("small",), ("middle",)]]
    others.append(timed(family, ["small", "middle"], linked=False))
    assert all(said == answers for _, _, said in others)
    assert chain < 0.95 * min(seconds for seconds, _, _ in others)
    assert engine.drafter.drafters[1].below.accepted["model small"] > 50


def test_named_on_the_command_line(family):
    model, paths = family
    router = build(Method("router", {"draft_model": [str(paths["small"]), str(paths["middle"])]}), Drafter, "test")
    Engine(model, drafter=router)
    assert [one.label for one in router.drafters] == ["suffix", "model small", "model middle"]
    small, middle = router.drafters[1:]
    assert small.below.drafters == router.drafters[:1] and middle.below.drafters == router.drafters[:2]
