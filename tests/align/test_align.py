"""Stages end to end on a very small model: files, exact agreement of trainer and engine, exact resumption."""

from __future__ import annotations

import json
import shutil
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import moesaic
from moesaic.align.align import align
from moesaic.align.rollouts.replay_sft import ReplaySftOptions
from moesaic.align.stages import Stage
from moesaic.atomic import exclusive
from moesaic.errors import UserError
from moesaic.kernels import hardware
from moesaic.model import directory, lineage
from moesaic.recipe import load_recipe
from moesaic.train.run import Run
from tests.align.made import without_times
from tests.serve.made import talking_model

FAMILY = "builtin:chain_sum:min_terms=2,max_terms=2,min_digits=1,max_digits=1"
RECIPE = f"""
align:
  stages:
    - {{name: sft, steps: 3, lr: 0.01, data: [{{path: "{FAMILY}"}}], batch_tokens: 300, max_tokens: 4, evaluate: 4,
        evaluate_every: 3}}
    - {{name: policy, steps: 4, lr: 0.001, data: [{{path: "{FAMILY}"}}], prompts: 3, group: 4, max_tokens: 6,
        updates: 2,
        rewards: [{{name: length, weight: 0.1, max_length: 4, slack: 4}}, {{name: task}}], drafter: suffix, evaluate: 4,
        evaluate_every: 2, save_every: 1, advantage: group_centred}}
optimizer: {{name: adamw, lr: 0.001}}
"""


def recipe(path, text: str = RECIPE, overrides: list[str] | None = None):
    file = path / "align.yaml"
    file.write_text(text)
    return load_recipe(file, overrides or [])


def lines(path) -> list[dict]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def test_stages_follow_each_other_and_trainer_and_engine_agree(base, tmp_path):
    out = tmp_path / "out"
    result = align(recipe(tmp_path), base, out, quiet=True)
    assert [stage["stage"] for stage in result["stages"]] == ["sft", "policy"]
    assert [entry["stage"] for entry in lineage.read(out)][-2:] == ["sft", "policy"]
    taught = lines(out / "stages" / "1-sft")
    assert taught[-1]["loss"] < taught[0]["loss"] and "accuracy" in taught[-1]
    learned = lines(out)
    assert len(learned) == 4
    for line in learned:
        assert line["mismatch_max"] == 0.0 and line["mismatch_mean"] == 0.0
        assert line["routers_differ"] == 0.0
    for line in learned[::2]:  # each set of rollouts serves two steps
        assert line["staleness_max"] == 0 and line["accepted_per_step"] >= 0 and "reward" in line
    assert "accuracy" in learned[1]
    before, after = moesaic.load(out / "stages" / "1-sft"), moesaic.load(out)
    assert any(not torch.equal(a, b) for a, b in zip(before.parameters(), after.parameters(), strict=True))


