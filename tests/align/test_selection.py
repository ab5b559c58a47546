"""Which questions are asked: those of middle difficulty, those of influence; and the same after a stop."""

from __future__ import annotations

import json

import pytest
import torch

import moesaic
from moesaic.align.align import align
from moesaic.align.examples import Mixture
from moesaic.align.rewards import Judged
from moesaic.align.rollouts.rollout import Sample
from moesaic.align.selection import Selection
from moesaic.align.selection.cropi import ByInfluence, Cropi, Shrink, distinct, gradient
from moesaic.align.selection.rlcs import ByDifficulty, Rlcs
from moesaic.align.selection.uniform import Uniform
from moesaic.errors import UserError
from moesaic.methods import Method, build
from moesaic.model.layout import Layout
from moesaic.train.run import Run
from moesaic.worlds.example import Example
from tests.align.made import assert_refused, recipe_of
from tests.matrix import SELECTIONS

FAMILY = "builtin:chain_sum:min_terms=2,max_terms=2,min_digits=1,max_digits=1"


@pytest.fixture(scope="module")
def model(base):
    return moesaic.load(base, threads=1)


def mixture(sources: int) -> Mixture:
    return Mixture([[Example(({"role": "user", "content": str(n)},)) for n in range(99)]] * sources, [1.0] * sources)


def group(rewards: list[float], prompt: list[int] | None = None, tokens: list[list[int]] | None = None):
    spoken = tokens or [[7, 8]] * len(rewards)
    return [
        Sample(prompt or [5, 6], said, [-1.0] * len(said), [1] * len(said), "", "stop", Judged(reward, {}))
        for reward, said in zip(rewards, spoken, strict=True)
    ]


def answered(share: float) -> list:
    return group([1.0] * round(8 * share) + [0.0] * (8 - round(8 * share)))


def test_weights_of_difficulties_by_hand():
    options = Rlcs(middle=0.5, sharpness=2.0, explore=0.1)
    assert [options.weight(rate) for rate in (0.0, 0.25, 0.5, 0.75, 1.0)] == pytest.approx([0.1, 0.325, 1, 0.325, 0.1])
    assert Rlcs(middle=0.25).weight(0.25) == 1 and Rlcs(middle=0.25, explore=0.1).weight(1.0) == pytest.approx(0.1)


def test_sources_of_middle_difficulty_are_asked_most():
    selector = ByDifficulty(Rlcs(), mixture(3), 0)
    for _ in range(60):
        for place in selector.choose(4):
            selector.learn(place, answered((0.0, 0.5, 1.0)[place[0]]))
    chosen = [place[0] for place in selector.choose(300)]
    assert chosen.count(1) > 200 and min(chosen.count(0), chosen.count(2)) > 3  # and nothing is forgotten
    assert selector.rates[0] < 0.2 and selector.rates[2] > 0.8 and abs(selector.rates[1] - 0.5) < 0.05
    # Every question of a source is asked once, in turn, where there is no pool.
    assert len(set(selector.choose(50))) == 50


def test_a_source_that_only_fails_is_found_out_within_some_questions():
    """Not within steps: by the time that steps have passed, the others may be learned."""
    selector = ByDifficulty(Rlcs(), mixture(3), 0)
    for _ in range(8):
        for source, share in enumerate((0.0, 0.5, 1.0)):
            selector.learn((source, 0), answered(share))
    chosen = [place[0] for place in selector.choose(300)]
    assert chosen.count(1) > 160


def test_a_source_half_mastered_and_half_hopeless_does_not_pass_for_middling():
    selector = ByDifficulty(Rlcs(), mixture(2), 0)
    for number in range(20):
        selector.learn((0, number), answered(number % 2))
        selector.learn((1, number), answered(0.5))
    assert selector.rates == pytest.approx([0.5, 0.5], abs=0.02)
    chosen = [place[0] for place in selector.choose(300)]
    assert chosen.count(1) > 220


def test_questions_of_a_pool_of_middle_difficulty_are_asked_most():
    selector = ByDifficulty(Rlcs(pool=9, decay=0.5), mixture(1), 0)
    for _ in range(40):
        for place in selector.choose(4):
            selector.learn(place, answered((0.0, 0.5, 1.0)[place[1] % 3]))
    chosen = [place[1] for place in selector.choose(300)]
    assert sum(number % 3 == 1 for number in chosen) > 200 and max(chosen) < 9


