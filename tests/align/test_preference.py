"""Pairs of answers: what is read, packed and kept; losses by hand; held-out pairs come out right."""

from __future__ import annotations

import json
import math

import pytest
import torch
import torch.nn.functional as F

import moesaic
from moesaic.align.align import align
from moesaic.align.examples import Shuffled
from moesaic.align.preference.batch import GroupStream, pack_pairs
from moesaic.align.preference.pairs import read_pair, read_source
from moesaic.align.preference.reference import answer_logprobs, reference_logprobs
from moesaic.align.stages.preference import Preference as PreferenceStage
from moesaic.data.packing import IGNORED
from moesaic.model.context import Routing
from moesaic.train.objectives.preference import Preference
from moesaic.train.run import Run
from tests.align.made import ADAMW, assert_line_refused, assert_refused, recipe_of

FAMILY = "builtin:chain_sum:min_terms=2,max_terms=2,min_digits=1,max_digits=1"
LINES = [
    {"prompt": f"Say {word}", "chosen": f"{word} it is", "rejected": "I would much rather not say that"}
    for word in ("yes", "no", "name", "value", "number", "like")
]


def recipe(path, stage: str):
    return recipe_of(path, stage, more=ADAMW)


def written(path, lines=LINES):
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def metrics(path) -> list[dict]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def without_times(found: list[dict]) -> list[dict]:
    timed = {"seconds", "tokens_per_second", "mfu"}
    return [{key: value for key, value in line.items() if key not in timed} for line in found]


# -- what is read


def spoken(tokenizer, said) -> str:
    return tokenizer.decode([token for token, learn in zip(said.tokens, said.learn) if learn], special=True)


def test_only_the_answers_of_a_pair_are_learned(model):
    tokenizer = model.tokenizer
    history = [
        {"role": "user", "content": "yes or no"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "and now"},
    ]
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "x", "arguments": {"value": 1}}}]}
    chosen = [call, {"role": "tool", "content": "200"}, {"role": "assistant", "content": "no"}]
    pair = read_pair(tokenizer, {"messages": history, "chosen": chosen, "rejected": "like", "margin": 0.5}, "a:1", 3)
    assert spoken(tokenizer, pair.rejected) == "like<|endoftext|>"
    call = '<tool_call>{"name": "x", "arguments": {"value": 1}}</tool_call><|endoftext|>'
    assert spoken(tokenizer, pair.chosen) == call + "no<|endoftext|>"  # and neither "yes" nor what the tool said
    assert (pair.number, pair.margin) == (3, 0.5)
    # Whole conversations, as some data sets have them: the same pair.
    whole = {"chosen": history + chosen, "rejected": [*history, {"role": "assistant", "content": "like"}]}
    again = read_pair(tokenizer, whole, "a:1", 3)
    assert again.chosen == pair.chosen and again.rejected == pair.rejected


def test_a_tasks_right_answer_stands_against_a_wrong_one(model):
    pairs, _ = read_source(model.tokenizer, FAMILY, "train", 20, 500)
    for pair in pairs:
        question = model.tokenizer.decode(pair.chosen.tokens)
        left, right = question.rpartition("=")[0].split()[-3::2]
        sign = -1 if " - " in question else 1
        assert int(spoken(model.tokenizer, pair.chosen).partition("<")[0]) == int(left) + sign * int(right)
        assert spoken(model.tokenizer, pair.chosen) != spoken(model.tokenizer, pair.rejected)


def test_another_seed_makes_pairs_of_other_tasks_but_not_to_measure_on(model):
    def tokens(split, seed):
        return [pair.chosen.tokens for pair in read_source(model.tokenizer, FAMILY, split, 20, 500, seed=seed)[0]]

    assert tokens("train", 1) != tokens("train", 0) == tokens("train", 0)
    assert tokens("test", 1) == tokens("test", 0)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "a", "rejected": "b"}', r":1: has no chosen answer\. A pair is"),
        ('{"prompt": "a", "chosen": "b"}', "has no rejected answer"),
        ('{"prompt": "a", "chosen": "", "rejected": "b"}', "chosen answer is empty"),
        ('{"prompt": "a", "chosen": 3, "rejected": "b"}', "neither text nor a list"),
        ('{"chosen": "a", "rejected": "b"}', "neither messages nor a prompt"),
        ('{"prompt": "a", "chosen": [{"role": "user", "content": "b"}], "rejected": "b"}', "nothing that an assistant"),
        ('{"prompt": "a", "chosen": "b", "rejected": "c", "margin": "x"}', "its margin is"),
        ("", "is empty"),
        ("\n{", ":2: is not JSON"),
        ("[1]", "is not a JSON object"),
    ],
)
def test_a_bad_pair_is_named_with_its_line(base, tmp_path, line, message):
    assert_line_refused(tmp_path, base, "preference", line, message)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("objective: {beta: 0}", "beta is above 0"),
        ("objective: {kind: ipo, smoothing: 0.1}", "smoothing belongs to sigmoid"),
        ("objective: {bta: 1}", "no such option of preference"),
        ("batch_pairs: 0", "at least 1"),
        ("max_length: 5", "no pair is as short as 5"),
    ],
)
def test_bad_options_are_refused(base, tmp_path, options, message):
    assert_refused(tmp_path, base, f'{{name: preference, data: [{{path: "{FAMILY}"}}], pairs: 4, {options}}}', message)


