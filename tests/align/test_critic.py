"""PPO: advantages and value losses by hand; the critic learns, first alone; rewards rise; all of it resumes."""

from __future__ import annotations

import json

import pytest
import torch

import moesaic
from moesaic.align.align import align
from moesaic.align.critics.critic import Critic, CriticOptions, value_loss
from moesaic.align.critics.stream import CriticStream
from moesaic.align.rewards import Judged
from moesaic.align.rollouts.rollout import Sample, as_batch
from moesaic.align.stages.policy import PHASES
from moesaic.errors import UserError
from moesaic.model.context import Routing
from moesaic.recipe import load_recipe
from moesaic.train.objectives.policy import Policy
from moesaic.train.run import Run
from tests.align.made import reward_directory, without_times

SHORT = "rewards: [{name: length, max_length: 0, slack: 20, unit: characters}]"  # few characters are worth most


@pytest.fixture(scope="module")
def questions(tmp_path_factory):
    file = tmp_path_factory.mktemp("questions") / "q.jsonl"
    file.write_text("\n".join(json.dumps({"question": f"Say {n}", "answer": f"It is {n}"}) for n in range(12)))
    return file


def recipe(path, questions, options: str, steps: int = 4, lr: float = 0.002):
    file = path / "align.yaml"
    file.write_text(
        f'align: {{stages: [{{name: policy, steps: {steps}, lr: {lr}, data: [{{path: "{questions}"}}], prompts: 8, '
        f"group: 2, max_tokens: 6, save_every: 1, evaluate_every: 0, {SHORT}, {options}}}]}}\n"
        "optimizer: {name: adamw, lr: 0.001, weight_decay: 0.0}\n"
    )
    return load_recipe(file, [])


def metrics(path) -> list[dict]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def samples(rewards=(1.0, -0.5)) -> list[Sample]:
    """Two answers of three and two tokens, told with log-probabilities -1 each; a tool said the second's first."""
    first = Sample([5, 6], [7, 8, 9], [-1.0] * 3, [0] * 3, "", "stop", Judged(rewards[0], {}), None, 0.75)
    second = Sample([5], [9, 8, 7], [-1.0] * 3, [0] * 3, "", "stop", Judged(rewards[1], {}), None, -0.75)
    second.learn = [False, True, True]
    return [first, second]


def assessed(model, monkeypatch, **options) -> dict[str, torch.Tensor]:
    batch = as_batch(samples(), 0, "token", {}, {})
    critic = Critic(model, CriticOptions(whiten=False, **options))
    expected = torch.tensor([9.0, 0.5, 0.4, 0.6, 9.0, 9.0, 0.2, 0.1, 9.0])  # nine where no answer's token is predicted
    monkeypatch.setattr(critic, "values", lambda batch: expected)
    batch.columns["reference"] = torch.full((9,), -1.5)
    critic.assess(batch)
    return batch.columns


def test_advantages_by_hand(model, monkeypatch):
    columns = assessed(model, monkeypatch, discount=0.9, decay=0.5)
    last = 1.0 - 0.6
    middle = 0.9 * 0.6 - 0.4 + 0.45 * last
    first = 0.9 * 0.4 - 0.5 + 0.45 * middle
    end = -0.5 - 0.1
    begin = 0.9 * 0.1 - 0.2 + 0.45 * end
    expected = torch.tensor([0.0, first, middle, last, 0.0, 0.0, begin, end, 0.0])
    torch.testing.assert_close(columns["advantage"], expected)
    # What the critic learns is not shortened: the discounted reward itself.
    returns = torch.tensor([0.81, 0.9, 1.0]), torch.tensor([-0.45, -0.5])
    torch.testing.assert_close(columns["return"][1:4], returns[0])
    torch.testing.assert_close(columns["return"][6:8], returns[1])


def test_a_distance_from_the_reference_costs_every_token(model, monkeypatch):
    plain = assessed(model, monkeypatch, decay=1.0)
    costly = assessed(model, monkeypatch, decay=1.0, kl=0.2)
    # Each token was half a nat likelier than under the reference: 0.1 less for it and every one after it.
    torch.testing.assert_close(
        plain["advantage"][1:4] - costly["advantage"][1:4], torch.tensor([0.3, 0.2, 0.1]), atol=1e-5, rtol=0
    )


