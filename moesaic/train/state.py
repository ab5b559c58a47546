"""The state of a run after a step: taken for a checkpoint or a copy in memory, and put back."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from moesaic.data.stream import StatefulStream
from moesaic.model import lineage
from moesaic.sharded import local
from moesaic.train.checkpoints import Snapshot

if TYPE_CHECKING:
    from moesaic.train.run import Run

Tensors = dict[str, Tensor]


def tensors(run: Run) -> dict[str, Tensors]:
    """All that the next step depends on, in groups, as it lies here: the next step changes it. `weights` are the
    model's."""
    found = {"weights": run.model.state_dict(), "optimizer": run.optimizer.state_dict()}
    if run.average.count:
        found["average"] = run.average.state()
    if run.scale is not None:
        found["loss_scale"] = run.scale.state_dict()
    if held := run.constraint.state():
        found["constraint"] = held
    if isinstance(run.data, StatefulStream):
        found |= run.data.state()
    return {group: {name: local(tensor.detach()) for name, tensor in of.items()} for group, of in found.items()}


def tensors_between_steps(run: Run) -> dict[str, Tensors]:
    """With what a checkpoint may leave out, since ranks bring their weights together before it."""
    return tensors(run) | {"between": _unsaved(run)}


def _unsaved(run: Run) -> Tensors:
    every = [(slot, key) for rule, slots in run.optimizer.groups for slot in slots for key in rule.unsaved]
    return {f"{slot.name}/{key}": slot.state[key] for slot, key in every if key in slot.state}


def numbers(run: Run) -> dict[str, Any]:
    """The rest of it, as JSON."""
    return {
        "step": run.step,
        "rewinds": run.rewinds,
        "position": run.data.position,
        "watch": run.spike_detector.state(),
        "report": run.report.state(),
        "recipe": run.recipe.dump(),
        "init": run.origin,
        "life": run.life,
    }


def snapshot(run: Run) -> Snapshot:
    """A copy that can be written while training goes on; not of offloaded state, which may not fit twice."""
    groups = tensors(run)
    for group, of in groups.items():
        if group != "optimizer" or not run.offloaded:
            groups[group] = {name: tensor.to("cpu", copy=True) for name, tensor in of.items()}
    weights = groups.pop("weights")
    if run.average.count and run.done():  # the averaged weights are the result
        groups["last"] = weights
        weights = weights | {name: tensor for name, tensor in groups["average"].items() if name in weights}
    facts, recipe = numbers(run), run.recipe.dump()
    learned = {"steps": run.step, "tokens": facts["report"]["tokens"]}
    if (loss := run.report.loss) is not None:
        learned["loss"] = round(loss, 4)
    if run.settings.init:
        del recipe["model"]  # these sizes are of a model from scratch; what was trained is train.init
    life = [*run.life, lineage.stage(run.name, **learned, recipe=recipe)]
    files = run.files
    if run.model.lora is not None:  # the model with what it learned, and beside it what it learned alone
        files = files | run.model.lora.files(weights, str(run.settings.init), life)
        weights = run.model.lora.merged(weights)
    return Snapshot(run.step, run.model.config, weights, run.model.dtype, files, life, groups, facts)


def recall(run: Run, step: int) -> dict[str, Any]:
    """The run as it was after a step, from the memories of its ranks; returns the report's state."""
    assert run.world.redundancy is not None
    return put_back(run, *run.world.redundancy.read(step))


def taken(run: Run) -> tuple[dict[str, Any], dict[str, Tensors]]:
    """A copy in this process, to put back."""
    groups = tensors_between_steps(run)
    return numbers(run), {group: {name: t.clone() for name, t in of.items()} for group, of in groups.items()}


def put_back(run: Run, facts: dict[str, Any], groups: dict[str, Tensors]) -> dict[str, Any]:
    weights = run.model.state_dict()
    for name, tensor in groups["weights"].items():
        local(weights[name]).copy_(tensor)
    report = restore(run, facts, lambda group: {name: t.clone() for name, t in groups.get(group, {}).items()})
    for name, tensor in _unsaved(run).items():
        tensor.copy_(groups["between"][name])
    return report


def restore(run: Run, facts: dict[str, Any], group: Callable[[str], Tensors]) -> dict[str, Any]:
    """All but the model's weights, as they were; returns the report's state."""
    run.data = run.data.from_position(facts["position"])
    if isinstance(run.data, StatefulStream):
        run.data.restore(group)
    for name, tensor in group("last").items():
        local(run.model.state_dict()[name]).copy_(tensor)
    run.optimizer.load_state_dict(group("optimizer"))
    run.average.restore(group("average"))
    if held := group("constraint"):
        run.constraint.restore(held)
    if run.scale is not None:
        run.scale.load_state_dict(group("loss_scale"))
    run.step, run.rewinds, run.life = facts["step"], facts["rewinds"], facts["life"]
    run.spike_detector.restore(facts["watch"])
    report: dict[str, Any] = facts["report"]
    return report
