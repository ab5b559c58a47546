"""LoRA in the stages of alignment: what is trained, that trainer and engine agree, and what `peft` makes of it."""

from __future__ import annotations

import json
from pathlib import Path

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file

import moesaic
from moesaic.align.align import align, begin
from moesaic.align.lora import LoraOptions
from moesaic.align.stages import Stage
from moesaic.errors import UserError
from moesaic.model import lineage
from moesaic.model.formats.matching import match
from moesaic.model.formats.opening import open_checkpoint
from moesaic.model.lora import FOLDER, Lora
from moesaic.parallel.layout import ParallelLayout
from moesaic.serve.core.request import Sampling
from moesaic.train.run import Run
from tests.align.made import ADAMW, assert_refused, recipe_of, without_times
from tests.align.test_align import lines

FAMILY = "builtin:chain_sum:min_terms=2,max_terms=2,min_digits=1,max_digits=1"
LORA = "lora: {rank: 3, alpha: 7}"
ALL = f'data: [{{path: "{FAMILY}"}}], evaluate_every: 0, {LORA}'
SFT = f"{{name: sft, steps: 4, {ALL}, batch_tokens: 200, save_every: 2}}"
PAIRS = f"{{name: preference, steps: 2, {ALL}, pairs: 20, batch_pairs: 4}}"
POLICY = (
    f"{{name: policy, steps: 4, {ALL}, prompts: 2, group: 3, max_tokens: 5, updates: 2, save_every: 1, "
    "rewards: [{name: length, max_length: 3, slack: 3}], objective: {kl: 0.1}}"
)
PROMPTS = [[5, 9, 33, 7, 60], [90, 4, 4, 51]]
FAST = ADAMW.replace("0.001", "0.02")


@pytest.fixture(scope="module")
def aligned(base, tmp_path_factory) -> Path:
    """SFT, DPO and GRPO, each an adapter on what the one before made."""
    folder = tmp_path_factory.mktemp("aligned")
    align(recipe_of(folder, SFT, PAIRS, POLICY, more=FAST), base, folder / "out", quiet=True)
    return folder / "out"


def stages(aligned: Path, base: Path) -> list[tuple[Path, Path]]:
    """The model each stage began with, and what it made."""
    made = [aligned / "stages" / "1-sft", aligned / "stages" / "2-preference", aligned]
    return list(zip([base, *made], made))


def test_peft_loads_what_every_stage_made_with_equal_logits(aligned, base):
    for before, made in stages(aligned, base):
        plain = transformers.AutoModelForCausalLM.from_pretrained(before, dtype=torch.float32)
        changed = torch.cat(moesaic.load(before).logits(PROMPTS))
        theirs = peft.PeftModel.from_pretrained(plain, made / FOLDER).eval()
        with torch.no_grad():
            expected = torch.cat([theirs(torch.tensor([prompt])).logits[0] for prompt in PROMPTS])
        found = torch.cat(moesaic.load(made).logits(PROMPTS))
        assert (found - changed).abs().max() > 0.01, "nothing was learned"
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_the_engine_serves_it_beside_the_base(aligned, base):
    before, made = stages(aligned, base)[0]
    engine = moesaic.Engine(moesaic.load(before))
    engine.load_adapter("mine", made / FOLDER)
    wishes = {"max_tokens": 6, "temperature": 0.0, "ignore_eos": True, "logprobs": 0}
    for model, adapter in ((made, "mine"), (before, None)):
        merged = moesaic.Engine(moesaic.load(model)).generate(PROMPTS, **wishes)
        beside = engine.generate(PROMPTS, adapter=adapter, **wishes)
        assert [one.tokens for one in beside] == [one.tokens for one in merged]
        for one, other in zip(beside, merged, strict=True):
            for here, there in zip(one.logprobs, other.logprobs, strict=True):
                assert here.logprob == pytest.approx(there.logprob, abs=1e-4)


def test_what_is_no_target_keeps_its_bits_and_the_rest_is_of_low_rank(aligned, base):
    before, after = (moesaic.load(place).state_dict() for place in (base, aligned / "stages" / "1-sft"))
    assert list(before) == list(after)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {f"layers.{n}.attention.{name}.weight" for n in range(3) for name in ("qkv", "out")}
    for name in changed:
        parts = 3 if name.endswith("qkv.weight") else 1  # queries, keys and values have an adapter each
        sizes = torch.linalg.svdvals((after[name] - before[name]).double())
        assert (sizes > 1e-3 * sizes[0]).sum() == 3 * parts, name


def test_trainer_and_engine_agree_to_the_bit(aligned):
    learned = lines(aligned)
    assert [line["mismatch_max"] for line in learned] == [0.0] * 4
    assert [line["routers_differ"] for line in learned] == [0.0] * 4
    assert learned[-1]["loss/kl"] > 0.0 == learned[0]["loss/kl"], "the reference is the base, without the adapter"


def test_adapters_say_where_they_come_from(aligned, base):
    for before, made in stages(aligned, base):
        settings = json.loads((made / FOLDER / "adapter_config.json").read_text())
        assert settings["base_model_name_or_path"] == str(before)
        assert settings["target_modules"] == ["k_proj", "o_proj", "q_proj", "v_proj"]
        assert (settings["r"], settings["lora_alpha"]) == (3, 7.0)
        assert lineage.read(made / FOLDER) == lineage.read(made)
        assert not any(file.is_symlink() for file in (made / FOLDER).iterdir())
    notes = [json.loads(line) for line in (aligned / "events.jsonl").read_text().splitlines()]
    assert any("LoRA of rank 3 on 12 matrices" in str(note) for note in notes)


