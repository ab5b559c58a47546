"""Reward models: what is judged where, losses by hand and as trl has them, lengths, steps, and a head that is kept."""

from __future__ import annotations

import json
import math
import re

import pytest
import torch
import torch.nn.functional as F

import moesaic
from moesaic.align.align import align
from moesaic.align.conversation import Said
from moesaic.align.preference.length_balance import balanced, length_bias
from moesaic.align.preference.pairs import Pair, read_pair
from moesaic.align.preference.reward_model import pack_judged, read_steps
from moesaic.align.rewards import judge
from moesaic.align.rewards.model import ModelReward
from moesaic.cli import main
from moesaic.errors import UserError
from moesaic.model import directory, lineage
from moesaic.model.context import Routing
from moesaic.model.value_head import FILE, give_head, values_at
from moesaic.train.objectives.reward_model import RewardModel
from moesaic.train.report.metrics import read_events
from moesaic.train.run import Run
from moesaic.worlds.judges import Answer
from tests.align.made import ADAMW, assert_line_refused, recipe_of

WORDS = ("yes", "no", "name", "value", "number", "like", "you", "and")


def pair_line(word: str) -> dict:
    """The better answer repeats what it was asked for; both are as long."""
    other = WORDS[(WORDS.index(word) + 3) % len(WORDS)]
    return {"prompt": f"Say {word}", "chosen": f"The {word} is {word}", "rejected": f"It is {other} {other} {other}"}


def steps_line(word: str) -> dict:
    steps = [{"text": f"The number is {word}.\n", "label": 1}, {"text": "It is like you like it.", "label": 0}]
    return {"prompt": f"Say {word}", "steps": steps}


@pytest.fixture()
def headed(base):
    model = moesaic.load(base)
    head = give_head(model)
    torch.nn.init.normal_(head.weight, std=0.3)
    torch.nn.init.constant_(head.bias, 0.2)
    return model


def recipe(path, *stages: str):
    return recipe_of(path, *stages, more=ADAMW)


def written(path, lines):
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def metrics(path) -> list[dict]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


# -- where it is judged, and what it costs


def test_pairs_are_judged_at_their_ends_and_steps_at_theirs(headed):
    tokenizer = headed.tokenizer
    pair = read_pair(tokenizer, pair_line("yes"), "a:1", 0)
    steps = read_steps(tokenizer, steps_line("no"), "a:2", 1)
    batch = pack_judged([pair, steps], {})
    assert batch.groups == [2, 1] and batch.lengths == [*(len(side.tokens) for side in pair.sides), len(steps.tokens)]
    ends = [batch.lengths[0] - 1, batch.lengths[0] + batch.lengths[1] - 1]
    assert batch.columns["side"].nonzero().flatten().tolist() == ends
    said = [tokenizer.decode(steps.tokens[: row + 1]).rstrip() for row in steps.labels]
    assert said[0].endswith("The number is no.") and said[1].endswith("It is like you like it.")
    assert list(steps.labels.values()) == [1.0, 0.0]

    values = [values_at(headed, [side.tokens], [[len(side.tokens) - 1]])[0] for side in pair.sides]
    at_steps = values_at(headed, [steps.tokens], [list(steps.labels)])[0]
    found = RewardModel(stability=0.5, margin=0.25)(headed, batch, Routing())
    lead = float(values[0] - values[1])
    expected = math.log(1 + math.exp(-(lead - 0.25))), float(values[0] ** 2 + values[1] ** 2)
    assert float(found.parts["pair"]) == pytest.approx(expected[0], rel=1e-4)
    assert float(found.parts["stability"]) == pytest.approx(expected[1], rel=1e-4)
    right = -(math.log(1 / (1 + math.exp(-at_steps[0]))) + math.log(1 - 1 / (1 + math.exp(-at_steps[1])))) / 2
    assert float(found.parts["steps"]) == pytest.approx(right, rel=1e-4)
    assert float(found.total.detach()) == pytest.approx(expected[0] + 0.5 * expected[1] + right, rel=1e-4)
    assert float(found.notes["reward_margin"]) == pytest.approx(lead, rel=1e-4)


def test_parts_of_a_batch_add_up(headed):
    tokenizer = headed.tokenizer
    items = [read_pair(tokenizer, pair_line(word), "a", n) for n, word in enumerate(WORDS[:5])]
    items += [read_steps(tokenizer, steps_line(word), "a", 9) for word in WORDS[:2]]
    batch = pack_judged(items, {})
    whole = RewardModel(stability=0.1)(headed, batch, Routing())
    parts = [RewardModel(stability=0.1)(headed, part, Routing()) for part in batch.parts(3)]
    torch.testing.assert_close(sum(part.total for part in parts), whole.total)
    for name in whole.notes:
        torch.testing.assert_close(sum(part.notes.get(name, torch.zeros(())) for part in parts), whole.notes[name])


