"""The search finds what people published, or better; and a larger cluster is never worse."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moesaic.errors import UserError
from moesaic.parallel.layout import parse_layout
from moesaic.plan.hardware import load_cluster
from moesaic.plan.models import load_model
from moesaic.plan.training.estimate import plan_training
from moesaic.plan.training.search import search
from moesaic.plan.training.workload import TrainingWork

# A layout that was published or is the obvious one for that model and cluster.
KNOWN = [
    ("glm-4.5-air", "64xH200", "pp=4 ep=8 interleave=4", TrainingWork(1024, 4096)),
    ("deepseek-v3", "2048xH800", "pp=16 ep=64", TrainingWork(15360, 4096, "fp8")),
    ("gpt-3-175b", "12288xA100", "tp=8 pp=8 interleave=6", TrainingWork(6144, 2048)),
]


@pytest.mark.parametrize(("name", "cluster", "layout", "work"), KNOWN, ids=[row[0] for row in KNOWN])
def test_no_worse_than_published(name: str, cluster: str, layout: str, work: TrainingWork) -> None:
    model, machines = load_model(name), load_cluster(cluster)
    found = search(model, machines, work)
    known = plan_training(model, machines, parse_layout(layout, machines.count), work)
    assert found.best.fits
    assert found.best.step.seconds <= known.step.seconds
    times = [found.best.step.seconds, *(other.step.seconds for other in found.others)]
    assert times == sorted(times)
    again = plan_training(model, machines, found.best.layout, found.best.work)
    assert again.step.seconds == pytest.approx(found.best.step.seconds)


@settings(max_examples=12, deadline=None)
@given(
    name=st.sampled_from(["llama-3-8b", "qwen3-30b-a3b", "megatron-22b"]),
    device=st.sampled_from(["A100", "H100"]),
    count=st.integers(8, 40),
    more=st.integers(1, 40),
)
def test_more_devices_never_raise_the_step_time(name: str, device: str, count: int, more: int) -> None:
    model, work = load_model(name), TrainingWork(96, 2048)
    try:
        few = search(model, load_cluster(f"{count}x{device}"), work).best.step.seconds
    except UserError:
        return  # too small for the model: then there is nothing to compare
    assert search(model, load_cluster(f"{count + more}x{device}"), work).best.step.seconds <= few


def test_what_does_not_fit_says_what_would() -> None:
    with pytest.raises(UserError, match="does not fit.*GB") as refused:
        search(load_model("glm-4.5"), load_cluster("8xH100"), TrainingWork(64, 4096))
    wanted = int(str(refused.value).split("some ")[1].split(" ")[0])
    assert search(load_model("glm-4.5"), load_cluster(f"{2 * wanted}xH100"), TrainingWork(64, 4096)).best.fits


def test_recomputation_is_taken_only_where_it_is_needed() -> None:
    model = load_model("llama-3-8b")
    roomy = search(model, load_cluster("8xH200"), TrainingWork(64, 8192)).best
    tight = search(model, load_cluster("4xH100"), TrainingWork(64, 32768)).best
    assert roomy.work.recompute == "none"
    assert tight.work.recompute == "full"
    assert search(model, load_cluster("8xH200"), TrainingWork(64, 8192), "full").best.work.recompute == "full"