def test_more_is_asked_where_less_teaches():
    selector = ByDifficulty(Rlcs(oversample=3.0), mixture(1), 0)
    assert selector.needed(8) == 8
    for _ in range(200):
        for share in (0.5, 0.0):  # every other question teaches something
            selector.learn((0, 0), answered(share))
    assert selector.informative == pytest.approx(0.5, abs=0.03) and selector.needed(8) in (16, 17)
    for _ in range(400):
        selector.learn((0, 0), answered(0.0))
    assert selector.needed(8) == 24


def test_a_gradient_is_that_of_the_expected_reward(model):
    answers = [
        {"prompt": [5, 6, 7], "tokens": [8, 9], "learn": [True, True], "advantage": 0.5},
        {"prompt": [5, 6, 7], "tokens": [10], "learn": [True], "advantage": -0.5},
    ]
    found = gradient(model, answers)
    value = torch.zeros(())
    for answer in answers:
        tokens = torch.tensor(answer["prompt"] + answer["tokens"])
        log = model.logits_at(model(tokens, Layout([len(tokens)]))).log_softmax(-1)
        said = log[2:-1].gather(1, tokens[3:, None])
        value = value + answer["advantage"] * said.mean() / 2
    expected = torch.autograd.grad(value, list(model.parameters()), allow_unused=True)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other if other is not None else torch.zeros_like(one), rtol=1e-3, atol=1e-6)
    assert any(float(one.abs().max()) > 0 for one in found) and all(p.grad is None for p in model.parameters())


def test_shrunk_gradients_keep_their_inner_products():
    draw = torch.Generator().manual_seed(1)
    a, noise = torch.randn(20_000, generator=draw), torch.randn(20_000, generator=draw)
    b = 0.7 * a + 0.7 * noise
    shrink = Shrink(Cropi(validation=({"path": FAMILY},), kept=10_000, dims=2048), 0)
    small_a, small_b = shrink([a[:50], a[50:]]), shrink([b])
    assert len(small_a) == 2048
    assert float(small_a @ small_b) == pytest.approx(float(a @ b), rel=0.15)
    assert float(small_a @ shrink([noise])) == pytest.approx(0.0, abs=0.1 * float(a @ a))


def explored(good: dict[str, str], asked: list[list[str]]):
    """Of every prompt a right and a wrong completion, by what `good` says of it; prompts that are not in it are never
    better than another. `asked` is filled with what was asked for, call by call."""

    def explore(examples, seeds):
        assert len(set(seeds)) == len(examples)
        asked.append([example.question for example in examples])
        groups = []
        for example in examples:
            kind = good.get(example.question)
            pair = ([8], [9]) if kind != "opposite" else ([9], [8])
            groups.append(group([1.0, float(kind is None)], [5, 6, 7], [*pair]))
        return groups

    return explore


def influence_of(model, tmp_path, **options) -> tuple[ByInfluence, list[list[str]]]:
    """Twelve prompts of which 8 to 11 pull against the validation set, 5 and 6 nowhere; validation holds 0 to 3."""
    file = tmp_path / "validation.jsonl"
    file.write_text("\n".join(json.dumps({"question": str(n)}) for n in range(4)))
    good = {str(n): "opposite" if 8 <= n < 12 else "same" for n in range(99) if n not in (5, 6)}
    asked: list[list[str]] = []
    options = Cropi(**{"validation": ({"path": str(file)},), "validation_prompts": 4, "pool": 8} | options)
    return ByInfluence(options, mixture(1), model, 0, explored(good, asked)), asked


def test_questions_that_pull_where_validation_pulls_are_selected(model, tmp_path):
    selector, asked = influence_of(model, tmp_path, share=0.5, every=2)
    chosen = selector.choose(8)
    assert set(selector.selected) == {(0, 4), (0, 7), (0, 5), (0, 6)}
    assert sorted(chosen) == sorted(2 * selector.selected)  # each as often as the others
    notes = selector.notes()
    assert notes["influence_selected"] > notes["influence_all"] and selector.notes() == {}
    assert notes["explored"] == 2 * (8 + 4)


def test_validation_is_sampled_and_never_trained_on(model, tmp_path):
    selector, asked = influence_of(model, tmp_path, pool=6, share=1.0, every=1)
    assert [selector.examples[place].question for place in selector.pool] == ["4", "5", "6", "7", "8", "9"]
    for _ in range(3):
        assert {place[1] for place in selector.choose(6)} == set(range(4, 10))
    validation = ["0", "1", "2", "3"]
    assert [sorted(questions) for questions in asked] == [
        ["4", "5", "6", "7", "8", "9"],
        validation,
        validation,
        validation,
    ]
    stored, asked = influence_of(model, tmp_path, every=1, resample=False)
    for _ in range(3):
        stored.choose(2)
    assert len(asked) == 2  # pool and validation, once: from then on only gradients are computed anew