def test_the_pair_loss_is_that_of_trl(headed):
    """trl's own line, -logsigmoid(chosen - rejected - margin), through its trainer's method on given scores."""
    import types

    from trl import RewardTrainer

    scores = torch.tensor([[0.3, -0.2], [1.0, 2.0], [-0.5, -1.5]])
    margins = torch.tensor([0.0, 0.4, 0.1])

    class Scored(torch.nn.Module):
        def forward(self, **_):
            return types.SimpleNamespace(logits=torch.cat([scores[:, 0], scores[:, 1]])[:, None])

    model = Scored()
    accelerator = types.SimpleNamespace(gather_for_metrics=lambda tensor: tensor, gather=lambda tensor: tensor)
    args = types.SimpleNamespace(center_rewards_coefficient=None)
    from collections import defaultdict

    trainer = types.SimpleNamespace(
        model=model, args=args, accelerator=accelerator, _total_train_tokens=0, _tp_size=1,
        aux_loss_enabled=False, _metrics={"train": defaultdict(list), "eval": defaultdict(list)},
    )  # fmt: skip
    inputs = {"input_ids": torch.zeros(6, 2), "attention_mask": torch.ones(6, 2), "margin": margins}
    expected = RewardTrainer.compute_loss(trainer, model, inputs)

    class Table(torch.nn.Module):
        def forward(self, hidden_TD):
            return scores.reshape(-1)

    headed.value = Table()
    side = Said([1], [False])
    pairs = [Pair(n, side, side, float(margin)) for n, margin in enumerate(margins)]
    found = RewardModel()(headed, pack_judged(pairs, {}), Routing())
    torch.testing.assert_close(found.total, expected)


# -- lengths


def sized(number: int, chosen: int, rejected: int) -> Pair:
    return Pair(number, Said([1] * chosen, [True] * chosen), Said([1] * rejected, [True] * rejected))


def test_lengths_are_balanced_by_hand():
    # difference 1: three longer, one shorter; difference 4-7: two longer, none shorter; one of equal length
    pairs = [
        sized(0, 3, 2),
        sized(1, 4, 3),
        sized(2, 5, 4),
        sized(3, 2, 3),
        sized(4, 9, 4),
        sized(5, 9, 3),
        sized(6, 2, 2),
    ]
    weights = balanced(pairs, "weigh")
    assert weights == {0: 4 / 6, 1: 4 / 6, 2: 4 / 6, 3: 2.0, 4: 1.0, 5: 1.0, 6: 1.0}
    assert balanced(pairs, "drop") == {0: 1.0, 3: 1.0, 6: 1.0}
    assert length_bias(pairs) == pytest.approx(5 / 6)
    assert length_bias([pairs[0], pairs[3]]) == 0.5


def test_a_reward_model_does_not_learn_that_longer_is_better(base, tmp_path):
    """Three pairs in four choose the longer answer, whatever it says. Unbalanced that is what is learned."""
    lines = []
    for number in range(24):
        short, long = "yes", "yes and yes and yes"
        chosen, rejected = (short, long) if number % 4 == 0 else (long, short)
        lines.append({"prompt": "Say yes", "chosen": chosen, "rejected": rejected})
    file = written(tmp_path / "long.jsonl", lines)
    margins = {}
    for how in ("as_they_are", "weigh"):
        stage = (
            f'{{name: reward_model, steps: 15, lr: 0.003, data: [{{path: "{file}"}}], batch_pairs: 24, '
            f"lengths: {how}, evaluate_every: 0}}"
        )
        align(recipe(tmp_path, stage), base, tmp_path / how, quiet=True)
        last = metrics(tmp_path / how)[-1]
        # Over the pairs, the longer answer's lead: 3 of 4 choose it, so the mean lead is half of it.
        margins[how] = last["reward_margin"] * 2
        assert last["length_bias"] == pytest.approx(0.75 if how == "as_they_are" else 0.5)
    assert margins["as_they_are"] > 0.6
    assert abs(margins["weigh"]) < 0.25


# -- the stage, and what it makes


def stage(train, test, steps=25, **options) -> str:
    more = "".join(f", {name}: {value}" for name, value in options.items())
    return (
        f'{{name: reward_model, steps: {steps}, lr: 0.003, data: [{{path: "{train}"}}], batch_pairs: 6, '
        f'held_out: [{{path: "{test}"}}], evaluate_every: {steps}, save_every: 1{more}}}'
    )


