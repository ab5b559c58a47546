"""Every step an engine can run has a shape that was expected."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from moesaic.kernels.cuda.expected_shapes import expected_shapes
from moesaic.kernels.cuda.step_inputs import ChunkRows, DecodeRows, StepInputs, Tiling


@st.composite
def steps(draw):
    """(max sequences, max tokens, max length, a batch that decodes, chunks beside it)."""
    sequences, tokens, length = draw(st.integers(1, 70)), draw(st.integers(1, 300)), draw(st.integers(40, 1000))
    decoding = draw(st.integers(0, sequences))
    left, chunks = max(0, tokens - decoding), []
    for slot in range(decoding, sequences):
        most = min(left, length - 1)
        if most < 1 or draw(st.booleans()):
            break
        new = draw(st.integers(1, most))
        start = draw(st.integers(0, length - new - 1))
        chunks.append(ChunkRows(slot, start, range(new), draw(st.integers(0, 1)), prompt=start + new))
        left -= new
    positions_S = np.array([draw(st.integers(0, length - 1)) for _ in range(decoding)], np.int32)
    none_S = np.zeros(decoding, np.float32)
    return sequences, tokens, length, DecodeRows(np.arange(decoding), positions_S, none_S, none_S), chunks


@given(steps())
@settings(max_examples=300, deadline=None)
def test_whatever_comes_was_expected(step):
    sequences, tokens, length, batch, chunks = step
    if not len(batch.slots_S) and not chunks:
        return
    for rows in (16, 64):
        tiling = Tiling(rows)
        found = StepInputs.of(batch, chunks, sequences, tiling).shape
        assert found in expected_shapes(sequences, tokens, length, tiling)


def test_they_are_few():
    shapes = expected_shapes(256, 8192, 8192, Tiling(64))
    assert len(shapes) == len(set(shapes)) < 150
    assert shapes[0].tokens == 8192  # the largest first


def test_prompts_that_expand_latents_alone_and_beside_answers():
    shapes = expected_shapes(64, 8192, 8192, Tiling(16, 128))
    whole = [ChunkRows(0, 0, range(1000), 1, prompt=1000)]
    batch = DecodeRows(*(np.zeros(60, np.int32) for _ in range(4)))
    nobody = DecodeRows(*(np.zeros(0, np.int32) for _ in range(4)))
    assert StepInputs.of(nobody, whole, 64, Tiling(16, 128)).shape in shapes
    assert StepInputs.of(batch, whole, 64, Tiling(16, 128)).shape in shapes