def test_a_stopped_stage_goes_on_to_the_same_bits(base, tmp_path, monkeypatch):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    align(recipe(tmp_path), base, whole, quiet=True)

    # Stopped after every step, also between two updates from the same rollouts.
    started = {"at": 0}
    plain = Run.finished

    def finished(self: Run) -> bool:
        if self.step > started["at"] and not self.done():
            self.stopping = True
        return plain(self)

    monkeypatch.setattr(Run, "finished", finished)
    for _ in range(12):
        run_steps = [len(lines(p)) for p in (parts, parts / "stages" / "1-sft") if (p / "metrics.jsonl").exists()]
        started["at"] = min(run_steps, default=0) if len(run_steps) < 2 else run_steps[0]
        result = align(recipe(tmp_path), base, parts, quiet=True)
        if len(result["stages"]) == 2 and result["stages"][1]["outcome"] == "finished":
            break
    assert without_times(lines(parts)) == without_times(lines(whole))
    one, other = moesaic.load(whole).state_dict(), moesaic.load(parts).state_dict()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_stage_killed_before_its_first_checkpoint_resumes_in_its_dtype(base, tmp_path, monkeypatch):
    """Begun where bfloat16 is fast, and gone on with where it is not."""
    directory.save(moesaic.load(base), tmp_path / "half", dtype=torch.bfloat16)
    asked, plain = of_stages(tmp_path, SFT), Run.log_step

    def killed(self: Run, *given: Any) -> None:
        raise InterruptedError

    monkeypatch.setattr(hardware, "half_is_fast", lambda kind: True)
    align(asked, tmp_path / "half", tmp_path / "whole", quiet=True)
    monkeypatch.setattr(Run, "log_step", killed)
    with pytest.raises(InterruptedError):
        align(asked, tmp_path / "half", tmp_path / "parts", quiet=True)
    monkeypatch.setattr(Run, "log_step", plain)
    monkeypatch.setattr(hardware, "half_is_fast", lambda kind: False)
    align(asked, tmp_path / "half", tmp_path / "parts", quiet=True)
    one, other = (load_file(tmp_path / out / "model.safetensors") for out in ("whole", "parts"))
    assert {tensor.dtype for name, tensor in one.items() if "norm" in name} == {torch.bfloat16}
    assert all(torch.equal(one[name], other[name]) for name in one)
    told = of_stages(tmp_path, SFT).changed(train={"dtype": "float32"})
    align(told, tmp_path / "half", tmp_path / "told", quiet=True)
    assert load_file(tmp_path / "told" / "model.safetensors")["model.norm.weight"].dtype == torch.float32


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        ("{name: nothing}", "no such method"),
        ("{name: sft, step: 3}", "no such option of sft"),
        ("{name: sft, data: []}", "names no source"),
        ('{name: sft, data: [{path: "builtin:nothing"}]}', "no family of tasks"),
        ('{name: sft, data: [{path: "builtin:aritmetic"}]}', "did you mean arithmetic?"),
        ('{name: sft, data: [{path: "none.jsonl"}]}', "cannot be read"),
        (f'{{name: policy, data: [{{path: "{FAMILY}"}}], group: 1}}', "group at least 2"),
        (f'{{name: policy, data: [{{path: "{FAMILY}"}}], advantage: x}}', "advantage is one of"),
        (f'{{name: policy, data: [{{path: "{FAMILY}"}}], rewards: [{{name: nothing}}]}}', "no such method"),
        (f'{{name: policy, data: [{{path: "{FAMILY}"}}], objective: {{clp: 1}}}}', "no such option of policy"),
    ],
)
def test_a_bad_stage_is_refused_before_it_begins(base, tmp_path, stage, message):
    with pytest.raises(UserError, match=message):
        align(recipe(tmp_path, f"align: {{stages: [{stage}]}}"), base, tmp_path / "out", quiet=True)


SFT = f'{{name: sft, steps: 2, data: [{{path: "{FAMILY}"}}], batch_tokens: 200, evaluate: 0}}'
MORE = f'{{name: policy, steps: 1, data: [{{path: "{FAMILY}"}}], prompts: 1, group: 2, max_tokens: 2, evaluate: 0}}'


def of_stages(path, *stages: str):
    return recipe(path, f"align: {{stages: [{', '.join(stages)}]}}")


def test_a_stage_may_have_an_optimizer_of_its_own(base, tmp_path):
    """The same weights as where the whole recipe has it, and the other stages keep theirs."""
    muon = "optimizer: {name: muon, lr: 0.02, weight_decay: 0.1}"
    own = SFT.replace("steps: 2", f"steps: 2, {muon}")
    align(of_stages(tmp_path, own, SFT), base, tmp_path / "out", quiet=True)
    first = tmp_path / "out/stages/1-sft"
    align(recipe(tmp_path, f"align: {{stages: [{SFT}]}}\n{muon}"), base, tmp_path / "whole", quiet=True)
    align(of_stages(tmp_path, SFT), first, tmp_path / "next", quiet=True)
    plain, stage, whole, last, after = (
        (place / "model.safetensors").read_bytes()
        for place in (base, first, tmp_path / "whole", tmp_path / "out", tmp_path / "next")
    )
    assert stage == whole != plain and last == after
    assert align(of_stages(tmp_path, own, SFT), base, tmp_path / "out", quiet=True)["stages"]  # nothing is left to do
    with pytest.raises(UserError, match="with optimizer {'name': 'muon'.* and none is asked for"):
        align(of_stages(tmp_path, SFT, SFT), base, tmp_path / "out", quiet=True)


@pytest.fixture(scope="module")
def begun(base, tmp_path_factory):
    out = tmp_path_factory.mktemp("begun") / "out"
    align(of_stages(out.parent, SFT), base, out, quiet=True)
    return out


