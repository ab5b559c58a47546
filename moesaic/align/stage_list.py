"""The stages of a recipe as a list: where the run of each lies, what `stage:2/pairs.jsonl` means, and whether what a
directory holds is the beginning of these very stages."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moesaic.align.stages import Stage
from moesaic.errors import UserError
from moesaic.methods import Method, build
from moesaic.model import lineage
from moesaic.recipe import Recipe
from moesaic.train.resume import steps_done
from moesaic.worlds.stage_outputs import STAGE_OUTPUT

STAGES = "stages"  # the folder of all runs but the last one's
# What a run may go on with otherwise than it began: how long, what is saved and measured, and by whom it is helped.
CHANGEABLE = {"steps", "save_every", "evaluate_every", "evaluate", "held_out", "asynchronous"}
ADDRESSES = {"url", "key_variable"}  # of a judge, say; wherever they stand in the options
ANOTHER = "Name another --out, or the stages it was started with."


def place_of(number: int, out: Path, names: Sequence[str]) -> Path:
    """Where a stage's run is; they are counted from 1."""
    return out if number == len(names) else out / STAGES / f"{number}-{names[number - 1]}"


def resolved(options: Any, out: Path, names: Sequence[str], before: int) -> Any:
    """Options of a stage that has so many `before` it, in which `stage:2/pairs.jsonl` became that file of the second
    stage's run, wherever it is named."""
    if isinstance(options, Mapping):
        return {key: resolved(value, out, names, before) for key, value in options.items()}
    if isinstance(options, list | tuple):
        return type(options)(resolved(value, out, names, before) for value in options)
    if not isinstance(options, str) or not (found := re.fullmatch(rf"{STAGE_OUTPUT}(\d+)(/.*)?", options)):
        return options
    number = int(found[1])
    if not 1 <= number <= before:
        problem = f"{options}: there are {len(names)} stages, and {before} before the one that names it"
        raise UserError("align.stages", problem, "They are counted from 1.")
    return f"{place_of(number, out, names)}{found[2] or ''}"


def check_resumable(recipe: Recipe, stages: Sequence[Stage], names: Sequence[str], model: Path, out: Path) -> None:
    """What earlier calls left in `out` must be the beginning of these very stages, made from this very model."""
    _check_folders(names, out)
    unfinished: int | None = None
    for number, (stage, name) in enumerate(zip(stages, names, strict=True), 1):
        place = place_of(number, out, names)
        if unfinished is not None and (place / "config.json").exists():
            earlier = f"stage {unfinished} ({names[unfinished - 1]})"
            raise UserError(place, f"holds a model, and {earlier}, which comes before it, is not done", ANOTHER)
        if unfinished is None:
            of_run = {"init": str(model), "steps": stage.steps, "seed": stage.seed}
            if steps_done(recipe.changed(train=of_run), place, name) < stage.steps:
                unfinished = number
            _check_options(stage, number, names, out)
        if stage.continues:
            model = place


def _check_folders(names: Sequence[str], out: Path) -> None:
    """No run of a stage that the recipe has not, or has elsewhere."""
    known = {place_of(number, out, names) for number in range(1, len(names))}
    folder = out / STAGES
    for place in sorted(folder.iterdir()) if folder.is_dir() else ():
        if place not in known and (place / "config.json").exists():
            raise UserError(place, f"holds a run, and the recipe's stages are {', '.join(names)}", ANOTHER)


def _check_options(stage: Stage, number: int, names: Sequence[str], out: Path) -> None:
    """A run that was begun with other options would be neither this nor that."""
    place = place_of(number, out, names)
    life = lineage.read(place)
    listed = life[-1].get("recipe", {}).get("align", {}).get("stages", []) if life else []
    last = number == len(names)
    if not listed or (not last and len(listed) < number):
        return  # nothing is there, or it was written by a version that did not say
    entry = listed[-1 if last else number - 1]
    began = resolved({key: value for key, value in entry.items() if key != "name"}, out, names, number - 1)
    before, now = (dataclasses.asdict(one) for one in (build(Method(entry["name"], began), Stage, str(place)), stage))
    for key in now:
        was, wanted = (_without_addresses(values[key]) for values in (before, now))
        if key not in CHANGEABLE and was != wanted:
            problem = f"holds a run of {names[number - 1]} with {key} {_shown(was)}, and {_shown(wanted)} is asked for"
            raise UserError(place, problem, "Name another --out, or the options it was started with.")


def _without_addresses(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_addresses(inner) for key, inner in value.items() if key not in ADDRESSES}
    return [_without_addresses(inner) for inner in value] if isinstance(value, list | tuple) else value


def _shown(value: Any) -> str:
    text = "none" if value is None else str(value)
    return text if len(text) <= 80 else f"{text[:30]}…{text[-49:]}"  # where paths differ
