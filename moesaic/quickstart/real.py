"""Start from a real model instead of pretraining: upcycle it to a mixture, SFT, quantize to 4 bits, evaluate.

    RealLife(Path("out/real"), Console(), source="smollm2").run()

`source` is `smollm2`, or whatever `moesaic convert` takes; a dense model is upcycled.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console

from moesaic.quickstart import summaries
from moesaic.quickstart.life import MACHINE, Life, Stage, finished

UPCYCLE = "experts=4,topk=2"


class RealLife(Life):
    questions = 32
    pretrains = ""

    def __init__(self, out: Path, console: Console, *, source: str, overrides: tuple[str, ...] = ()) -> None:
        super().__init__(out, console, overrides=overrides)
        self.source = source

    def stages(self) -> dict[str, Stage]:
        return {
            "machine": Stage(*MACHINE, self.machine, summaries.machine),
            "upcycled": Stage(
                "Upcycle",
                "A dense model becomes a mixture of experts with the same outputs.",
                self.upcycle,
                summaries.upcycled,
            ),
            "sft": Stage("SFT", "Supervised fine-tuning on sums.", self.sft, summaries.sft),
            "small": Stage("Compress", "Weights quantized to 4 bits.", self.compress, summaries.small),
            "evaluated": Stage("Evaluate", "Accuracy on held-out questions.", self.evaluate, summaries.evaluated),
        }

    def models(self) -> dict[str, Path]:
        return {"original": self.out / "mixture", "SFT": self.out / "sft", "4-bit": self.out / "small"}

    def upcycle(self) -> dict[str, Any]:
        from moesaic.model import directory
        from moesaic.model.convert import convert_model
        from moesaic.model.facts import facts
        from moesaic.model.formats.matching import match

        config, _ = match(directory.open_source(self.source))
        dense = not config.has_experts
        with self.console.status("writing"):
            mixture = convert_model(self.source, self.out / "mixture", upcycle=UPCYCLE if dense else None, force=True)
        after = facts(mixture)
        return {
            "parameters_before": facts(config).parameters,
            "parameters": after.parameters,
            "active": after.active_parameters,
            "upcycled": dense,
        }

    def sft(self) -> dict[str, Any]:
        from moesaic.align.align import align

        result = align(self.recipe("align-real.yaml"), self.out / "mixture", self.out / "sft")
        return finished(result["stages"][-1])

    def compress(self) -> dict[str, Any]:
        from moesaic.compress.methods.rtn import RoundToNearest

        method = RoundToNearest(bits=4, group=32)  # no calibration, which takes minutes on a model of this size
        return self.compress_with(method, self.out / "sft")
