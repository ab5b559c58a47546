"""Advantages and the policy objective against numbers worked by hand and plain formulas."""

from __future__ import annotations

import math

import pytest
import torch

import moesaic
from moesaic.align.advantages import ADVANTAGES, generalised_advantages
from moesaic.align.align import align
from moesaic.align.examples import Mixture
from moesaic.align.rewards import Judged
from moesaic.align.rollouts.engine_work import EngineWork
from moesaic.align.rollouts.rollout import Rollouts, Sample, as_batch
from moesaic.align.rollouts.stream import PolicyStream, RolloutSettings, imitated
from moesaic.align.selection.uniform import InTurn
from moesaic.model.context import Routing
from moesaic.model.layout import Layout
from moesaic.recipe import load_recipe
from moesaic.train.objectives.policy import Policy, clipped, distance
from moesaic.train.report.metrics import read_events, read_metrics
from tests.model import oracle
from tests.serve.made import talking_model

REWARDS = torch.tensor([[1.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 3.0]])


def test_advantages_by_hand():
    relative = ADVANTAGES["group_relative"](REWARDS)
    torch.testing.assert_close(relative[0], torch.tensor([1.0, -1.0, -1.0, 1.0]), atol=1e-4, rtol=0)
    assert (relative[1] == 0).all()
    torch.testing.assert_close(relative[2, 3], torch.tensor(math.sqrt(3.0)), atol=1e-4, rtol=0)
    assert ADVANTAGES["group_centred"](REWARDS)[2].tolist() == [-0.75, -0.75, -0.75, 2.25]
    assert ADVANTAGES["leave_one_out"](REWARDS)[2].tolist() == [-1.0, -1.0, -1.0, 3.0]
    normal = ADVANTAGES["batch_normalised"](REWARDS)
    # centred: four of 0.5 in size, four zeros, three of 0.75, one of 2.25: mean square (1 + 1.6875 + 5.0625) / 12
    torch.testing.assert_close(normal[0, 0], torch.tensor(0.5 / math.sqrt(7.75 / 12)), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["group_relative", "batch_normalised"])
def test_answers_worth_the_same_have_no_advantage(name):
    """Though the mean of seven equal numbers is, rounded to 32 bits, often another number."""

    class Sampled(PolicyStream):
        def sync_weights(self):
            pass

        def collect_rollouts(self):
            groups = [
                [Sample([1], [2], [0.0], [0], "", "stop", Judged(worth, {})) for _ in range(7)]
                for worth in (10.3, 0.7, -87.7)
            ]
            return groups, [Rollouts(groups, EngineWork(1, 1, 0))]

    examples = Mixture([[]], [1.0])
    settings = RolloutSettings(3, 7, 1, name, "token", 1, {}, 0)
    batch = next(Sampled(model=None, weights=None, examples=examples, settings=settings, selector=InTurn(examples)))
    assert float(batch.columns["advantage"].abs().max()) < 1e-6


def test_an_answer_that_several_gave_is_told_once():
    class Sampled(PolicyStream):
        def sync_weights(self):
            pass

        def collect_rollouts(self):
            texts = ["12", "12", " 12", "7", "9"]
            group = [Sample([1], [2], [0.0], [0], text, "stop", Judged(0.0, {}), question="5 + 7 =") for text in texts]
            return [group], [Rollouts([group], EngineWork(1, 1, 0))]

    examples = Mixture([[]], [1.0])
    settings = RolloutSettings(1, 5, 1, "group_centred", "token", 1, {}, 0)
    batch = next(Sampled(model=None, weights=None, examples=examples, settings=settings, selector=InTurn(examples)))
    assert batch.samples == ["5 + 7 = 12 (reward 0)", "5 + 7 = 7 (reward 0)"]