class TestAnOutThatHoldsSomething:
    def test_a_moved_model_is_the_same_one(self, base, begun, tmp_path):
        shutil.copytree(base, tmp_path / "moved")
        shutil.copytree(begun, tmp_path / "out", symlinks=True)
        more = of_stages(tmp_path, SFT.replace("steps: 2", "steps: 3"))
        align(more, tmp_path / "moved", tmp_path / "out", quiet=True)
        assert len(lines(tmp_path / "out")) == 3

    def test_another_model_is_refused(self, begun, tmp_path):
        other = talking_model(tmp_path / "other", seed=1)
        with pytest.raises(UserError, match=f"was not started from the weights of {other}"):
            align(of_stages(tmp_path, SFT), other, begun, quiet=True)

    @pytest.mark.parametrize(
        ("stages", "problem"),
        [
            ([MORE], "holds a run of sft, not of policy"),
            ([SFT, MORE], r"holds a model, and stage 1 \(sft\), which comes before it, is not done"),
            ([SFT, SFT], "is not done"),
            ([SFT.replace("[{", f'[{{path: "{FAMILY}"}}, {{')], "holds a run of sft with data .*, and .* is asked for"),
            ([SFT.replace("steps: 2", "steps: 2, lr: 0.5")], "a run of sft with lr none, and 0.5 is asked for"),
            ([SFT.replace("200", "300")], "with batch_tokens 200, and 300 is asked for"),
        ],
    )
    def test_other_stages_are_refused_before_anything_is_done(self, base, begun, tmp_path, stages, problem):
        with pytest.raises(UserError, match=problem):
            align(of_stages(tmp_path, *stages), base, begun, quiet=True)
        assert not (begun / "stages").exists()

    def test_what_is_measured_and_saved_may_change(self, base, begun, tmp_path):
        shutil.copytree(begun, tmp_path / "out", symlinks=True)
        more = SFT.replace("steps: 2", "steps: 3, save_every: 1").replace("evaluate: 0", "evaluate: 2")
        align(of_stages(tmp_path, more), base, tmp_path / "out", quiet=True)
        assert "accuracy" in lines(tmp_path / "out")[-1]

    def test_an_earlier_stage_that_is_done_cannot_become_another(self, base, tmp_path):
        """Changed, removed, added, exchanged and made longer: all refused, with what is there left as it is."""
        other, last = SFT.replace("steps: 2", "steps: 1"), MORE.replace("{name", '{critic: {model: "stage:1"}, name')
        teacher = f'{{name: distill, steps: 1, teacher: "stage:1", data: [{{path: "{FAMILY}"}}], evaluate: 0}}'
        out = tmp_path / "out"
        align(of_stages(tmp_path, SFT, other, teacher), base, out, quiet=True)
        shutil.move(out, tmp_path / "moved")  # what stage:1 means goes with it
        out = tmp_path / "moved"
        align(of_stages(tmp_path, SFT, other, teacher), base, out, quiet=True)
        before = {place: (place / "metrics.jsonl").read_bytes() for place in (out, *(out / "stages").iterdir())}
        for changed, problem in (
            ([SFT.replace("200", "300"), other, teacher], "1-sft: holds a run of sft with batch_tokens 200, and 300"),
            ([SFT.replace("steps: 2", "steps: 4"), other, teacher], r"stage 1 \(sft\), which comes before it, is not"),
            ([SFT, teacher], "2-sft: holds a run, and the recipe's stages are sft, distill"),
            ([SFT, MORE, other, teacher], "2-sft: holds a run, and the recipe's stages are sft, policy, sft, distill"),
            ([SFT, other, last], "holds a run of distill, not of policy"),
            ([SFT, other, teacher.replace("stage:1", "stage:2")], "with teacher .*1-sft, and .*2-sft is asked for"),
        ):
            with pytest.raises(UserError, match=problem) as refused:
                align(of_stages(tmp_path, *changed), base, out, quiet=True)
            assert refused.value.remedy.startswith("Name another --out")
        assert before == {place: (place / "metrics.jsonl").read_bytes() for place in before}


def test_completions_are_shown_once_whichever_step_is_evaluated(base, tmp_path):
    """Of each set of rollouts, though two steps are taken from it; the second alone is measured, or both are."""
    stage = MORE.replace("steps: 1", "steps: 4, updates: 2").replace("group: 2", "group: 4").replace("task", "length")
    for every, steps in ((2, {2, 4}), (1, {1, 3})):
        out = tmp_path / str(every)
        asked = stage.replace("evaluate: 0", f"evaluate: 2, evaluate_every: {every}")
        align(of_stages(tmp_path, asked), base, out, quiet=True)
        events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
        shown = [(event["step"], event["text"]) for event in events if event["kind"] == "sample"]
        assert {step for step, _ in shown} == steps and len(set(shown)) == len(shown)


