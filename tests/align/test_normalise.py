"""`normalise: each`: what several rewards are worth to an advantage, by hand-made numbers and by what is learned."""

from __future__ import annotations

import json
import math

import pytest
import torch

import moesaic
from moesaic.align.advantages import ADVANTAGES, normalised_each
from moesaic.align.align import align
from moesaic.align.examples import Mixture
from moesaic.align.rewards import Judged, weighted_rewards
from moesaic.align.rollouts.engine_work import EngineWork
from moesaic.align.rollouts.rollout import Rollouts, Sample, rewards_of
from moesaic.align.rollouts.stream import PolicyStream, RolloutSettings, informative
from moesaic.align.selection.uniform import InTurn
from moesaic.train.report.metrics import read_metrics
from moesaic.train.run import Run
from tests.align.made import assert_refused, recipe_of

FAMILY = "builtin:chain_sum:min_terms=2,max_terms=2,min_digits=1,max_digits=1"


def sample(**parts: float | None) -> Sample:
    total = sum(part or 0.0 for part in parts.values())
    return Sample([1], [2], [0.0], [0], "", "stop", Judged(total, parts))


def test_each_reward_counts_by_its_weight_and_not_by_its_scale():
    parts_QGR = torch.tensor([[[1.0, 500.0], [0.0, 100.0], [0.0, 100.0], [1.0, 500.0]]], dtype=torch.float64)
    found = normalised_each(parts_QGR, torch.tensor([1.0, 0.5]).double())
    torch.testing.assert_close(found, torch.tensor([[1.5, -1.5, -1.5, 1.5]]).double())
    scaled = normalised_each(parts_QGR * torch.tensor([1e-4, 1e4]).double() + 7.0, torch.tensor([1.0, 0.5]).double())
    torch.testing.assert_close(scaled, found, atol=1e-8, rtol=0)


def test_what_was_not_given_counts_as_the_mean_and_what_all_have_as_nothing():
    parts_QGR = torch.tensor([[[0.7, math.nan], [0.7, 2.0], [0.7, 4.0]], [[1.0, math.nan]] * 3], dtype=torch.float64)
    found = normalised_each(parts_QGR, torch.ones(2, dtype=torch.float64))
    torch.testing.assert_close(found[0], torch.tensor([0.0, -1.0, 1.0], dtype=torch.float64))
    assert found[1].tolist() == [0.0, 0.0, 0.0]


def test_without_it_the_sum_is_what_it_was_to_the_bit():
    groups = [[sample(a=0.1, b=0.2), sample(a=0.7, b=None)]]
    assert rewards_of(groups, None).tolist() == [[0.1 + 0.2, 0.7]]


def test_a_group_is_informative_if_any_reward_tells_its_completions_apart():
    same_sums = [sample(a=1.0, b=0.0), sample(a=0.5, b=0.5), sample(a=0.5, b=0.5)]
    assert not informative(same_sums)
    assert informative(same_sums, {"a": 1.0, "b": 0.5}) and not informative(same_sums[1:], {"a": 1.0, "b": 0.5})


def test_parts_survive_a_checkpoint():
    kept = Sample.from_plain(json.loads(json.dumps(sample(a=0.25, b=None).plain())))
    assert kept.judged.parts == {"a": 0.25, "b": None}


def test_two_of_a_name_are_told_apart():
    names = [name for name, _, _ in weighted_rewards([{"name": "repetition", "n": n} for n in (1, 2, 3)])]
    assert names == ["repetition", "repetition#2", "repetition#3"]


def test_the_stream_hands_it_to_the_advantage():
    class Sampled(PolicyStream):
        def sync_weights(self):
            pass

        def collect_rollouts(self):
            group = [sample(small=0.01, large=3.0), sample(small=0.0, large=9.0)]
            return [group], [Rollouts([group], EngineWork(1, 1, 0))]

    examples = Mixture([[]], [1.0])
    settings = RolloutSettings(1, 2, 1, "group_centred", "token", 1, {}, 0, each={"small": 1.0, "large": 0.25})
    stream = Sampled(model=None, weights=None, examples=examples, settings=settings, selector=InTurn(examples))
    batch = next(stream)
    torch.testing.assert_close(batch.columns["advantage"][[0, 2]], torch.tensor([0.75, -0.75]))
    assert (batch.notes["reward/small"], batch.notes["reward/large"]) == (0.005, 6.0)


def test_a_critic_that_looks_at_no_group_is_refused(base, tmp_path):
    stage = f'{{name: policy, steps: 1, data: [{{path: "{FAMILY}"}}], normalise: each, critic: {{}}}}'
    assert_refused(tmp_path, base, stage, "baseline: true")


def learned(each: bool) -> float:
    """How often a policy of two actions, after some steps of GRPO, takes the one of which a small reward says that it
    is better, beside a large reward that is noise."""
    draw = torch.Generator().manual_seed(0)
    logit = torch.zeros(())
    for _ in range(400):
        chosen_QG = (torch.rand(4, 8, generator=draw) < logit.sigmoid()).double()
        parts_QGR = torch.stack([0.01 * chosen_QG, 50 * torch.rand(4, 8, generator=draw)], 2)
        rewards_QG = normalised_each(parts_QGR, torch.ones(2).double()) if each else parts_QGR.sum(2)
        advantages_QG = ADVANTAGES["group_relative"](rewards_QG)
        logit += 0.1 * (advantages_QG * (chosen_QG - logit.sigmoid())).mean()
    return float(logit.sigmoid())


def test_a_small_reward_beside_a_large_one_is_still_learned():
    assert learned(each=True) > 0.9
    assert learned(each=False) < 0.7


def test_a_run_from_end_to_end_goes_on_to_the_same_bits(base, tmp_path):
    """With dynamic sampling and two updates from a set of rollouts, stopped between the two."""
    recipe = recipe_of(
        tmp_path,
        f'{{name: policy, steps: 4, lr: 0.003, data: [{{path: "{FAMILY}"}}], prompts: 2, group: 3, max_tokens: 6, '
        "rewards: [{name: repetition, n: 1, unit: characters}, {name: length, max_length: 5, weight: 100}], "
        "updates: 2, dynamic: 2, evaluate_every: 0, save_every: 1, normalise: each}",
    )
    align(recipe, base, tmp_path / "whole", quiet=True)
    plain = Run.finished
    with pytest.MonkeyPatch.context() as patch:
        stopped = lambda run: plain(run) or setattr(run, "stopping", run.step == 3) or run.stopping  # noqa: E731
        patch.setattr(Run, "finished", stopped)
        assert align(recipe, base, tmp_path / "parts", quiet=True)["stages"][0]["outcome"] == "stopped"
    align(recipe, base, tmp_path / "parts", quiet=True)
    one, other = moesaic.load(tmp_path / "whole").state_dict(), moesaic.load(tmp_path / "parts").state_dict()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert {"reward/repetition", "reward/length"} <= read_metrics(tmp_path / "whole")[0].keys()