def test_each_sample_is_one_line_of_a_log_with_the_step_that_learned_from_it(tmp_path, capsys):
    """Drawn so narrowly that all answers to a question are the same; nobody is at a terminal."""
    family = "builtin:chain_sum:min_terms=2,max_terms=2,min_digits=1,max_digits=1"
    (tmp_path / "align.yaml").write_text(
        f"align: {{stages: [{{name: policy, steps: 4, lr: 1.0e-9, data: [{{path: '{family}'}}], prompts: 2, group: 4, "
        "max_tokens: 4, updates: 2, top_k: 1, evaluate: 2, evaluate_every: 1}]}"
    )
    base = talking_model(tmp_path / "base")
    capsys.readouterr()
    align(load_recipe(tmp_path / "align.yaml"), base, tmp_path / "out")
    shown = [line for line in capsys.readouterr().err.splitlines() if "(reward" in line]
    assert [line.partition(":")[0] for line in shown] == ["step 1", "step 3"]  # a set of rollouts serves two steps
    kept = [event for event in read_events(tmp_path / "out") if event["kind"] == "sample"]
    assert [f"step {event['step']}: {event['text']}" for event in kept] == shown


def test_generalised_advantages_by_hand():
    rewards, values = torch.tensor([0.0, 0.0, 1.0]), torch.tensor([0.5, 0.4, 0.6])
    advantages, returns = generalised_advantages(rewards, values, discount=0.9, decay=0.5)
    last = 1.0 - 0.6
    middle = 0.9 * 0.6 - 0.4 + 0.45 * last
    first = 0.9 * 0.4 - 0.5 + 0.45 * middle
    torch.testing.assert_close(advantages, torch.tensor([first, middle, last]))
    torch.testing.assert_close(returns, advantages + values)


def test_clipping_by_hand():
    old = torch.zeros(4)
    new = torch.tensor([1.5, 1.5, 0.5, 0.5]).log()
    advantage = torch.tensor([1.0, -1.0, 1.0, -1.0])
    # Up with a good token is cut at 1.28, down with a bad one at 0.8; the other way nothing is forgiven.
    torch.testing.assert_close(clipped(new, old, advantage, 0.2, 0.28), torch.tensor([-1.28, 1.5, -0.5, 0.8]))


def test_distances_by_hand_and_on_average():
    new, reference = torch.tensor([0.2]).log(), torch.tensor([0.1]).log()
    assert float(distance(new, reference, "k1")) == pytest.approx(math.log(2))
    assert float(distance(new, reference, "k2")) == pytest.approx(math.log(2) ** 2 / 2)
    assert float(distance(new, reference, "k3")) == pytest.approx(0.5 - 1 + math.log(2))
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.2, 0.6])
    exact = float((p * (p / q).log()).sum())
    for kind in ("k1", "k3"):  # unbiased: their expectation is the divergence
        assert float((p * distance(p.log(), q.log(), kind)).sum()) == pytest.approx(exact, rel=1e-5)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    oracle.save("qwen3_moe-normalised-mixed", path)
    return moesaic.load(path)


def samples(model) -> list[Sample]:
    """Two answers, whose recorded log-probabilities are the model's own, the second's moved a little."""
    made = []
    for prompt, tokens, advantage, moved in ([[5, 6, 7], [8, 9], 1.0, 0.0], [[11, 12], [13, 14, 15], -0.5, 0.3]):
        found = model.logprobs([prompt + tokens])[0][len(prompt) - 1 :] + moved
        made.append(
            Sample(prompt, tokens, found.tolist(), [0] * len(tokens), "", "stop", Judged(0.0, {}), None, advantage)
        )
    return made


