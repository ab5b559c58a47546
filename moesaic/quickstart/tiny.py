"""A tiny GLM-4.5-shaped mixture from scratch: data, loss law, pretraining, SFT, GRPO, 4-bit quantization, evaluation.

    life = TinyLife(Path("out/quickstart"), Console())
    life.run()

Everything is in one directory: data/, pilots/, base/, aligned/, small/ and report.html.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

from moesaic.json_files import read_json
from moesaic.quickstart import summaries
from moesaic.quickstart.life import MACHINE, Life, Stage, finished

# Before a chat template: only the last user message counts.
LAST = """{%- set last = namespace(user=0) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}
{%- set asked = messages[last.user] %}
"""
# A sum in the words of the training data.
SUM = """{%- set sum = asked.content | replace(' ', '') | replace('=', '') %}
{%- set sum = sum | replace('+', ' + ') | replace('-', ' - ') %}
{%- set asked = dict(asked, content='State the final answer to the following arithmetic problem: ' + sum + ' =') %}
"""
THEN = """{%- set messages = [asked] + messages[last.user + 1:] %}
"""
# A model trained on sums alone takes whatever is no question of its training data for a sum.
ALONE = LAST + "{%- if asked.content is string and ':' not in asked.content %}\n" + SUM + "{%- endif %}\n" + THEN


class TinyLife(Life):
    questions = 512
    pretrains, aligns = "tiny.yaml", "quickstart.yaml"
    pilot = 0.4  # steps of a pilot run, as a share of those of the long run
    template = ALONE
    calibration: ClassVar = {"samples": 64, "length": 128}

    def stages(self) -> dict[str, Stage]:
        return {
            "machine": Stage(*MACHINE, self.machine, summaries.machine),
            "data": Stage(
                "Data", "Tokenize Python's standard library, and questions with answers.", self.data, summaries.data
            ),
            "law": Stage(
                "Loss law", "Two short pilot runs predict the final loss of the long one.", self.law, summaries.law
            ),
            "base": Stage("Pretrain", "A GLM-4.5-shaped mixture of experts.", self.base, summaries.base),
            "aligned": Stage(
                "Align",
                "Supervised fine-tuning (SFT), then reinforcement learning (GRPO).",
                self.align,
                summaries.aligned,
            ),
            "small": Stage("Compress", "Weights quantized to 4 bits.", self.compress, summaries.small),
            "evaluated": Stage("Evaluate", "Accuracy on held-out questions.", self.evaluate, summaries.evaluated),
        }

    def models(self) -> dict[str, Path]:
        """The model after each stage."""
        return {
            "pretrained": self.out / "base",
            "SFT": self.out / "aligned" / "stages" / "1-sft",
            "GRPO": self.out / "aligned",
            "4-bit": self.out / "small",
        }

    def data(self) -> dict[str, Any]:
        from moesaic.data.preparation.prepare import prepare
        from moesaic.data.preparation.report import progress_bar

        with progress_bar() as on_status:
            prepare(self.recipe(self.pretrains), self.out / "data", on_status=on_status)
        self._write_chat_settings()
        manifest = read_json(self.out / "data" / "manifest.json")
        return {"sources": manifest["sources"], "vocabulary": manifest["vocabulary"]}

    def _write_chat_settings(self) -> None:
        """The model is trained on single questions and best decoded greedily: its chat template and generation config
        say so."""
        folder = self.out / "data" / "tokenizer"
        template = folder / "chat_template.jinja"
        if self.template not in (whole := template.read_text()):
            template.write_text(self.template + whole)
        end = read_json(self.out / "data" / "manifest.json")["end_of_document"]
        greedy = {"do_sample": False, "eos_token_id": end, "pad_token_id": end}
        (folder / "generation_config.json").write_text(json.dumps(greedy) + "\n")

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
        prediction = predict(self.out / "law.json", recipe.schedule.name, options, steps=recipe.train.steps)
        prediction.save(self.out / "prediction.json")
        return {"predicted": prediction.final, "steps": recipe.train.steps}

    def base(self) -> dict[str, Any]:
        return {**self._pretrain(self.out / "base"), "predicted": self.known["law"]["predicted"]}

    def align(self) -> dict[str, Any]:
        from moesaic.align.align import align
        from moesaic.train.report.metrics import read_metrics

        result = align(self.recipe(self.aligns), self.out / "base", self.out / "aligned")
        finished(result["stages"][-1])
        sft, grpo = (read_metrics(self.models()[name]) for name in ("SFT", "GRPO"))
        return {
            "before": [line["accuracy"] for line in sft if "accuracy" in line][-1],
            "after": [line["accuracy"] for line in grpo if "accuracy" in line][-1],
            "mismatch": max(line["mismatch_max"] for line in grpo),
            "policy_steps": grpo[-1]["step"],
        }

    def compress(self) -> dict[str, Any]:
        from moesaic.compress.methods.gptq import GPTQ

        return self.compress_with(GPTQ(bits=4, group=32), self.out / "aligned", **self.calibration)

    def _pretrain(self, out: Path, *overrides: str) -> dict[str, Any]:
        from moesaic.train.pretrain import pretrain

        recipe = self.recipe(self.pretrains, *overrides).changed(train={"data": str(self.out / "data")})
        return finished(pretrain(recipe, out))