@pytest.mark.parametrize("stage", ["sft", "policy"])
def test_a_stopped_stage_goes_on_to_the_same_bits(base, tmp_path, monkeypatch, stage):
    critic = POLICY.replace("updates: 2", "updates: 2, critic: {lr: 0.01}")
    recipe = recipe_of(tmp_path, {"sft": SFT, "policy": critic}[stage], more=FAST)
    align(recipe, base, tmp_path / "whole", quiet=True)
    started = {"at": 0}
    plain = Run.finished

    def finished(self: Run) -> bool:
        if self.step > started["at"] and not self.done():
            self.stopping = True
        return plain(self)

    monkeypatch.setattr(Run, "finished", finished)
    for step in range(4):
        started["at"] = step
        align(recipe, base, tmp_path / "parts", quiet=True)
    assert without_times(lines(tmp_path / "parts")) == without_times(lines(tmp_path / "whole"))
    for file in ("model.safetensors", f"{FOLDER}/adapter_model.safetensors"):
        one, other = load_file(tmp_path / "whole" / file), load_file(tmp_path / "parts" / file)
        assert all(torch.equal(one[name], other[name]) for name in one | other)


def bytes_of(tensors) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.parametrize("stage", ["sft", "preference", "policy"])
def test_memory_of_gradients_and_optimizer_is_that_of_the_adapter(base, tmp_path, stage):
    recipe = recipe_of(tmp_path, {"sft": SFT, "preference": PAIRS, "policy": POLICY}[stage], more=ADAMW)
    made = recipe.build("align.stages.0", Stage)
    run = begin(recipe, made, stage, base, tmp_path / "out", quiet=True)
    assert isinstance(run.model.lora, Lora)
    trained = bytes_of(run.model.lora.parameters())
    with run:
        run.forward_backward(run.next_batch())
        gradients = bytes_of(p.grad for p in run.model.parameters() if p.grad is not None)
        run.optimizer_step()
        run.stopping = True
    state = bytes_of(tensor for name, tensor in run.optimizer.state_dict().items() if "exp_avg" in name)
    assert gradients == trained and state == 2 * trained
    assert trained < bytes_of(moesaic.load(base).parameters()) / 10
    if stage == "policy":  # the reference is no second copy
        shared = {p.data_ptr() for p in run.model.parameters()}
        assert run.data.reference.lora is None
        assert {p.data_ptr() for p in run.data.reference.parameters()} < shared


def test_few_targets_and_biases_that_balance(base, tmp_path):
    """Balancing biases are no part of an adapter, so they stay too."""
    stage = SFT.replace("alpha: 7", "alpha: 7, targets: [v_proj]")
    align(recipe_of(tmp_path, stage, more=FAST + "\nbalance: {bias_rate: 0.1}"), base, tmp_path / "out", quiet=True)
    before, after = (moesaic.load(place).state_dict() for place in (base, tmp_path / "out"))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {f"layers.{n}.attention.qkv.weight" for n in range(3)}
    for name in changed:
        assert torch.equal(before[name][:96], after[name][:96]), "queries and keys are no targets"


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        (SFT.replace("rank: 3", "rank: 0"), "rank is at least 1"),
        (SFT.replace("rank: 3", "rang: 3"), "lora.rang: no such option of sft"),
        (SFT.replace("alpha: 7", "targets: [q_prj]"), "no matrix is called q_prj; did you mean q_proj"),
        (
            SFT.replace("alpha: 7", "targets: [experts]"),
            "experts cannot be corrected: routed experts and routers",
        ),
        (POLICY.replace("updates: 2", "asynchronous: {workers: 1}"), "lora does not go with asynchronous"),
    ],
)
def test_what_cannot_be_trained_is_refused_by_name(base, tmp_path, stage, message):
    assert_refused(tmp_path, base, stage, message)
    assert not (tmp_path / "out").exists()


def test_where_it_cannot_be_trained_is_refused_by_name(base, tmp_path, monkeypatch):
    source = open_checkpoint(base)
    config, _ = match(source)
    recipe, lora = recipe_of(tmp_path, SFT, more=ADAMW), LoraOptions()
    lora.check(recipe, source, config, ParallelLayout(), "lora")
    with pytest.raises(UserError, match="an adapter is trained by one process"):
        lora.check(recipe, source, config, ParallelLayout(dp=2), "lora")
    for more, key in (("{constraint: quantized}", "constraint"), ("{indexer: {warmup_steps: 2}}", "indexer")):
        asked = recipe_of(tmp_path, SFT, more=f"{ADAMW}\ntrain: {more}")
        with pytest.raises(UserError, match=f"train.{key}: changes weights that an adapter leaves as they are"):
            lora.check(asked, source, config, ParallelLayout(), "lora")
    monkeypatch.setattr(source, "quantized", lambda *given: None, raising=False)
    with pytest.raises(UserError, match="the base is quantized.*QLoRA"):
        lora.check(recipe, source, config, ParallelLayout(), "lora")


def test_a_changed_adapter_is_refused_over_a_run(base, tmp_path):
    align(recipe_of(tmp_path, SFT, more=ADAMW), base, tmp_path / "out", quiet=True)
    with pytest.raises(UserError, match="holds a run of sft with lora"):
        align(recipe_of(tmp_path, SFT.replace("rank: 3", "rank: 4"), more=ADAMW), base, tmp_path / "out", quiet=True)


def test_a_finished_run_goes_on(base, tmp_path):
    for steps in (2, 4):
        stage = SFT.replace("steps: 4", f"steps: {steps}")
        align(recipe_of(tmp_path, stage, more=ADAMW), base, tmp_path / "out", quiet=True)
    assert len(lines(tmp_path / "out")) == 4
    assert moesaic.Engine(moesaic.load(tmp_path / "out")).generate([PROMPTS[0]], **vars(Sampling(max_tokens=2)))