BAD = {
    "PAIRS": '{"prompt": "a", "chosen": "b"}',
    "MARGIN": '{"prompt": "a", "chosen": "b", "rejected": "c", "margin": NaN}',
    "TOOLS": '{"prompt": "a", "chosen": "b", "rejected": "c", "tools": "python"}',
    "EMPTY": '{"messages": [], "chosen": "b", "rejected": "c"}',
    "UNSAID": '{"prompt": "a", "chosen": [{"role": "user", "content": "b"}], "rejected": "c"}',
    "ANSWERED": '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}',
    "STRANGER": '{"messages": [{"role": "stranger", "content": "a"}], "answer": "b"}',
    "SILENT": '{"messages": [{"role": "user"}, {"role": "assistant", "content": "b"}]}',
    "CALLS": '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [{"a": 1}]}]}',
    "LABEL": '{"prompt": "a", "answer": "b", "steps": [{"text": "b", "label": 2}]}',
}
# Of a policy stage: what an option may not be, and what is said then.
WRONG_OPTIONS = {
    "lr: 1e300": "lr must be above 0 and at most 1000",
    "seed: 18446744073709551616": "align.stages.1.seed: must be less than",
    "objective: {clp: 1}": "no such option of policy",
    "optimizer: nothing": "no such method",
    "optimizer: {name: muon, rate: 1}": "no such option of muon",
    "rewards: [{name: nothing}]": "no such method",
    "rewards: [{name: task, weight: much}]": "the weight of task is text",
    "selection: nothing": "no such method",
    "drafter: nothing": "no such method",
    "environment: nothing": "no such method",
    "rewards: [{name: model, path: nowhere}]": "nowhere",
    "temperature: 0": "temperature is above 0",
    "top_p: 2": "top_p: must be above 0 and at most 1",
    "objective: {temperature: 2}": "temperature is the stage's own option",
    "objective: {replay: true}, record_routes: false": "replay wants record_routes",
    "rewards: []": "rewards names no reward",
    "rewards: [{name: task, weight: .nan}]": "the weight of task is nan",
    "environment: {name: retrieval, path: nowhere}": "nowhere: cannot be read",
    "environment: {name: retrieval, path: LABEL, turns: 0}": "at least one turn",
    "environment: {name: tool_use, tools: [{name: search, path: no}]}": "no: cannot",
    "environment: {name: planner, executor: nowhere}": "nowhere: no such directory",
}