def test_the_questions_own_worth_may_be_taken_off(model, monkeypatch):
    columns = assessed(model, monkeypatch, decay=1.0, baseline=True)
    torch.testing.assert_close(columns["return"][1:4], torch.full((3,), 0.75))
    torch.testing.assert_close(columns["return"][6:8], torch.full((2,), -0.75))


def test_long_answers_look_further_ahead():
    options = CriticOptions(adaptive=0.05)
    assert options.decay_of(100) == pytest.approx(0.8) and options.decay_of(1000) == pytest.approx(0.98)
    assert options.decay_of(10) == 0.0  # never negative
    assert CriticOptions(decay=0.9).decay_of(10) == CriticOptions(decay=0.9).decay_of(1000) == 0.9


def test_whitened_advantages_have_mean_none_and_spread_one(model):
    batch = as_batch(samples(), 0, "token", {}, {})
    Critic(model, CriticOptions()).assess(batch)
    spoken = batch.columns["advantage"][batch.columns["weight"] > 0]
    assert float(spoken.mean()) == pytest.approx(0.0, abs=1e-5) and float(spoken.std(correction=0)) == pytest.approx(1)
    assert (batch.columns["advantage"][batch.columns["weight"] == 0] == 0).all()


def test_value_loss_by_hand():
    value, old, wanted = torch.tensor([1.0, 0.1, 1.0]), torch.zeros(3), torch.tensor([1.0, 1.0, -1.0])
    # The first is right, but too far from what it was to be believed: it counts as 0.2.
    expected = torch.tensor([0.8**2 / 2, 0.9**2 / 2, 2.0**2 / 2])
    torch.testing.assert_close(value_loss(value, old, wanted, 0.2), expected)
    torch.testing.assert_close(value_loss(value, old, wanted, 0.0), torch.tensor([0.0, 0.405, 2.0]))


def test_a_critic_learns_what_comes_of_tokens(model):
    critic = Critic(model, CriticOptions(lr=0.003, clip=0.0))
    before = {name: p.clone() for name, p in model.named_parameters()}
    losses = []
    for _ in range(40):
        batch = as_batch(samples(), 0, "token", {}, {})
        critic.assess(batch)
        losses.append(critic.learn(batch)["value_loss"])
    notes = critic.assess(as_batch(samples(), 0, "token", {}, {}))
    assert losses[-1] < 0.05 * losses[0] and notes["value_explained"] > 0.9
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())  # the policy is another model


def test_a_critic_may_begin_as_a_reward_model(model, base):
    made = Critic(model, CriticOptions(model=str(reward_directory())))
    assert float(made.model.value.weight.detach().abs().sum()) > 0
    assert float(Critic(model, CriticOptions()).model.value.weight.detach().abs().sum()) == 0
    with pytest.raises(UserError, match="has no value head"):
        Critic(model, CriticOptions(model=str(base)))


def test_the_policy_waits_until_the_critic_knows_something(base, questions, tmp_path):
    out = tmp_path / "out"
    align(recipe(tmp_path, questions, "critic: {lr: 0.003, pretrain: 3, updates: 4}", steps=4), base, out, quiet=True)
    lines = metrics(out)
    assert lines[2]["value_loss"] < lines[0]["value_loss"]
    assert all("mismatch_max" in line and line["mismatch_max"] == 0 for line in lines)
    frozen = moesaic.load(out / "checkpoints" / "step-00000003").state_dict()
    begun, after = moesaic.load(base).state_dict(), moesaic.load(out).state_dict()
    assert all(torch.equal(begun[name], frozen[name]) for name in begun)
    assert any(not torch.equal(begun[name], after[name]) for name in begun)
    assert not (out / "value_head.safetensors").exists()  # the critic is no part of the policy


def test_rewards_rise(base, questions, tmp_path):
    out = tmp_path / "out"
    options = "critic: {lr: 0.003, pretrain: 2, updates: 2}, objective: {clip_high: 0.28}"
    align(recipe(tmp_path, questions, options, 22, 0.004), base, out, quiet=True)
    rewards = [line["reward"] for line in metrics(out)]
    assert sum(rewards[-4:]) / 4 > sum(rewards[:4]) / 4 + 0.1


