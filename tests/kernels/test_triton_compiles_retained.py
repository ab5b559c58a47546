"""Attention of compact requests, compiled for a Hopper GPU that is not there.

pytest tests/kernels/test_triton_compiles_retained.py
"""

import os

import pytest

from tests.kernels import interpreter

pytest.importorskip("triton")

if os.environ.get("PRETEND_HOPPER") != "1":

    def test_for_hopper():
        interpreter.run_tests(__file__, PRETEND_HOPPER="1", TRITON_INTERPRET="0")

else:
    import torch

    from moesaic.kernels.cuda.retained_step import in_one_page
    from moesaic.kernels.triton.attention import paged, retained_rows
    from tests.kernels.test_triton_compiles import Compiler, empty, launched

    assert launched  # a fixture

    @pytest.mark.parametrize(("group", "size"), [(4, 128), (8, 64), (1, 128)])
    def test_rows_that_heads_have_retained(launched, monkeypatch, group, size):
        for name in ("gather_kernel", "store_kernel"):
            monkeypatch.setattr(retained_rows, name, Compiler(getattr(retained_rows, name), launched))
        counts_TLN, tables_T3 = torch.zeros(4, 3, 2, dtype=torch.int32), torch.zeros(4, 3, dtype=torch.int64)
        chosen_LXK, positions_LX, newest_LX = retained_rows.gather(tables_T3, counts_TLN, 1536)
        keys_XC, values_XC = empty(4096, size), empty(4096, size)
        retained_rows.store(empty(4, 2, size), empty(4, 2, size), newest_LX[0], keys_XC, values_XC)
        pairs = in_one_page(positions_LX[0], 1536)
        flat = [x_XC[None, :, None] for x_XC in (keys_XC, values_XC)]
        paged.attend(empty(8, group, size), *flat, pairs, 0.1, chosen_TK=chosen_LXK[0])
        assert len(launched) == 4
        for kernel in launched:
            assert "ld.local" not in kernel.asm["ptx"] and kernel.metadata.shared <= 227 * 1024