def completion_logprobs(model, sample: Sample) -> torch.Tensor:
    """Of the tokens of one completion, from logits of a forward pass of its own."""
    tokens = torch.tensor(sample.prompt + sample.tokens)
    log = model.logits_at(model(tokens, Layout([len(tokens)]))).log_softmax(-1)
    start = len(sample.prompt) - 1
    return log[start:-1].gather(1, tokens[start + 1 :, None]).squeeze(1)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_loss_and_gradient_are_those_of_the_plain_formula(model, level):
    made = samples(model)
    batch = as_batch(made, 0, level, {}, {})
    assert batch.lengths == [5, 5] and batch.count == 5
    objective = Policy(clip_low=0.2, clip_high=0.28, kl=0.1)
    reference = [sample.prompt + sample.tokens for sample in made]
    moved = [piece + 0.05 for piece in model.logprobs(reference)]
    batch.columns["reference"] = torch.cat([torch.nn.functional.pad(piece, (0, 1)) for piece in moved])
    model.zero_grad()
    loss = objective(model, batch, Routing())
    loss.total.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    model.zero_grad()
    total = torch.zeros(())
    for sample, other in zip(made, moved, strict=True):
        new = completion_logprobs(model, sample)
        ratio = (new - torch.tensor(sample.logprobs)).exp()
        policy = -torch.minimum(ratio * sample.advantage, ratio.clamp(0.8, 1.28) * sample.advantage)
        apart = new - other[len(sample.prompt) - 1 :]
        each = policy + 0.1 * ((-apart).exp() - 1 + apart)
        total = total + (each.sum() / 5 if level == "token" else each.mean() / 2)
    total.backward()
    torch.testing.assert_close(loss.total, total)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(found[name], parameter.grad, rtol=1e-3, atol=1e-6)


def test_what_is_noted_of_a_batch(model):
    made = samples(model)
    made[0].versions, made[1].versions = [3, 3], [2, 3, 3]
    batch = as_batch(made, 3, "token", {}, {})
    notes = Policy(clip_low=0.2, clip_high=0.2)(model, batch, Routing()).notes
    # The fresh tokens: both of the first answer, exact, and two of the second, recorded 0.3 too high.
    assert float(notes["mismatch_max"]) == pytest.approx(0.3, abs=1e-4)
    assert float(notes["mismatch_mean"]) == pytest.approx(2 * 0.3 / 5, abs=1e-4)
    assert float(notes["clipped"]) == pytest.approx(3 / 5)  # exp(-0.3) is below 0.8


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"correction": "token", "correction_cap": 1.2}, [1.0, 1.0, *[math.exp(-0.3)] * 3]),
        ({"correction": "sequence", "correction_cap": 2.0}, [1.0, 1.0, *[math.exp(-0.9)] * 3]),
        ({"correction": "sequence", "correction_cap": 2.0, "correction_kind": "mask"}, [1.0, 1.0, 0.0, 0.0, 0.0]),
    ],
)
def test_importance_correction_by_hand(model, options, expected):
    made = samples(model)
    batch = as_batch(made, 0, "token", {}, {})
    from moesaic.kernels.cross_entropy import IGNORED

    kept = batch.targets_T != IGNORED
    logprobs = torch.cat(
        [torch.nn.functional.pad(p, (0, 1)) for p in model.logprobs([s.prompt + s.tokens for s in made])]
    )
    found = Policy(**options).corrected(logprobs * kept, batch.columns, batch.lengths)[kept]
    torch.testing.assert_close(found, torch.tensor(expected), atol=1e-4, rtol=0)


def test_a_corrected_gradient_counts_the_engines_difference_once(model):
    """Truncated importance sampling: min(trainer / engine, cap) weighs PPO's ratio, which is of the trainer alone."""
    made = samples(model)
    made[0].logprobs = [value - 0.5 for value in made[0].logprobs]  # a ratio of exp(0.5), which the cap cuts
    batch = as_batch(made, 0, "token", {}, {})
    model.zero_grad()
    Policy(correction="token", correction_cap=1.2)(model, batch, Routing()).total.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    weights = 1.2, math.exp(-0.3)
    total = torch.zeros(())
    for sample, weight in zip(made, weights, strict=True):
        new = completion_logprobs(model, sample)
        total = total - weight * sample.advantage * new.sum() / 5
    total.backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(found[name], parameter.grad, rtol=1e-3, atol=1e-6)