# -- what is packed and kept


def test_a_pair_is_never_parted(model):
    pairs, _ = read_source(model.tokenizer, FAMILY, "train", 7, 500)
    reference = torch.arange(14.0).reshape(7, 2)
    whole = pack_pairs(pairs, {}, reference)
    assert whole.count == 7 and sum(whole.lengths) == len(whole.tokens_T)
    objective = Preference(beta=0.3)
    model.zero_grad()
    loss = objective(model, whole, Routing())
    loss.total.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    parts = whole.parts(3)
    assert len(parts) == 3 and all(len(part.lengths) % 2 == 0 for part in parts)
    losses = [objective(model, part, Routing()) for part in parts]
    total = sum(part.total for part in losses)
    total.backward()
    torch.testing.assert_close(total, loss.total)
    for name in loss.notes:
        torch.testing.assert_close(sum(part.notes[name] for part in losses), loss.notes[name])
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-3, atol=1e-6)


def test_answers_are_as_likely_as_the_model_says(model):
    pairs, _ = read_source(model.tokenizer, FAMILY, "train", 3, 500)
    said = [side for pair in pairs for side in pair.sides]
    found = answer_logprobs(model, said)
    for one, value in zip(said, found):
        each = model.logprobs([one.tokens])[0]
        torch.testing.assert_close(value, each[torch.tensor(one.learn[1:])].sum(), rtol=1e-4, atol=1e-4)


