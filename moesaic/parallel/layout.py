"""How work is divided among devices: `tp=2 pp=4 dp=8 ep=16 cp=1`. The planner writes it, training and serving take it.

Devices are dp x cp x tp x pp. Experts have no devices of their own: the `ep` ranks that share a set of experts lie
within dp x cp x tp of one pipeline stage, as in Megatron and torchtitan.
"""

from __future__ import annotations

import difflib
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from moesaic.errors import UserError
from moesaic.json_files import read_json

ALIASES = {"vp": "interleave", "vpp": "interleave", "micro_batch": "mb", "mbs": "mb"}


@dataclass(frozen=True)
class ParallelLayout:
    dp: int = 1  # data parallel ranks: each sees other sequences
    tp: int = 1  # tensor parallel: matrices divided, sequence parallel between them
    pp: int = 1  # pipeline stages
    cp: int = 1  # context parallel: a sequence divided
    ep: int = 1  # ranks that share one set of experts
    interleave: int = 1  # chunks of layers per pipeline rank (virtual stages)
    zero: int = (
        1  # 0: every data rank holds all; 1: optimizer states divided; 2: gradients too; 3: parameters too (FSDP)
    )
    mb: int = 0  # sequences per micro-batch; 0: chosen

    @property
    def devices(self) -> int:
        return self.dp * self.tp * self.pp * self.cp

    @property
    def expert_dp(self) -> int:
        """Copies of each expert."""
        return self.dp * self.cp * self.tp // self.ep

    def __str__(self) -> str:
        shown = ("tp", "pp", "dp", "ep", "cp")
        extra = ((key, value) for key, value in asdict(self).items() if key not in shown)
        rest = [f"{key}={value}" for key, value in extra if value != _DEFAULTS[key]]
        return " ".join([*(f"{key}={getattr(self, key)}" for key in shown), *rest])


_DEFAULTS = asdict(ParallelLayout())


def parse_layout(text: str, devices: int | None = None, place: str = "--layout") -> ParallelLayout:
    """`tp=8 pp=16 dp=24`; without dp, what remains of `devices` is data parallel."""
    given: dict[str, int] = {}
    if text.endswith(".json"):
        text = _from_plan(Path(text))
    for word in text.replace(",", " ").split():
        key, equals, value = word.partition("=")
        key = ALIASES.get(key.strip().lower(), key.strip().lower())
        known = [*_DEFAULTS, "fsdp"]
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            raise UserError(
                f"{place}: {word}",
                "unknown part of a layout",
                f"Did you mean {near[0]}?" if near else f"Known are {', '.join(known)}.",
            )
        low = 0 if key in {"zero", "mb"} else 1
        if not equals or not value.strip().isdigit() or int(value) < low:
            raise UserError(f"{place}: {word}", f"needs a whole number from {low} on", f"Write {key}=2.")
        if key in given:
            raise UserError(f"{place}: {word}", f"{key} is given twice")
        given[key] = int(value)
    if "fsdp" in given:
        fsdp = given.pop("fsdp")
        if given.setdefault("dp", fsdp) != fsdp:
            raise UserError(place, "fsdp and dp differ", "fsdp=N means dp=N zero=3; give one of them.")
        given["zero"] = 3
    layout = ParallelLayout(**given)
    if devices is not None:
        layout = _fill(layout, "dp" in given, devices, place)
    if layout.ep > layout.dp * layout.cp * layout.tp or (layout.dp * layout.cp * layout.tp) % layout.ep:
        stage = layout.dp * layout.cp * layout.tp
        nearest = max(size for size in range(1, min(stage, layout.ep) + 1) if stage % size == 0)
        raise UserError(
            f"{place}: ep={layout.ep}",
            f"the experts' ranks must divide dp x cp x tp = {stage} (one pipeline stage)",
            f"Nearest that works: ep={nearest}.",
        )
    if layout.zero > 3:
        raise UserError(f"{place}: zero={layout.zero}", "stages of ZeRO are 0 to 3")
    return layout


def check_sizes(
    layout: ParallelLayout, model: str, *, heads: set[int], experts: set[int], layers: int, place: str = "--layout"
) -> None:
    """Refuse what cannot be divided so, with the nearest division that works."""
    if layout.ep > 1 and not experts:
        raise UserError(f"{place}: ep={layout.ep}", f"{model} has no experts", "Leave ep out.")
    for key, what, counts in (("tp", "attention heads", heads), ("ep", "experts", experts)):
        size = getattr(layout, key)
        for count in counts:
            if count % size:
                problem = f"does not divide {model}'s {count} {what}"
                raise UserError(
                    f"{place}: {key}={size}", problem, f"Nearest that works: {key}={nearest_divisor(size, count)}."
                )
    if layout.pp > layers:
        raise UserError(
            f"{place}: pp={layout.pp}", f"{model} has only {layers} layers", f"Nearest that works: pp={layers}."
        )
    if layout.interleave > 1 and layout.pp == 1:
        raise UserError(
            f"{place}: interleave={layout.interleave}", "needs pipeline stages (pp=2 or more)", "Leave it out."
        )


def ranks_per_node() -> int:
    """As torchrun says; without it there is one node."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE") or 1)


def nearest_divisor(size: int, whole: int) -> int:
    """The largest number up to `size` that divides `whole`."""
    return max(part for part in range(1, min(size, whole) + 1) if whole % part == 0)


def _from_plan(file: Path) -> str:
    """The layout that `moesaic plan` wrote."""
    parallel = read_json(file, "Write it again with moesaic plan --save.").get("parallel")
    if not isinstance(parallel, dict):
        raise UserError(file, "holds no layout", "Give a file that moesaic plan --save wrote.")
    return " ".join(f"{key}={value}" for key, value in parallel.items())


def _fill(layout: ParallelLayout, has_dp: bool, devices: int, place: str) -> ParallelLayout:
    model = layout.tp * layout.pp * layout.cp
    if has_dp:
        if layout.devices != devices:
            raise UserError(
                place,
                f"dp x tp x pp x cp = {layout.devices}, but the cluster has {devices} devices",
                f"Leave dp out, or make them equal: dp={devices // model}." if devices % model == 0
                else f"Nearest cluster that works: {layout.devices} devices.",
            )  # fmt: skip
        return layout
    if devices % model:
        raise UserError(
            place,
            f"tp x pp x cp = {model} does not divide the cluster's {devices} devices",
            f"Nearest that works: {max(model, devices - devices % model)} devices.",
        )
    return replace(layout, dp=devices // model)