def test_tokens_that_are_not_learned_are_no_part_of_a_sequences_correction(model):
    made = samples(model)
    made[1].learn = [False, True, True]  # of weights that are too old
    batch = as_batch(made, 0, "token", {}, {})
    new = torch.cat([torch.nn.functional.pad(p, (0, 1)) for p in model.logprobs([s.prompt + s.tokens for s in made])])
    kept = batch.targets_T != -100
    found = Policy(correction="sequence").corrected(new * kept, batch.columns, batch.lengths)[kept]
    torch.testing.assert_close(found, torch.tensor([1.0, 1.0, *[math.exp(-0.6)] * 2]), atol=1e-4, rtol=0)


def test_a_correction_changes_nothing_where_trainer_and_engine_agree(tmp_path):
    """Also in the second update, whose weights are others than those the answers came from."""
    base = talking_model(tmp_path / "base")
    recipe = tmp_path / "align.yaml"
    recipe.write_text(
        'align: {stages: [{name: policy, steps: 4, lr: 0.01, data: [{path: "builtin:sums"}], prompts: 4, group: 4, '
        "rewards: [{name: length, max_length: 0, slack: 20, unit: characters}], updates: 2, max_tokens: 6, "
        "evaluate_every: 0, save_every: 1, objective: {}}]}\noptimizer: {name: adamw, lr: 0.001}\n"
    )
    for out, options in (("plain", []), ("corrected", ["align.stages.0.objective={correction: token}"])):
        align(load_recipe(recipe, options), base, tmp_path / out, quiet=True)
    one, other = (moesaic.load(tmp_path / out).state_dict() for out in ("plain", "corrected"))
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_right_answers_are_imitated_where_nobody_has_an_advantage(model):
    made = samples(model)
    for sample, reward in zip(made, (1.0, 0.4), strict=True):
        sample.judged, sample.advantage = Judged(reward, {}), 0.0
    batch = as_batch(made, 0, "token", {}, {})
    batch.columns["imitate"] = imitated(batch, right=1.0)
    assert batch.columns["imitate"].tolist() == [0, 0, 0.5, 0.5, 0] + [0] * 5
    model.zero_grad()
    loss = Policy(imitate=0.1)(model, batch, Routing())
    loss.total.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    wanted = -0.1 * completion_logprobs(model, made[0]).mean()
    wanted.backward()
    torch.testing.assert_close(loss.total, wanted)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(found[name], parameter.grad, rtol=1e-3, atol=1e-6)


def test_a_stage_learns_from_groups_in_which_all_are_right(tmp_path):
    base = talking_model(tmp_path / "base")
    recipe = tmp_path / "align.yaml"
    recipe.write_text(
        'align: {stages: [{name: policy, steps: 3, lr: 0.01, data: [{path: "builtin:sums"}], prompts: 4, group: 2, '
        "rewards: [{name: length, max_length: 100, slack: 1}], max_tokens: 6, evaluate_every: 0, save_every: 3, "
        "objective: {imitate: 0.1}}]}\noptimizer: {name: adamw, lr: 0.001, weight_decay: 0.0}\n"
    )
    for out, options in (("imitating", []), ("plain", ["align.stages.0.objective={}"])):
        align(load_recipe(recipe, options), base, tmp_path / out, quiet=True)
    start, plain = moesaic.load(base).state_dict(), moesaic.load(tmp_path / "plain").state_dict()
    assert all(torch.equal(tensor, plain[name]) for name, tensor in start.items())  # every reward is the same
    told = [line["loss/imitate"] for line in read_metrics(tmp_path / "imitating")]
    assert len(told) == 3 and all(value > 0 for value in told)
    learned = moesaic.load(tmp_path / "imitating").state_dict()
    assert any(not torch.equal(tensor, learned[name]) for name, tensor in start.items())