def test_the_reference_is_computed_once_and_gone_on_with(model, tmp_path, monkeypatch):
    pairs, _ = read_source(model.tokenizer, FAMILY, "train", 6, 500)
    first = reference_logprobs(model, pairs, {0, 1, 2}, tmp_path)
    assert first[:3].isfinite().all() and first[3:].isnan().all()
    asked = []
    import moesaic.align.preference.reference as module

    plain = module.answer_logprobs
    monkeypatch.setattr(module, "answer_logprobs", lambda m, said: asked.append(len(said)) or plain(m, said))
    whole = reference_logprobs(model, pairs, range(6), tmp_path)
    assert asked == [6]  # three pairs were known
    assert torch.equal(whole[:3], first[:3]) and whole.isfinite().all()
    assert torch.equal(reference_logprobs(model, pairs, range(6), tmp_path), whole) and asked == [6]
    assert len(list(tmp_path.iterdir())) == 1
    # Other pairs, or another model, are not taken for these.
    reference_logprobs(model, pairs[:5], range(5), tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


def test_sources_take_turns_and_go_on_from_any_position(model):
    one, other = (read_source(model.tokenizer, FAMILY, split, 5, 500)[0] for split in ("train", "test"))

    def stream():
        return GroupStream([Shuffled(one, 1), Shuffled(other, 1)], [2.0, 1.0], 3, pack_pairs)

    whole = stream()
    batches = [next(whole) for _ in range(6)]
    assert whole.position == {"taken": [12, 6]}
    assert len(list(stream().coming(6))) == 18
    for number in range(5):
        resumed = stream().from_position(batches[number].position_after)
        assert torch.equal(next(resumed).tokens_T, batches[number + 1].tokens_T)


# -- losses


def test_a_rewound_run_keeps_to_pairs_whose_reference_is_known(base, tmp_path):
    """It goes on behind the data that broke it, and so comes further than the steps it was given."""
    stage = PreferenceStage(data=({"path": FAMILY},), pairs=12, batch_pairs=2, steps=3, evaluate=0)
    stream = stage.open(moesaic.load(base), tmp_path)
    plain = [next(stream).columns["reference"] for _ in range(3)]
    rewound = stream.skip(stream.position)
    more = [next(rewound).columns["reference"] for _ in range(12)]
    assert not any(column.isnan().any() for column in (*plain, *more))


def test_losses_by_hand():
    lead = torch.tensor([0.0, 2.0, -1.0])
    dpo = [math.log(2), math.log(1 + math.exp(-2)), math.log(1 + math.exp(1))]
    torch.testing.assert_close(Preference().losses(lead), torch.tensor(dpo))
    wrong = [math.log(2), math.log(1 + math.exp(2)), math.log(1 + math.exp(-1))]
    smooth = [0.9 * a + 0.1 * b for a, b in zip(dpo, wrong)]
    torch.testing.assert_close(Preference(smoothing=0.1).losses(lead), torch.tensor(smooth))
    assert Preference(kind="hinge").losses(lead).tolist() == [1.0, 0.0, 2.0]
    # beta 0.5: a lead in log-probability of 0, 4 and -2, where 1 is wanted
    torch.testing.assert_close(Preference(kind="ipo", beta=0.5).losses(lead), torch.tensor([1.0, 9.0, 9.0]))


def test_rewards_by_hand():
    logprobs, reference, tokens = torch.tensor([-4.0, -6.0]), torch.tensor([-5.0, -5.0]), torch.tensor([2, 4])
    assert Preference(beta=0.1).rewards(logprobs, reference, tokens).tolist() == pytest.approx([0.1, -0.1])
    per_token = Preference(beta=0.1, normalised=True).rewards(logprobs, reference, tokens)
    assert per_token.tolist() == pytest.approx([0.05, -0.025])
    assert Preference(kind="ipo", beta=1.0).rewards(logprobs, reference, tokens).tolist() == [0.5, -0.25]
    simpo = Preference(beta=2.0, reference=False, normalised=True).rewards(logprobs, None, tokens)
    assert simpo.tolist() == [-4.0, -3.0]


def test_simpo_asks_for_a_margin_and_rpo_keeps_the_chosen_likely(model):
    pairs, _ = read_source(model.tokenizer, FAMILY, "train", 4, 500)
    batch = pack_pairs(pairs, {})
    logprobs = answer_logprobs(model, [side for pair in pairs for side in pair.sides])
    tokens = torch.tensor([sum(side.learn) for pair in pairs for side in pair.sides])
    mean = logprobs / tokens
    lead = 2.0 * (mean[::2] - mean[1::2])
    found = Preference(beta=2.0, reference=False, normalised=True, margin=0.7, sft=0.3)(model, batch, Routing())
    torch.testing.assert_close(found.parts["pair"], -F.logsigmoid(lead - 0.7).mean())
    torch.testing.assert_close(found.parts["sft"], -mean[::2].mean())
    torch.testing.assert_close(found.total.detach(), found.parts["pair"] + 0.3 * found.parts["sft"])
    batch.columns["margin"] += 0.7
    again = Preference(beta=2.0, reference=False, normalised=True)(model, batch, Routing())
    torch.testing.assert_close(again.total.detach(), found.parts["pair"])


# -- the stage


def test_dpo_turns_held_out_pairs_round(base, tmp_path):
    """Short answers are chosen in training; of pairs never seen, the short one is then held to be better."""
    train = written(tmp_path / "train.jsonl")
    held = [
        {"prompt": f"Say {n}", "chosen": f"{n} it is", "rejected": "I would much rather not say that"} for n in range(8)
    ]
    test = written(tmp_path / "test.jsonl", held)
    stage = (
        f'{{name: preference, steps: 12, lr: 0.002, data: [{{path: "{train}"}}], held_out: [{{path: "{test}"}}], '
        "batch_pairs: 6, evaluate_every: 12, objective: {beta: 0.3, sft: 0.1}}"
    )
    out = tmp_path / "out"
    before = moesaic.load(base)
    align(recipe(tmp_path, stage), base, out, quiet=True)
    lines = metrics(out)
    assert lines[0]["loss/pair"] == pytest.approx(math.log(2), abs=1e-4)  # the model is its own reference
    assert lines[0]["reward_margin"] == pytest.approx(0.0, abs=1e-4)
    assert lines[-1]["accuracy"] == 1.0 and lines[-1]["held_out_margin"] > 0.5
    assert lines[-1]["pairs_right"] == 1.0 and lines[-1]["reward_margin"] > 0.5
    after = moesaic.load(out)
    pairs, _ = read_source(before.tokenizer, str(test), "test", 99, 500)
    gains = [answer_logprobs(m, [s for pair in pairs for s in pair.sides]).reshape(-1, 2) for m in (before, after)]
    assert ((gains[1] - gains[0])[:, 0] > (gains[1] - gains[0])[:, 1]).all()


def test_a_stopped_stage_goes_on_to_the_same_bits(base, tmp_path, monkeypatch):
    stage = (
        f'{{name: preference, steps: 4, lr: 0.002, data: [{{path: "{written(tmp_path / "p.jsonl")}"}}], '
        "batch_pairs: 4, save_every: 1, evaluate_every: 0, objective: {kind: ipo}}"
    )
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    align(recipe(tmp_path, stage), base, whole, quiet=True)
    plain = Run.finished
    for step in range(1, 5):
        monkeypatch.setattr(
            Run,
            "finished",
            lambda run, step=step: setattr(run, "stopping", run.step >= step and not run.done()) or plain(run),
        )
        align(recipe(tmp_path, stage), base, parts, quiet=True)
    assert without_times(metrics(parts)) == without_times(metrics(whole))
    one, other = moesaic.load(whole).state_dict(), moesaic.load(parts).state_dict()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert len(list((parts / "reference").iterdir())) == 1


def test_targets_are_those_of_the_answers(model):
    pairs, _ = read_source(model.tokenizer, FAMILY, "train", 2, 500)
    batch = pack_pairs(pairs, {})
    assert int((batch.targets_T != IGNORED).sum()) == sum(sum(side.learn) for pair in pairs for side in pair.sides)