@pytest.fixture(scope="module")
def made(base, tmp_path_factory):
    """A reward model of pairs and steps."""
    path = tmp_path_factory.mktemp("made")
    lines = [pair_line(word) for word in WORDS[:6]] + [steps_line(word) for word in WORDS[:6]]
    train = written(path / "train.jsonl", lines)
    test = written(
        path / "test.jsonl", [pair_line(word) for word in WORDS[6:]] + [steps_line(word) for word in WORDS[6:]]
    )
    out = path / "out"
    align(recipe(path, stage(train, test, objective="{stability: 0.01}")), base, out, quiet=True)
    return out


def test_held_out_pairs_and_steps_are_judged_rightly(made):
    lines = metrics(made)
    assert lines[0]["loss/pair"] == pytest.approx(math.log(2), abs=1e-3)  # a fresh head says nothing
    assert lines[-1]["accuracy"] == 1.0 and lines[-1]["step_accuracy"] == 1.0
    assert lines[-1]["held_out_margin"] > 0.5 and "loss/stability" in lines[-1]


def test_the_directory_is_a_model_with_a_head(made, base, tmp_path, capsys):
    assert (made / FILE).is_file() and lineage.read(made)[-1]["stage"] == "reward_model"
    model = moesaic.load(made)
    assert model.value is not None and model.value.weight.abs().sum() > 0
    directory.save(model, tmp_path / "copy")
    assert torch.equal(moesaic.load(tmp_path / "copy").value.weight, model.value.weight)
    import transformers

    other = transformers.AutoModelForCausalLM.from_pretrained(made, dtype=torch.float32)
    tokens = [3, 4, 5, 6]
    torch.testing.assert_close(
        model.logits([tokens])[0], other(torch.tensor([tokens])).logits[0].detach(), rtol=1e-3, atol=1e-3
    )
    hidden = other.model(torch.tensor([tokens])).last_hidden_state[0]
    expected = F.linear(hidden, model.value.weight, model.value.bias).squeeze(1).detach()
    torch.testing.assert_close(values_at(model, [tokens], [range(4)])[0], expected, rtol=1e-3, atol=1e-3)
    for place, there in ((made, True), (base, False)):
        capsys.readouterr()
        assert main(["show", str(place), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["value_head"] is there
        assert main(["show", str(place)]) == 0
        assert ("value head" in capsys.readouterr().out) is there


def test_answers_are_rewarded_by_it_many_at_a_time(made):
    reward = ModelReward(str(made))
    lines = [pair_line(word) for word in WORDS]
    answers = [Answer(line["prompt"], line[side]) for line in lines for side in ("chosen", "rejected")]
    judged = judge([("model", 2.0, reward)], answers)
    assert all(a.total > b.total for a, b in zip(judged[::2], judged[1::2]))
    alone = [2.0 * reward(answer) for answer in answers[:3]]
    assert alone == pytest.approx([verdict.total for verdict in judged[:3]], rel=1e-4)
    # With all that was said before, not only the last question.
    messages = ({"role": "system", "content": "no"}, {"role": "user", "content": lines[0]["prompt"]})
    assert reward(Answer(lines[0]["prompt"], "yes", messages=messages)) != reward(Answer(lines[0]["prompt"], "yes"))
    # One that cannot be judged costs only itself.
    bad = judge([("model", 1.0, reward)], [answers[0], Answer("a", "yes " * 600)])
    assert bad[0].total == pytest.approx(judged[0].total / 2, rel=1e-4)
    assert bad[1].total == 0.0 and "more than the reward model reads" in bad[1].problems[0]


def test_steps_are_rewarded_by_the_worst_of_them(made):
    text = "The number is yes.\nIt is like you like it."
    found = {
        by: ModelReward(str(made), by=by, separator="\n")(Answer("Say yes", text)) for by in ("min", "last", "mean")
    }
    assert found["min"] == pytest.approx(found["last"]) and found["min"] < 0.5
    assert 2 * found["mean"] - found["min"] > 0.5  # the first step was right


def test_a_stopped_stage_goes_on_to_the_same_bits(base, tmp_path, monkeypatch):
    train = written(tmp_path / "p.jsonl", [pair_line(word) for word in WORDS])
    text = stage(train, train, steps=4)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    align(recipe(tmp_path, text), base, whole, quiet=True)
    plain = Run.finished
    for at in range(1, 5):
        monkeypatch.setattr(
            Run,
            "finished",
            lambda run, at=at: setattr(run, "stopping", run.step >= at and not run.done()) or plain(run),
        )
        align(recipe(tmp_path, text), base, parts, quiet=True)
    timed = {"seconds", "tokens_per_second", "mfu"}
    one, other = ([{k: v for k, v in line.items() if k not in timed} for line in metrics(p)] for p in (whole, parts))
    assert one == other
    first, second = moesaic.load(whole).state_dict(), moesaic.load(parts).state_dict()
    assert "value.weight" in first and all(torch.equal(first[name], second[name]) for name in first)


def test_the_next_stage_goes_on_from_the_model_before_and_may_use_it(base, tmp_path):
    train = written(tmp_path / "p.jsonl", [pair_line(word) for word in WORDS])
    questions = written(tmp_path / "q.jsonl", [{"question": f"Say {word}"} for word in WORDS])
    policy = (
        f'{{name: policy, steps: 1, lr: 0.000001, data: [{{path: "{questions}"}}], prompts: 2, group: 2, '
        'max_tokens: 3, rewards: [{name: model, path: "stage:1"}], evaluate_every: 0}'
    )
    out = tmp_path / "out"
    align(recipe(tmp_path, stage(train, train, steps=2), policy), base, out, quiet=True)
    assert "reward" in metrics(out)[0] and metrics(out)[0]["reward_problems"] == 0
    assert [entry["stage"] for entry in lineage.read(out)] == ["policy"]
    assert float((moesaic.load(out).embed - moesaic.load(base).embed).detach().abs().max()) < 1e-4
    assert not (out / FILE).exists()
    assert (out / "stages" / "1-reward_model" / FILE).is_file()


# -- what is refused


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "a", "rejected": "b"}', r":1: has no chosen answer"),
        ('{"prompt": "a", "steps": []}', "has no steps"),
        ('{"prompt": "a", "steps": [{"text": "b"}]}', "label is None"),
        ('{"prompt": "a", "steps": [{"text": "b", "label": 2}]}', "label is 2"),
        ('{"prompt": "a", "steps": [{"text": " ", "label": 1}]}', "has no text"),
        ('{"steps": [{"text": "b", "label": 1}]}', "neither messages nor a prompt"),
        ("", "is empty"),
    ],
)
def test_bad_data_is_named_with_its_line(base, tmp_path, line, message):
    assert_line_refused(tmp_path, base, "reward_model", line, message)


