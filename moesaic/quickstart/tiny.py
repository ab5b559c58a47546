"""A tiny GLM-4.5-shaped mixture from nothing: data, loss law, pretraining, alignment, 4 bits, questions.

    life = TinyLife(Path("out/quickstart"), Console())
    life.run()

Everything lies in one directory: data/, pilots/, base/, aligned/, small/ and report.html.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

from moesaic.json_files import read_json
from moesaic.quickstart import summaries
from moesaic.quickstart.life import Life, Stage, finished

# Before a chat template: only the last question counts.
LAST = """{%- set last = namespace(user=0) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}
{%- set asked = messages[last.user] %}
"""
# What is said of a sum as it was in the lessons.
SUM = """{%- set sum = asked.content | replace(' ', '') | replace('=', '') %}
{%- set sum = sum | replace('+', ' + ') | replace('-', ' - ') %}
{%- set asked = dict(asked, content='State the final answer to the following arithmetic problem: ' + sum + ' =') %}
"""
THEN = """{%- set messages = [asked] + messages[last.user + 1:] %}
"""
# A model that knows sums alone takes what is no question of its lessons for a sum.
ALONE = LAST + "{%- if asked.content is string and ':' not in asked.content %}\n" + SUM + "{%- endif %}\n" + THEN


class TinyLife(Life):
    questions = 512
    pretrains, aligns = "tiny.yaml", "quickstart.yaml"
    pilot = 0.4  # of the steps of the long run
    template = ALONE
    calibration: ClassVar = {"samples": 64, "length": 128}

    def stages(self) -> dict[str, Stage]:
        return {
            "machine": Stage(
                "This machine", "What it is good at decides how the model is run.", self.machine, summaries.machine
            ),
            "data": Stage(
                "Data", "Text becomes tokens: Python's own library, questions with answers.", self.data, summaries.data
            ),
            "law": Stage(
                "Loss law", "Two short pilots tell how far the loss of the long run will fall.", self.law, summaries.law
            ),
            "base": Stage("Pretrain", "A GLM-4.5-shaped mixture learns to go on with text.", self.base, summaries.base),
            "aligned": Stage(
                "Align", "It learns to answer: from examples, then by trying (GRPO).", self.align, summaries.aligned
            ),
            "small": Stage("Compress", "Its weights are kept in 4 bits.", self.compress, summaries.small),
            "evaluated": Stage("Evaluate", "Questions that no stage ever saw.", self.evaluate, summaries.evaluated),
        }

    def models(self) -> dict[str, Path]:
        """The model after each stage."""
        return {
            "pretrained": self.out / "base",
            "taught": self.out / "aligned" / "stages" / "1-sft",
            "aligned": self.out / "aligned",
            "in 4 bits": self.out / "small",
        }

    def data(self) -> dict[str, Any]:
        from moesaic.data.preparation.prepare import prepare
        from moesaic.data.preparation.report import drawn

        with drawn() as show:
            prepare(self.recipe(self.pretrains), self.out / "data", show=show)
        self._tell_how_to_talk()
        manifest = read_json(self.out / "data" / "manifest.json")
        return {"sources": manifest["sources"], "vocabulary": manifest["vocabulary"]}

    def _tell_how_to_talk(self) -> None:
        """It learns single questions, and the likeliest answer is the best one: what talks to it is told so."""
        folder = self.out / "data" / "tokenizer"
        template = folder / "chat_template.jinja"
        if self.template not in (whole := template.read_text()):
            template.write_text(self.template + whole)
        end = read_json(self.out / "data" / "manifest.json")["end_of_document"]
        told = {"do_sample": False, "eos_token_id": end, "pad_token_id": end}
        (folder / "generation_config.json").write_text(json.dumps(told) + "\n")

    def law(self) -> dict[str, Any]:
        from moesaic.train.law.fit import fit
        from moesaic.train.law.predict import predict
        from moesaic.train.law.runs import read_runs

        recipe = self.recipe(self.pretrains)
        runs = [self.out / "pilots" / name for name in ("constant", "cosine")]
        for run in runs:
            self._pretrain(run, f"train.steps={int(self.pilot * recipe.train.steps)}", f"schedule={{name: {run.name}}}")
        fit(read_runs(runs, "loss")).save(self.out / "law.json")
        options = [f"{key}={value}" for key, value in recipe.schedule.options.items()]
        told = predict(self.out / "law.json", recipe.schedule.name, options, steps=recipe.train.steps)
        told.save(self.out / "prediction.json")
        return {"predicted": told.final, "steps": recipe.train.steps}

    def base(self) -> dict[str, Any]:
        return {**self._pretrain(self.out / "base"), "predicted": self.known["law"]["predicted"]}

    def align(self) -> dict[str, Any]:
        from moesaic.align.align import align
        from moesaic.train.report.metrics import read_metrics

        told = align(self.recipe(self.aligns), self.out / "base", self.out / "aligned")
        finished(told["stages"][-1])
        taught, tried = (read_metrics(self.models()[name]) for name in ("taught", "aligned"))
        return {
            "before": [line["accuracy"] for line in taught if "accuracy" in line][-1],
            "after": [line["accuracy"] for line in tried if "accuracy" in line][-1],
            "mismatch": max(line["mismatch_max"] for line in tried),
            "policy_steps": tried[-1]["step"],
        }

    def compress(self) -> dict[str, Any]:
        from moesaic.compress.methods.gptq import GPTQ

        return self.compress_with(GPTQ(bits=4, group=32), self.out / "aligned", **self.calibration)

    def _pretrain(self, out: Path, *overrides: str) -> dict[str, Any]:
        from moesaic.train.pretrain import pretrain

        recipe = self.recipe(self.pretrains, *overrides).changed(train={"data": str(self.out / "data")})
        return finished(pretrain(recipe, out))
