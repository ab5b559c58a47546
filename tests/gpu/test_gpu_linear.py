"""Few rows times a matrix, and the launches around them: a row's bits are those it has in a large batch."""

import pytest
import torch
import torch.nn.functional as F

from moesaic.kernels.triton import few_rows, gated, launch
from moesaic.kernels.triton.compile_ahead import compile_launches
from moesaic.kernels.triton.linear import linear, tiled
from moesaic.kernels.triton.norm import add_and_norm, rms_norm

WHOLE = (128, 128, 64, 4, 8)  # the tile of large batches
BF16 = {"device": "cuda", "dtype": torch.bfloat16}


def matrices(inputs, outputs, rows=256):
    torch.manual_seed(0)
    return torch.randn(rows, inputs, **BF16), torch.randn(outputs, inputs, **BF16), torch.randn(outputs, **BF16)


@pytest.mark.parametrize(
    ("inputs", "outputs"),
    [(4096, 14336), (12288, 4096), (16384, 5120), (2048, 5120), (1408, 4096), (4096, 2048), (2880, 1000), (1040, 577)],
)
def test_few_rows_have_the_bits_of_many(inputs, outputs):
    x_TI, weight_OI, bias_O = matrices(inputs, outputs)
    want_TO = tiled(x_TI, weight_OI, bias_O, WHOLE)
    for T in (1, 2, 5, 8, 9):
        for start in range(0, 64, 2 * T):
            some_TI = x_TI[start : start + T].contiguous()
            assert torch.equal(linear(some_TI, weight_OI, bias_O), want_TO[start : start + T]), (T, start)


def test_widths_that_the_ring_does_not_take_are_right_too():
    x_TI, weight_OI, _ = matrices(1032, 640, 3)
    assert not few_rows.takes(x_TI, weight_OI)
    assert torch.equal(linear(x_TI, weight_OI), tiled(x_TI, weight_OI, None, WHOLE))


def test_gated_is_the_librarys_for_every_number_there_is():
    gate_N = torch.arange(-(2**15), 2**15, device="cuda").to(torch.int16).view(torch.bfloat16)
    for up_N in (torch.ones_like(gate_N), torch.randn(len(gate_N), **BF16)):
        rows_TG = torch.cat([gate_N.view(16, -1), up_N.view(16, -1)], dim=1)
        want_N = (F.silu(gate_N) * up_N).view(16, -1)
        same = (gated.gated(rows_TG).view(torch.int16) == want_N.view(torch.int16)) | want_N.isnan()
        assert same.all()


def test_a_shared_experts_rows_are_added_as_one_sum():
    x_TD, more_TD, also_TD = (torch.randn(5, 4096, **BF16) for _ in range(3))
    weight_D = torch.rand(4096, **BF16)
    found = add_and_norm(x_TD, more_TD, weight_D, 1e-5, also_TD)
    assert all(map(torch.equal, found, add_and_norm(x_TD, more_TD + also_TD, weight_D, 1e-5)))


def test_launches_are_told_apart_by_what_they_were_compiled_for():
    """The same kernel at addresses and with sizes of other kinds, in turns."""
    weight_D = torch.ones(520, **BF16)
    flat_N = torch.randn(8 * 520 + 8, **BF16)
    for _ in range(2):
        for start, size in ((0, 512), (1, 512), (0, 520), (8, 512), (3, 511)):
            x_TD = flat_N[start : start + 4 * size].view(4, size)
            want_TD = F.rms_norm(x_TD.float(), (size,), eps=1e-5)
            assert torch.allclose(rms_norm(x_TD, weight_D[:size], 1e-5).float(), want_TD, atol=0.02, rtol=0.02)
    assert launch.KINDS[int](2**31) != launch.KINDS[int](2**31 - 16)


def test_what_is_only_compiled_is_not_launched():
    x_TG, made = torch.randn(2, 768, **BF16), []
    compile_launches(lambda: made.append(gated.gated(x_TG).fill_(7.0)), x_TG.device)
    before_TF = gated.gated(x_TG)
    compile_launches(lambda: made.append(rms_norm(before_TF, torch.ones(384, **BF16), 1e-5)), x_TG.device)
    assert (made[0] == 7.0).all()
    assert torch.equal(before_TF, F.silu(x_TG[:, :384]) * x_TG[:, 384:])
