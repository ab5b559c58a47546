"""A real model instead of a tiny one: made a mixture, taught a little, kept in 4 bits, asked.

    RealLife(Path("out/real"), Console(), source="smollm2").run()

Nothing is pretrained. `source` is `smollm2`, or whatever `moesaic convert` takes; a dense model is upcycled.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console

from moesaic.model.config import Experts
from moesaic.quickstart import summaries
from moesaic.quickstart.life import Life, Stage, finished

EXPERTS, PER_TOKEN = 4, 2


class RealLife(Life):
    questions = 32
    pretrains = ""

    def __init__(self, out: Path, console: Console, *, source: str, overrides: tuple[str, ...] = ()) -> None:
        super().__init__(out, console, overrides=overrides)
        self.source = source

    def stages(self) -> dict[str, Stage]:
        return {
            "machine": Stage(
                "This machine", "What it is good at decides how the model is run.", self.machine, summaries.machine
            ),
            "begun": Stage(
                "Begin", "A dense model becomes a mixture that answers the same.", self.begin, summaries.begun
            ),
            "taught": Stage("Teach", "It learns how sums are to be answered.", self.teach, summaries.taught),
            "small": Stage("Compress", "Its weights are kept in 4 bits.", self.compress, summaries.small),
            "evaluated": Stage("Evaluate", "Questions that no stage ever saw.", self.evaluate, summaries.evaluated),
        }

    def models(self) -> dict[str, Path]:
        return {"as it came": self.out / "mixture", "taught": self.out / "taught", "in 4 bits": self.out / "small"}

    def begin(self) -> dict[str, Any]:
        from moesaic.model import directory, lineage
        from moesaic.model.facts import facts
        from moesaic.model.formats.matching import match
        from moesaic.model.upcycle import Upcycle, upcycle

        opened, out = directory.open_source(self.source), self.out / "mixture"
        config, _ = match(opened)
        life = lineage.read(opened.place) if opened.place.is_dir() else []
        mixture = any(isinstance(layer.ffn, Experts) for layer in config.layers)
        with self.console.status("writing"):
            if mixture:
                made = directory.convert(opened, out, life=[*life, lineage.stage("convert", source=self.source)])
            else:
                asked = f"experts={EXPERTS},topk={PER_TOKEN}"
                stage = lineage.stage("convert", source=self.source, upcycle=asked)
                made = upcycle(opened, out, Upcycle.parse(asked), life=[*life, stage])
        before, after = facts(config), facts(made)
        return {
            "parameters_before": before.parameters,
            "parameters": after.parameters,
            "active": after.active_parameters,
            "upcycled": not mixture,
        }

    def teach(self) -> dict[str, Any]:
        from moesaic.align.align import align

        told = align(self.recipe("align-real.yaml"), self.out / "mixture", self.out / "taught")
        return finished(told["stages"][-1])

    def compress(self) -> dict[str, Any]:
        from moesaic.compress.methods.rtn import RoundToNearest

        method = RoundToNearest(bits=4, group=32)  # at once: what looks at data takes minutes on a model of this size
        return self.compress_with(method, self.out / "taught")