def test_a_stopped_stage_goes_on_to_the_same_bits(base, questions, tmp_path, monkeypatch):
    options = (
        "updates: 2, critic: {lr: 0.003, pretrain: 1, kl: 0.05, decay: 0.9}, "
        f'remember: {{data: [{{path: "{questions}"}}], batch_tokens: 60}}'
    )
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    align(recipe(tmp_path, questions, options), base, whole, quiet=True)
    plain = Run.finished
    for step in range(1, 5):
        monkeypatch.setattr(
            Run,
            "finished",
            lambda run, at=step: setattr(run, "stopping", run.step >= at and not run.done()) or plain(run),
        )
        align(recipe(tmp_path, questions, options), base, parts, quiet=True)
    assert without_times(metrics(parts)) == without_times(metrics(whole))
    first, second = moesaic.load(whole).state_dict(), moesaic.load(parts).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_the_seconds_of_a_step_are_split_by_what_they_went_to(base, questions, tmp_path):
    """Of every phase, none negative, together no more than the step; every phase takes some of the run's time."""
    options = "updates: 2, objective: {kl: 0.1}, critic: {kl: 0.1}"
    text = recipe(tmp_path, questions, options, 4)
    (summary,) = align(text, base, tmp_path / "out", quiet=True)["stages"]
    for number, line in enumerate(metrics(tmp_path / "out")):
        parts = {key: value for key, value in line.items() if key.startswith("time/")}
        assert set(parts) == {f"time/{name}" for name in (*PHASES, "other")}
        assert min(parts.values()) >= 0 and sum(parts.values()) == pytest.approx(line["seconds"], abs=1e-4)
        assert (parts["time/generate"] > 0) == (number % 2 == 0)  # every second step is another update
    assert set(summary["phases"]) == {*PHASES, "other"} and min(summary["phases"].values()) >= 0
    assert all(summary["phases"][name] > 0 for name in ("generate", "logprobs", "critic", "forward", "backward"))


def test_conversations_beside_are_not_forgotten(base, questions, tmp_path):
    remember = f'remember: {{data: [{{path: "{questions}"}}], weight: 1.0, batch_tokens: 300}}'
    align(recipe(tmp_path, questions, remember, 10, 0.003), base, tmp_path / "out", quiet=True)
    told = [line["loss/remember"] for line in metrics(tmp_path / "out")]
    assert told[-1] < told[0] - 0.5


@pytest.mark.parametrize("truncated", [False, True])
def test_what_is_remembered_is_the_plain_loss_of_the_conversations(model, questions, truncated):
    from moesaic.align.examples import open_examples
    from moesaic.align.rollouts.replay_sft import ReplaySftStream
    from moesaic.align.sft import ConversationStream
    from moesaic.train.objectives.next_token import NextToken

    class Rollouts:
        position: dict = {}

        def from_position(self, position):
            return self

        def __next__(self):
            drawn = samples()
            for sample in drawn if truncated else ():  # as with top_k: the draw was among these only
                sample.kept = [(token, token + 1) for token in sample.tokens]
            return as_batch(drawn, 0, "token", {}, {})

    policy = Policy(temperature=0.7 if truncated else 1.0)  # of the answers; nobody drew the conversations
    examples = open_examples([{"path": str(questions)}], "train", 0)
    talks = ConversationStream(model.tokenizer, examples, 80, 400)
    plain = NextToken(mtp_weight=0.0)(model, next(talks.from_position(None)), Routing()).total
    alone = policy(model, next(Rollouts()), Routing())
    both = policy(model, next(ReplaySftStream(Rollouts(), talks, 0.3)), Routing())
    torch.testing.assert_close(both.parts["remember"], 0.3 * plain.detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(both.total, alone.total + 0.3 * plain, rtol=1e-4, atol=1e-5)
    for name, value in alone.notes.items():
        torch.testing.assert_close(both.notes[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("critic: {lr: 0}", "lr is above 0"),
        ("critic: {decay: 2}", "from 0 to 1"),
        ("critic: {nothing: 2}", "nothing"),
        ("critic: {baseline: true}, group: 1", "group at least 2"),
        ("remember: {data: []}", "names no source"),
        ('remember: {data: [{path: "builtin:gcd"}]}, objective: {replay: true}', "does not go with replay"),
    ],
)
def test_bad_options_are_refused(base, questions, tmp_path, options, message):
    text = f'{{name: policy, data: [{{path: "{questions}"}}], {options}}}'
    file = tmp_path / "align.yaml"
    file.write_text(f"align: {{stages: [{text}]}}")
    with pytest.raises(UserError, match=message):
        align(load_recipe(file, []), base, tmp_path / "o", quiet=True)


def test_the_stream_behind_is_closed():
    closed = []

    class Behind:
        def close(self):
            closed.append(True)

    CriticStream(Behind(), None).close()
    assert closed
