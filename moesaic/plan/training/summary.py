"""A plan in words: a short table, and one paragraph that says why."""

from __future__ import annotations

from moesaic.plan.text_table import table
from moesaic.plan.training.estimate import TrainingPlan
from moesaic.plan.training.expected_error import expected_error
from moesaic.plan.training.search import SearchResult

GB = 1e9


def training_text(plan: TrainingPlan) -> str:
    step, device, error = plan.step, plan.cluster.device, expected_error(plan.model, plan.cluster.device)
    idle = plan.cluster.count - plan.used
    report, size = plan.as_json(), plan.model
    memory = {name: held / GB for name, held in plan.memory.parts().items()}
    parts = ", ".join(f"{name} {held:,.1f}" for name, held in memory.items() if name != "total")
    per_device = plan.tokens_per_second / plan.used
    kilowatt_hours = report["joules_per_token"] * 1e9 / 3.6e6
    rows = [
        (
            "model",
            f"{size.name}, {size.parameters / 1e9:,.4g} B parameters, {size.active_parameters / 1e9:,.4g} B active",
        ),
        ("cluster", f"{plan.cluster.name}{f', {idle} of them idle' if idle else ''}"),
        ("layout", f"{plan.layout}, recompute {plan.work.recompute}, {plan.work.dtype}"),
        ("step", f"{step.seconds:,.4g} s for {plan.work.batch:,} sequences of {plan.work.sequence:,} tokens"),
        ("", f"90 % of predictions of this kind were within {error.share:.0%}"),
        ("throughput", f"{plan.tokens_per_second:,.0f} tok/s, {per_device:,.0f} per device"),
        ("MFU", f"{plan.mfu:.1%} of {device.peak('bf16') / 1e12:,.0f} TFLOP/s"),
        (
            "memory",
            f"{memory['total']:,.1f} of {device.memory_bytes / GB:,.0f} GB{'' if plan.fits else ': DOES NOT FIT'}",
        ),
        ("", parts),
        ("cost", f"${report['dollars_per_billion_tokens']:,.0f}, {kilowatt_hours:,.0f} kWh per billion tokens"),
    ]
    return table(rows) + "\n\n" + reasons(plan)


def reasons(plan: TrainingPlan) -> str:
    step = plan.step
    shares = {**step.parts, **{f"exposed {kind} communication": seconds for kind, seconds in step.exposed.items()}}
    shares |= {"the pipeline's bubble": step.bubble, "the optimizer": step.optimizer, "fixed overhead": step.overhead}
    ranked = sorted(((seconds / step.seconds, name) for name, seconds in shares.items()), reverse=True)
    told = ", ".join(f"{name} {share:.0%}" for share, name in ranked if share >= 0.01)
    text = f"Of a step: {told}. Next to the matmuls, {plan.bound_by()} costs the most."
    error = expected_error(plan.model, plan.cluster.device)
    known = f"{error.runs} published runs of {error.kind}"
    text += f" Measured against {known}, half of the predictions were within {error.median:.1%}."
    if not plan.fits:
        over = plan.memory.total - plan.cluster.device.memory_bytes
        largest = max(((size, name) for name, size in plan.memory.parts().items() if name != "total"))
        text += f" It needs {over / GB:,.1f} GB more than a device has; {largest[1]} are the largest part."
    return text


def search_text(result: SearchResult) -> str:
    best = result.best
    text = training_text(best) + f"\n\nThe fastest of {result.tried:,} layouts looked at. Next:\n"
    rows = [
        (
            str(other.layout),
            f"{other.step.seconds:,.4g} s (+{other.step.seconds / best.step.seconds - 1:.1%})",
            f"{other.memory.total / GB:,.0f} GB",
            f"loses to {other.bound_by()}",
        )
        for other in result.others
    ]
    return text + table(rows)
