"""Guesses change how fast an answer comes, never what it says: one matrix over every drafter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import scipy.stats
import torch

import moesaic
from moesaic.errors import UserError
from moesaic.methods import Method, build, classes, known
from moesaic.model.transformer import Model
from moesaic.serve.core.drafters import Drafter
from moesaic.serve.core.drafters.model import DraftModel
from moesaic.serve.core.drafters.mtp import PredictionLayers
from moesaic.serve.core.drafters.router import DraftRouter
from moesaic.serve.core.drafters.suffix import Suffix
from moesaic.serve.core.engine import Engine
from moesaic.serve.core.grammar import Grammar
from moesaic.serve.core.scheduling_policies.chunked import Chunked
from tests.matrix import DRAFTERS, filled
from tests.model.oracle import save
from tests.model.test_mtp import checkpoint
from tests.serve.made import talking_model
from tests.serve.tiny import page_bytes

# One model of each kind of attention; those with a number have so many prediction layers.
KINDS = {
    "glm4_moe": 1,
    "qwen3-window": 0,
    "mixtral-window-tied": 0,
    "deepseek_v3": 2,
    "glm_moe_dsa": 1,
}


# Every drafter, for a model and the directory of a smaller (here: another) one; and the router with its own choice of
# draft lengths.
METHODS = [*DRAFTERS, "router as it is used"]
MAX_DRAFT = 3  # so that drafts of several lengths are rejected within a short text


def drafter_for(method: str, model: Model, other: Path) -> DraftRouter:
    """A router over one drafter, or over all that offer themselves, which drafts whether it pays or not."""
    if method == "router as it is used":
        return DraftRouter(str(other))
    kinds = [kind for kind, name in zip(classes(Drafter), known(Drafter)) if method in (name, "router")]
    drafters = [drafter for kind in kinds for drafter in kind.offered(model, [str(other)])]
    if not drafters and all("offered" not in vars(kind) for kind in kinds):  # the user must name it
        drafters = [build(Method(method, filled(DRAFTERS[method], other=other)), Drafter, "test")]
    if not drafters:
        pytest.skip(f"{method} can do nothing for this model")
    for drafter in drafters:
        if not drafter.instant:
            drafter.length = MAX_DRAFT
    return DraftRouter.over(*drafters, always=True)


@pytest.fixture(scope="module")
def directories(tmp_path_factory: Any) -> dict[str, tuple[Path, Path]]:
    made = {}
    for kind, layers in KINDS.items():
        own = tmp_path_factory.mktemp(kind) / "own"
        if layers:
            checkpoint(kind, layers, own)
        else:
            save(kind, own)
        other = tmp_path_factory.mktemp(kind) / "other"
        save("llama-tied", other, seed=1)
        made[kind] = (own, other)
    return made


@pytest.fixture(scope="module")
def models(directories: dict[str, tuple[Path, Path]]) -> dict[str, Model]:
    return {kind: moesaic.load(own, threads=1) for kind, (own, _) in directories.items()}


PAIRS = [pytest.param(kind, method, id=f"{kind}-{method}") for kind, layers in KINDS.items() for method in METHODS]


def some_prompts(count: int = 4, seed: int = 0) -> list[list[int]]:
    """Some with a beginning in common, and some that repeat themselves."""
    generator = torch.Generator().manual_seed(seed)
    beginning = torch.randint(3, 97, (9,), generator=generator).tolist()
    made = []
    for number in range(count):
        own = torch.randint(3, 97, (3 + number,), generator=generator).tolist()
        made.append(beginning + own if number % 2 else own * 3)
    return made


def test_made_by_name(models, directories):
    own, other = directories["glm4_moe"]
    for name in DRAFTERS:
        options = filled(DRAFTERS[name], other=other)
        drafter = build(Method(name, options), Drafter, "test")
        engine = Engine(models["glm4_moe"], drafter=drafter)
        inside = [type(part).__name__ for part in engine.drafter.drafters]
        if name == "router":  # all that offer themselves, instant ones first
            assert inside[:3] == ["Suffix", "PredictionLayers", "DraftModel"]
        else:
            assert inside == [type(drafter).__name__]
        with pytest.raises(UserError, match="no such option"):
            build(Method(name, {**options, "lenght": 1}), Drafter, "test")


@pytest.mark.parametrize(("kind", "method"), PAIRS)
class TestEveryDrafter:
    def test_same_answers(self, kind, method, models, directories):
        """Together, with pages shared, while the cache is so small that requests lose their places."""
        model, prompts = models[kind], some_prompts()
        wishes = {"max_tokens": 12, "ignore_eos": True, "seed": 7}
        room = 14 * page_bytes(model, 4)
        for temperature in (0.0, 1.3):
            plain = Engine(model, reuse_prefixes=False).generate(prompts, temperature=temperature, **wishes)
            engine = Engine(
                model,
                page_size=4,
                cache_bytes=room,
                policy=Chunked(tokens=16),
                drafter=drafter_for(method, model, directories[kind][1]),
            )
            for _ in range(2 if temperature else 1):  # the second time, most of the prompts are in the cache
                answers = engine.generate(prompts, temperature=temperature, **wishes)
                assert [a.tokens for a in answers] == [a.tokens for a in plain]
                for answer, expected in zip(answers, plain):
                    found = torch.tensor([entry.logprob for entry in answer.logprobs])
                    torch.testing.assert_close(
                        found, torch.tensor([e.logprob for e in expected.logprobs]), rtol=1e-3, atol=1e-3
                    )
            assert engine.scheduler.preemptions > 0
            assert engine.page_pool.in_use == 0
            if engine.drafter.always:
                assert engine.counts.drafted_tokens > 0

    def test_forgets_what_was_aborted(self, kind, method, models, directories):
        engine = Engine(models[kind], page_size=4, drafter=drafter_for(method, models[kind], directories[kind][1]))
        requests = [engine.request(prompt) for prompt in some_prompts()]
        for request in requests:
            engine.add(request)
        for number in range(3):
            engine.step()
            engine.abort(requests[number])
        for _ in range(3):
            engine.step()
        for request in requests:
            engine.abort(request)
        assert engine.page_pool.in_use == 0
        for drafter in engine.drafter.drafters:
            if isinstance(drafter, DraftModel):
                assert drafter.page_pool.in_use == 0
            state = [value for value in vars(drafter).values() if isinstance(value, dict)]  # by the request's number
            assert not any(request.number in kept for request in requests for kept in state)
        assert not any(candidate.acceptance.request for candidate in engine.drafter.candidates)


@pytest.fixture(scope="module")
def talking(tmp_path_factory: Any) -> tuple[Model, Path]:
    path = talking_model(tmp_path_factory.mktemp("talking"))
    return moesaic.load(path, threads=1), path


@pytest.mark.parametrize("method", METHODS)
def test_stop_strings_and_grammars(method, talking):
    model, path = talking
    prompts = ["The number 7 is", "The number 8 is a number; The number 9 is a", 'yes or no {"name": "x"}']
    plain = Engine(model)
    engine = Engine(model, drafter=drafter_for(method, model, path))
    first = [answer.text for answer in plain.generate(prompts, max_tokens=40, temperature=0.0)]
    stops = tuple(text[len(text) // 2 : len(text) // 2 + 3] for text in first)
    schema = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}}, "required": ["name"]}
    for wishes in (
        {"stop": stops, "temperature": 0.0},
        {"stop": stops, "temperature": 1.0, "seed": 5, "repetition_penalty": 1.3, "presence_penalty": 0.5},
        {"grammar": Grammar.json(schema), "temperature": 0.0, "ignore_eos": True},
        {"grammar": Grammar.regex("(ab|cd){4,9}"), "temperature": 1.0, "seed": 2, "top_p": 0.9},
        {"temperature": 0.7, "seed": 3, "min_tokens": 5, "top_k": 9, "min_p": 0.05},
    ):
        expected = plain.generate(prompts, max_tokens=40, **wishes)
        for _ in range(2):
            found = engine.generate(prompts, max_tokens=40, **wishes)
            assert [(a.text, a.tokens, a.finish_reason) for a in found] == [
                (a.text, a.tokens, a.finish_reason) for a in expected
            ]
    if engine.drafter.always:
        assert engine.counts.accepted_tokens > 0


def test_sampled_tokens_follow_the_softmax(models):
    """The second and third token of thousands of answers, guessed at from all the answers before them."""
    model, prompt, temperature = models["mixtral-window-tied"], [5, 6, 7, 8, 5, 6], 0.4
    engine = Engine(model, drafter=DraftRouter.over(Suffix(), always=True))
    wishes = {"max_tokens": 3, "temperature": temperature, "ignore_eos": True}
    answers = [answer for seed in range(50) for answer in engine.generate([prompt], n=60, seed=seed, **wishes)]
    assert engine.counts.accepted_tokens > len(answers) / 10
    first = torch.tensor([answer.tokens[0] for answer in answers])
    assert chi_square(first, model.logits([prompt])[0][-1] / temperature) > 1e-3
    likeliest = int(first.mode().values)
    after = torch.tensor([answer.tokens[1] for answer in answers if answer.tokens[0] == likeliest])
    assert chi_square(after, model.logits([[*prompt, likeliest]])[0][-1] / temperature) > 1e-3
    pair = (likeliest, int(after.mode().values))
    third = torch.tensor([answer.tokens[2] for answer in answers if tuple(answer.tokens[:2]) == pair])
    assert chi_square(third, model.logits([[*prompt, *pair]])[0][-1] / temperature) > 1e-3


def chi_square(tokens: torch.Tensor, logits_V: torch.Tensor) -> float:
    """How likely so large a deviation from the distribution is by chance; rare tokens count as one."""
    expected = logits_V.double().softmax(-1) * len(tokens)
    found = torch.bincount(tokens, minlength=len(logits_V)).double()
    common = expected >= 5
    assert common.sum() >= 3
    pairs = [(float(f), float(e)) for f, e in zip(found[common], expected[common])]
    pairs.append((float(found[~common].sum()), float(expected[~common].sum())))
    return float(scipy.stats.chisquare(*zip(*pairs)).pvalue)


def test_a_model_foresees_itself(talking):
    """A draft model that is the model makes no wrong guess, sampled or not: it draws the same random numbers."""
    model, path = talking
    for wishes in ({"temperature": 0.0}, {"temperature": 1.2, "seed": 4, "top_p": 0.95}, {"frequency_penalty": 1.0}):
        engine = Engine(model, drafter=DraftRouter.over(DraftModel(str(path), length=5), always=True))
        engine.generate(["The number 7", "as you like"], max_tokens=31, ignore_eos=True, **wishes)
        # One token from the prompt, then six a pass.
        assert engine.counts.accepted_tokens == engine.counts.drafted_tokens == 2 * 25
        assert engine.counts.steps == 6


def test_a_draft_model_of_another_tokenizer_is_refused(models, talking, directories):
    with pytest.raises(UserError, match="another tokenizer"):
        Engine(models["glm4_moe"], drafter=DraftModel(str(talking[1])))


def test_prediction_layers_must_be_there(models):
    with pytest.raises(UserError, match="no prediction layers"):
        Engine(models["qwen3-window"], drafter=PredictionLayers())
