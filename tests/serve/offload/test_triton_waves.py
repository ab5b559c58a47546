"""What a GPU runs for batches whose experts are not all there at once, through Triton's interpreter: no GPU needed."""

import pytest
import torch

pytest.importorskip("triton")

from moesaic.kernels.interface import Routes
from moesaic.kernels.layer_weights import ExpertWeights
from moesaic.kernels.triton.experts.layer import experts
from moesaic.kernels.triton.experts.tuning import streamed
from moesaic.serve.offload.slot_sums import ChoiceWaves
from tests.kernels import interpreter

interpreter.require()


@pytest.mark.parametrize(("tokens", "size"), [(1, 2), (7, 3), (20, 5)])
def test_waves_have_the_bits_of_all_at_once(tokens: int, size: int) -> None:
    torch.manual_seed(tokens)
    D, F, E, K = 32, 16, 8, 3
    x_TD = torch.randn(tokens, D)
    routes = Routes(torch.stack([torch.randperm(E)[:K] for _ in range(tokens)]), torch.rand(tokens, K))
    gate_up_EGD, down_EDF = torch.randn(E, 2 * F, D), torch.randn(E, D, F)
    whole_TD = experts(x_TD, *routes, gate_up_EGD, down_EDF, streamed(x_TD, (D, F, E, K)))

    slots = ExpertWeights(torch.zeros(size, 2 * F, D), torch.zeros(size, D, F), "silu")
    waves = ChoiceWaves(None, x_TD, routes)  # type: ignore[arg-type]  # which calls Triton by itself
    wanted = routes.experts_TK.unique().tolist()
    for start in range(0, len(wanted), size):
        wave, slot_of_E = wanted[start : start + size], torch.zeros(E, dtype=torch.int64)
        for number, expert in enumerate(reversed(wave)):  # in another order than the experts
            slots.gate_up_EGD[number], slots.down_EDF[number] = gate_up_EGD[expert], down_EDF[expert]
            slot_of_E[expert] = number
        waves.compute(wave, slot_of_E, slots)
    assert torch.equal(waves.sum(), whole_TD)