def test_a_directory_without_a_head_is_no_reward_model(base, tmp_path, capsys):
    with pytest.raises(
        UserError, match=re.escape(f"has no value head ({FILE}). Name the directory that a reward_model")
    ):
        ModelReward(str(base))
    questions = written(tmp_path / "q.jsonl", [{"question": "a"}])
    policy = f'{{name: policy, data: [{{path: "{questions}"}}], rewards: [{{name: model, path: "PLACE"}}]}}'
    recipe(tmp_path, policy.replace("PLACE", str(base)))
    file = tmp_path / "align.yaml"
    assert main(["align", str(file), "--model", str(base), "--out", str(tmp_path / "o")]) == 2
    assert "has no value head" in capsys.readouterr().err
    with pytest.raises(UserError, match="there are 1 stages"):
        align(recipe(tmp_path, policy.replace("PLACE", "stage:3")), base, tmp_path / "o", quiet=True)


def test_a_head_of_another_model_is_refused(made, tmp_path):
    import shutil

    from safetensors.torch import save_file

    shutil.copytree(made, tmp_path / "other", symlinks=False)
    save_file({"weight": torch.zeros(1, 7), "bias": torch.zeros(1)}, tmp_path / "other" / FILE)
    with pytest.raises(UserError, match="does not hold weight 1x48"):
        moesaic.load(tmp_path / "other")


def test_a_reward_that_fails_is_explained_once_in_the_log(base, tmp_path):
    wrong = [{"kind": "max_word", "value": 1}]
    lines = [{"question": f"Say {word}", "constraints": wrong} for word in WORDS]
    policy = (
        f'{{name: policy, steps: 2, data: [{{path: "{written(tmp_path / "q.jsonl", lines)}"}}], prompts: 2, group: 2, '
        "max_tokens: 3, rewards: [{name: constraints}, {name: length, max_length: 4, slack: 4}], evaluate_every: 0}"
    )
    align(recipe(tmp_path, policy), base, tmp_path / "out", quiet=True)
    assert [line["reward_problems"] for line in metrics(tmp_path / "out")] == [4, 4]
    [warning] = [event for event in read_events(tmp_path / "out") if event["kind"] == "warning"]
    assert warning["step"] == 1
    assert (
        "the reward constraints failed on 4 completions, which get nothing for it (reward_problems" in warning["text"]
    )
    assert "did you mean max_words" in warning["text"]
