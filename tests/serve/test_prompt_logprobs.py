"""Log-probabilities of prompts: right to the rank, and computed so that others hardly wait for them. Work is counted in
steps and rows, not in seconds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import moesaic
from moesaic.model.transformer import Model
from moesaic.serve.core import prompt_logprobs
from moesaic.serve.core.engine import Engine
from moesaic.serve.core.forward_pass import ForwardPass
from moesaic.serve.core.prompt_logprobs import scored_budget
from moesaic.serve.core.request import Request, Sampling
from moesaic.serve.core.scheduling_policies import SchedulingPolicy
from moesaic.serve.core.scheduling_policies.chunked import Chunked
from moesaic.serve.core.scheduling_policies.flow import FlowPrefill
from tests.serve.made import talking_model
from tests.serve.tiny import VOCABULARY, tiny_model

TOKENS = 128  # of a step


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny_model(context=1024)


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[int, int]]]:
    """Of every forward: how many rows each request had."""
    found: list[dict[int, int]] = []
    begin = ForwardPass.__init__

    def counted(self: ForwardPass, model: Model, chunks: list, *rest: object) -> None:  # type: ignore[type-arg]
        found.append({chunk.request.number: chunk.tokens for chunk in chunks})
        begin(self, model, chunks, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(ForwardPass, "__init__", counted)
    yield found


def words(count: int, seed: int) -> list[int]:
    return torch.randint(VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def new_engine(model: Model, policy: SchedulingPolicy | None = None) -> Engine:
    return moesaic.Engine(model, cache_bytes=4 << 20, policy=policy or Chunked(tokens=TOKENS), seed=0)


def scoring(engine: Engine, count: int = 400, seed: int = 0) -> Request:
    return engine.request(words(count, seed), Sampling(max_tokens=1, temperature=0.0, prompt_logprobs=3))


def small(engine: Engine) -> Request:
    return engine.request(words(6, 99), Sampling(max_tokens=8, temperature=0.0, ignore_eos=True))


def steps_until_done(engine: Engine, request: Request) -> int:
    count = 0
    while request.finish_reason is None:
        engine.step()
        count += 1
    return count


def finish(engine: Engine) -> None:
    while engine.working:
        engine.step()


def test_logprobs_and_ranks_are_those_of_the_whole_distribution(model: Model) -> None:
    engine = new_engine(model)
    request = scoring(engine, 150)
    engine.add(request)
    finish(engine)
    (logits_TV,) = model.logits([list(request.prompt)])
    log_TV = logits_TV.log_softmax(-1)
    order_TV = log_TV.argsort(-1, descending=True)
    assert request.prompt_logprobs[0] is None and len(request.prompt_logprobs) == 150
    ranks = set()
    for place, found in enumerate(request.prompt_logprobs[1:]):
        assert found is not None and found.token == request.prompt[place + 1]
        assert found.logprob == pytest.approx(float(log_TV[place, found.token]), abs=1e-5)
        assert [token for token, _ in found.top] == order_TV[place, :3].tolist()
        assert found.rank == int((order_TV[place] == found.token).nonzero()) + 1
        ranks.add(found.rank)
    assert max(ranks) > 3  # ranks beyond the reported ones were among them


def test_slices_of_logits_change_nothing(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for logits in (prompt_logprobs.SLICE, 3 * VOCABULARY, 1):
        monkeypatch.setattr(prompt_logprobs, "SLICE", logits)
        engine = new_engine(model)
        request = scoring(engine, 60)
        engine.add(request)
        finish(engine)
        found.append(request.prompt_logprobs)
    for other in found[1:]:
        for one, two in zip(found[0][1:], other[1:], strict=True):
            assert one.token == two.token and one.rank == two.rank
            assert one.logprob == pytest.approx(two.logprob, abs=1e-5)


def test_alone_it_takes_short_steps(model: Model, rows: list[dict[int, int]]) -> None:
    engine = new_engine(model)
    request = scoring(engine)
    engine.add(request)
    finish(engine)
    budget = scored_budget(TOKENS, beside_others=False)
    assert max(sum(step.values()) for step in rows) == budget
    assert len(rows) == -(-400 // budget)


@pytest.mark.parametrize("policy", [Chunked(tokens=TOKENS), FlowPrefill(tokens=TOKENS, itl=0.0)])
def test_a_small_request_takes_the_steps_it_takes_alone(
    model: Model, rows: list[dict[int, int]], policy: SchedulingPolicy
) -> None:
    engine = new_engine(model, policy)
    request = small(engine)
    engine.add(request)
    alone = steps_until_done(engine, request)
    rows.clear()

    engine = new_engine(model, policy)
    long, request = scoring(engine), small(engine)
    engine.add(long)
    engine.step()
    engine.add(request)
    beside = steps_until_done(engine, request)
    own = [step for step in rows if request.number in step]
    most = scored_budget(TOKENS, beside_others=True)
    assert len(own) == alone
    assert all(step.get(long.number, 0) <= most for step in own)
    # Steps of the long one alone come between where the policy takes turns, and then they are as short.
    assert beside <= 2 * alone
    assert sum(step.get(long.number, 0) for step in rows[1:]) <= most * beside
    finish(engine)
    assert len(long.prompt_logprobs) == 400


def test_many_share_one_budget_and_all_end(model: Model, rows: list[dict[int, int]]) -> None:
    engine = new_engine(model)
    many = [scoring(engine, 40, seed) for seed in range(5)]
    for request in many:
        engine.add(request)
    finish(engine)
    budget = scored_budget(TOKENS, beside_others=False)
    assert all(sum(step.values()) <= budget for step in rows)
    assert all(len(request.prompt_logprobs) == 40 for request in many)


def test_given_tokens_are_reported_instead_of_the_likeliest(model: Model) -> None:
    asked, given = words(9, 5), (17, 3, 88)
    engine = new_engine(model)
    (answer,) = engine.generate([asked], max_tokens=3, temperature=0.0, logprobs=2, logprob_tokens=given)
    (logits_TV,) = model.logits([asked + answer.tokens])
    log_TV = logits_TV.log_softmax(-1)
    for place, found in enumerate(answer.logprobs, len(asked) - 1):
        assert [token for token, _ in found.top] == list(given)
        assert [value for _, value in found.top] == pytest.approx(log_TV[place, list(given)].tolist(), abs=1e-5)
        assert found.rank == 1  # greedy


def test_minus_one_reports_the_whole_vocabulary(model: Model) -> None:
    engine = new_engine(model)
    (answer,) = engine.generate([words(5, 6)], max_tokens=1, temperature=0.0, logprobs=-1, prompt_logprobs=-1)
    for found in [*answer.prompt_logprobs[1:], *answer.logprobs]:
        assert sorted(token for token, _ in found.top) == list(range(VOCABULARY))


def test_in_invariant_mode_a_score_has_the_bits_of_the_draw_and_of_the_trainer(tmp_path: Path) -> None:
    """Whatever else is in the batch, and however many rows a step has."""
    model = moesaic.load(talking_model(tmp_path / "tiny"), threads=1, mode="invariant")
    engine = moesaic.Engine(model, cache_bytes=4 << 20, policy=Chunked(tokens=TOKENS), seed=0)
    asked = [words(count, count) for count in (50, 7, 23)]
    drawn = engine.generate(asked, max_tokens=12, temperature=1.0, seed=4, ignore_eos=True)
    whole = [prompt + answer.tokens for prompt, answer in zip(asked, drawn, strict=True)]
    scored = engine.generate(whole, max_tokens=1, temperature=0.0, prompt_logprobs=2)
    trained = model.logprobs(whole)
    for prompt, answer, score, log_T in zip(asked, drawn, scored, trained, strict=True):
        found = [one.logprob for one in score.prompt_logprobs[1:]]
        assert found[len(prompt) - 1 :] == [one.logprob for one in answer.logprobs]
        assert found == log_T.tolist()