def test_what_is_trained_on_replaces_what_was_stored(model, tmp_path):
    selector, asked = influence_of(model, tmp_path, share=0.25, every=1)
    assert set(selector.choose(2)) == {(0, 4), (0, 7)}
    for place in ((0, 4), (0, 7)):
        selector.learn(place, group([1.0, 1.0]))  # mastered meanwhile: no gradient any more
    selector.choose(2)
    assert selector.influence[0, 4] == selector.influence[0, 7] == 0.0 > selector.influence[0, 8]


def test_a_pool_has_no_prompt_twice():
    examples = Mixture([[Example(({"role": "user", "content": str(n % 5)},)) for n in range(99)]], [1.0])
    assert distinct(examples, 8, []) == [(0, 0), (0, 1), (0, 2), (0, 3), (0, 4)]
    with pytest.raises(UserError, match="every prompt of data is in validation"):
        distinct(examples, 8, [examples[0, n] for n in range(5)])


def test_a_validation_set_that_cannot_be_is_refused_before_anything_is_done(base, tmp_path):
    start = f'{{name: policy, data: [{{path: "{FAMILY}"}}], selection: '
    assert_refused(tmp_path, base, start + "cropi}", "cropi wants validation")
    assert_refused(tmp_path, base, start + "{name: cropi, validation: [{path: no.jsonl}]}}", "no.jsonl")
    assert_refused(tmp_path, base, start + "{name: cropi, validation: [{file: a}]}}", "every source of data")
    world = "{name: policy, environment: cards, rewards: [{name: environment}], selection: "
    named = f'{{name: cropi, validation: [{{path: "{FAMILY}"}}]}}}}'
    assert_refused(tmp_path, base, world + named, "has tasks of its own, and validation names others")
    assert not (tmp_path / "out" / "config.json").exists()


def test_in_turn_sources_come_by_their_weights_and_every_prompt_once(model):
    examples = Mixture([[Example(({"role": "user", "content": str(n)},)) for n in range(99)]] * 2, [3.0, 1.0])
    places = Uniform().begin(examples, model, 3, explored({}, [])).choose(40)
    assert len(set(places)) == 40 and [source for source, _ in places].count(0) == 30


@pytest.mark.parametrize("name", SELECTIONS)
def test_every_selection_goes_on_from_its_state(model, name):
    selection = build(Method(name, SELECTIONS[name]), Selection, "test")
    whole, parts = [], []
    for interrupted in (False, True):
        selector = selection.begin(mixture(2), model, 3, explored({"3": "same"}, []))
        for _ in range(8):
            places = selector.choose(3)
            (parts if interrupted else whole).append(places)
            for place in places:
                selector.learn(place, group([1.0, float(sum(place) % 2)], [5, 6, sum(place)], [[8], [9]]))
            if interrupted:
                kept = json.loads(json.dumps(selector.state()))
                selector = selection.begin(mixture(2), model, 3, explored({"3": "same"}, []))
                selector.restore(kept)
    assert parts == whole and all(0 <= source < 2 for places in whole for source, _ in places)


CROPI = f'{{name: cropi, pool: 6, validation: [{{path: "{FAMILY}"}}], validation_prompts: 2, every: 1}}'


@pytest.mark.parametrize("selection", ["{name: rlcs, pool: 6}", CROPI], ids=["rlcs", "cropi"])
def test_a_stopped_run_asks_what_it_would_have_asked(base, tmp_path, selection, monkeypatch):
    recipe = recipe_of(
        tmp_path,
        f'{{name: policy, steps: 5, lr: 0.003, data: [{{path: "{FAMILY}"}}], prompts: 3, group: 3, max_tokens: 6, '
        f"rewards: [{{name: repetition, n: 1, unit: characters}}], selection: {selection}, dynamic: 2, "
        "evaluate_every: 0, save_every: 1, advantage: group_centred}",
    )
    align(recipe, base, tmp_path / "whole", quiet=True)
    plain = Run.finished
    monkeypatch.setattr(
        Run, "finished", lambda run: plain(run) or setattr(run, "stopping", run.step == 3) or run.stopping
    )
    assert align(recipe, base, tmp_path / "parts", quiet=True)["stages"][0]["outcome"] == "stopped"
    monkeypatch.undo()
    align(recipe, base, tmp_path / "parts", quiet=True)
    one, other = moesaic.load(tmp_path / "whole").state_dict(), moesaic.load(tmp_path / "parts").state_dict()
    assert all(torch.equal(one[name], other[name]) for name in one)
