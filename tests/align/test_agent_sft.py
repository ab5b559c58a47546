"""AgentTuning's recipe: the mix is as it says, and of a trajectory only what the assistant said is learned."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from moesaic.align.align import align
from moesaic.align.conversation import read_conversation
from moesaic.align.examples import FileExamples, open_examples
from moesaic.align.stages import Stage
from moesaic.data.packing import IGNORED
from moesaic.recipe import load_recipe
from tests.serve.made import talking_model

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "agent-sft.yaml"


def test_the_mix_is_one_trajectory_to_four_instructions(monkeypatch):
    monkeypatch.chdir(ROOT)
    stage = load_recipe(RECIPE, []).build("align.stages.0", Stage)
    examples = open_examples(stage.data, "train", 0)
    drawn = [next(examples) for _ in range(50)]
    assert sum("tools" in example.facts for example in drawn) == 10
    # Every stretch has the mix, not only the whole.
    assert all(sum("tools" in e.facts for e in drawn[start : start + 10]) == 2 for start in range(0, 50, 10))


def test_of_a_trajectory_calls_and_answers_are_learned_and_results_are_not(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    import moesaic

    model = moesaic.load(talking_model(tmp_path / "base", context=2048))
    for example in FileExamples(ROOT / "recipes" / "agent-trajectories.jsonl", 0).items:
        (said,) = read_conversation(model.tokenizer, example.conversation(), example.facts["tools"])
        learned = model.tokenizer.decode([t for t, learn in zip(said.tokens, said.learn) if learn], special=True)
        turns = [message for message in example.messages if message["role"] == "assistant"]
        assert learned.count("<|endoftext|>") == len(turns)
        for message in turns:
            assert message["content"] in learned
            for call in message.get("tool_calls", ()):
                assert f'"name": "{call["function"]["name"]}"' in learned
        assert '"parameters"' not in learned  # the tools' descriptions
        for message in example.messages:
            if message["role"] == "tool" and not any(message["content"] in turn["content"] for turn in turns):
                assert message["content"] not in learned


def test_the_recipe_runs_and_packs_whole_conversations(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    base = talking_model(tmp_path / "base", context=2048)
    recipe = load_recipe(RECIPE, ["align.stages.0.steps=3", "align.stages.0.max_length=2000"])
    out = tmp_path / "out"
    result = align(recipe, base, out, quiet=True)
    assert result["stages"][0]["outcome"] == "finished"
    import moesaic

    stage = replace(recipe.build("align.stages.0", Stage), batch_tokens=3000)
    stream = stage.stream(moesaic.load(base))
    batch = next(stream)
    assert stream.left_out == 0 and sum(batch.lengths) == len(batch.tokens_T) >= 3000
    assert 0 < int((batch.targets_T != IGNORED).sum()) == batch.count < len(batch.tokens_T)
