"""The mean of the last checkpoints, each kind by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from moesaic.recipe_sections import AverageSection
from moesaic.train.averaging import WeightAverage


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("simple", (4 + 6 + 8 + 10) / 4),
        ("weighted", (4 + 2 * 6 + 3 * 8 + 4 * 10) / 10),
        ("ema", 4 * 0.125 + 6 * 0.125 + 8 * 0.25 + 10 * 0.5),
    ],
)
def test_of_the_last_steps_every_second_one(kind: str, expected: float) -> None:
    """Weights are the number of the step: after ten of them those of steps 4, 6, 8 and 10 are averaged."""
    average = WeightAverage(AverageSection(share=0.6, every=2, kind=kind, decay=0.5), 10)
    model = nn.Linear(1, 1, bias=False)
    for step in range(1, 11):
        nn.init.constant_(model.weight, step)
        average.update(step, model)  # type: ignore[arg-type]
    assert average.count == 4 and torch.equal(average.tensors["weight"], torch.tensor([[expected]]))