@pytest.mark.parametrize(
    ("later", "message"),
    [
        *((MORE.replace("prompts: 1", option), message) for option, message in WRONG_OPTIONS.items()),
        (MORE.replace("steps: 1", "steps: 0"), "align.stages.1.steps: must be greater than 0"),
        (MORE.replace(FAMILY, "none.jsonl"), "none.jsonl: cannot be read"),
        (MORE.replace(f'"{FAMILY}"', "PAIRS"), "task can judge nothing: no prompt of data has a family of tasks"),
        ("{name: rejection, data: [{path: PAIRS}]}", "task can judge nothing: no prompt of data has a family of tasks"),
        ("{name: preference, data: [{path: PAIRS}]}", "pairs.jsonl:1: has no rejected answer"),
        ("{name: preference, data: [{path: MARGIN}]}", "margin.jsonl:1: its margin is nan"),
        ("{name: preference, data: [{path: TOOLS}]}", "tools.jsonl:1: tools is not a list"),
        ("{name: preference, data: [{path: EMPTY}]}", "empty.jsonl:1: messages is empty"),
        ("{name: preference, data: [{path: UNSAID}]}", "unsaid.jsonl:1: its chosen answer holds nothing that an assis"),
        ("{name: reward_model, data: [{path: MARGIN}]}", "margin.jsonl:1: its margin is nan"),
        ("{name: reward_model, data: [{path: LABEL}]}", "label.jsonl:1: a step's label is 2"),
        ("{name: policy, data: [{path: ANSWERED}], rewards: [{name: format}]}", "answered.jsonl:1: ends with what"),
        ("{name: rejection, data: [{path: ANSWERED}], rewards: [{name: format}]}", "answered.jsonl:1: ends with what"),
        ("{name: distill, teacher: BASE, on: policy, data: [{path: ANSWERED}]}", "answered.jsonl:1: ends with what"),
        ("{name: sft, data: [{path: SILENT}]}", r"silent.jsonl:1: message 1 \(user\) has no text as its content"),
        ("{name: sft, data: [{path: CALLS}]}", r"calls.jsonl:1: tool_calls of message 2 \(assistant\) is not"),
        (MORE.replace(f'"{FAMILY}"', f'"{FAMILY}", weight: .inf'), "the weight of a source is a number above 0"),
        ("{name: rejection, data: [{path: LABEL}], rewards: [{name: exact}], temperature: -1}", "temperature: must be"),
        ("{name: distill, teacher: BASE, on: policy, data: [{path: LABEL}], temperature: -1}", "temperature: must be"),
        ("{name: distill, teacher: nowhere, data: [{path: PAIRS}]}", "pairs.jsonl:1: holds nothing that an"),
        (f'{{name: distill, teacher: nowhere, data: [{{path: "{FAMILY}"}}]}}', "nowhere: no such directory"),
        ('{name: sft, data: [{path: "stage:2/kept.jsonl"}]}', "1 before the one that names it"),
    ],
)
def test_a_later_stage_is_looked_at_before_the_first_is_run(base, tmp_path, later, message):
    later = later.replace("BASE", str(base))
    for name, line in BAD.items():
        (tmp_path / f"{name.lower()}.jsonl").write_text(line)
        later = later.replace(name, str(tmp_path / f"{name.lower()}.jsonl"))
    asked = of_stages(tmp_path, SFT, later)
    with pytest.raises(UserError, match=message):
        align(asked, base, tmp_path / "out", quiet=True)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("stage", "options"),
    [
        ('name: sft, data: [{path: "builtin:sums"}], longest: 99', {"max_length": 99}),
        ("name: preference, data: [{path: pairs.jsonl}], longest: 99", {"max_length": 99}),
        ("name: reward_model, data: [{path: pairs.jsonl}], longest: 99", {"max_length": 99}),
        ("name: rejection, data: [{path: a.jsonl}], questions: 7, longest: 99", {"prompts": 7, "max_length": 99}),
        (
            "name: distill, teacher: large, data: [{path: a.jsonl}], longest: 99, softness: 2.0",
            {"max_length": 99, "kl_temperature": 2.0},
        ),
        (
            "name: policy, data: [{path: a.jsonl}], remember: {data: [{path: chats.jsonl}], longest: 99}",
            {"replay_sft": ReplaySftOptions(data=({"path": "chats.jsonl"},), max_length=99)},
        ),
    ],
)
def test_options_by_their_names_of_the_last_version(tmp_path, capsys, stage, options):
    built = recipe(tmp_path, f"align: {{stages: [{{{stage}}}]}}").build("align.stages.0", Stage)
    assert {name: getattr(built, name) for name in options} == options
    assert capsys.readouterr().err.count("is now called") >= 1


@pytest.mark.parametrize(
    "stage",
    [
        "{name: policy, data: [{path: BAD}], rewards: [{name: exact}], evaluate_every: 0}",
        "{name: policy, data: [{path: BAD}], rewards: [{name: exact}], environment: tool_use, evaluate_every: 0}",
        "{name: rejection, data: [{path: BAD}], rewards: [{name: exact}], evaluate_every: 0}",
        "{name: distill, teacher: BASE, on: policy, data: [{path: BAD}], evaluate_every: 0}",
    ],
)
def test_a_prompt_that_the_template_refuses_is_told_by_its_line(base, tmp_path, stage):
    (tmp_path / "bad.jsonl").write_text(BAD["STRANGER"])
    asked = of_stages(tmp_path, stage.replace("BASE", str(base)).replace("BAD", str(tmp_path / "bad.jsonl")))
    with pytest.raises(UserError, match='bad.jsonl:1: the chat template refuses the messages \\(no role "stranger"'):
        align(asked, base, tmp_path / "out", quiet=True)


def test_two_at_once(base, tmp_path):
    with exclusive(tmp_path / "out"):
        with pytest.raises(UserError, match="another moesaic is writing here"):
            align(recipe(tmp_path), base, tmp_path / "out", quiet=True)
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_aligned_is_refused(base, tmp_path):
    with pytest.raises(UserError, match="align.stages is empty"):
        align(recipe(tmp_path, "train: {steps: 1}"), base, tmp_path / "out", quiet=True)
    with pytest.raises(UserError, match="is the model itself"):
        align(recipe(tmp_path), base, base, quiet=True)
