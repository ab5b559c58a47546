"""Codes of few bits: how far off they are, how much room they take, and that what is encoded stays as it is."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moesaic.model.transformer import Model
from moesaic.serve.core.engine import Engine
from moesaic.serve.core.kv.encoding import By, Encoding
from moesaic.serve.core.kv_policies.quantized import Quantized
from moesaic.serve.core.request import Sampling
from tests.serve.tiny import VOCABULARY, tiny_model


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("by", ["channel", "token"])
def test_codes_are_the_nearest_of_an_even_grid(bits: int, by: By) -> None:
    encoding = Encoding(bits, group=16, channels=8)
    x = torch.randn(3, 48, 32) * torch.rand(32) * 5
    size = encoding.rows(32, 128) * 128
    coded = encoding.encode(x, by, size)
    assert coded.shape == (3, 3, size) and coded.dtype == torch.uint8
    back = encoding.decode(coded, by, 32).numpy()
    array = x.numpy()
    shape, axis = ((3, 3, 16, 32), 2) if by == "channel" else ((3, 3, 16, 4, 8), 4)
    grouped = array.reshape(shape)
    least, most = grouped.min(axis, keepdims=True), grouped.max(axis, keepdims=True)
    step = (most - least) / (2**bits - 1)
    off = np.abs(back.reshape(shape) - grouped)
    # Half a step, and what scale and least value lose in 16 bits.
    assert (off <= 0.5 * step + 2e-3 * np.maximum(np.abs(least), np.abs(most)) + 1e-6).all()
    assert off.mean() > 0.15 * step.mean()  # it did round


def test_a_block_without_spread_comes_back() -> None:
    encoding = Encoding(2, group=8, channels=8)
    x = torch.full((1, 8, 8), 1.5)
    for by in ("channel", "token"):
        assert torch.equal(encoding.decode(encoding.encode(x, by, 256), by, 8), x)


@pytest.mark.parametrize("by", ["channel", "token"])
def test_codes_for_queries_lose_less_to_queries(by: By) -> None:
    """Against queries that were not counted, as far as they are alike."""
    draw = torch.Generator().manual_seed(0)
    mix = torch.randn(2, 32, 32, generator=draw) * torch.logspace(0, -2, 32)  # a few directions matter
    queries, later = (torch.randn(2, 48, 32, generator=draw) @ mix.transpose(1, 2) for _ in range(2))
    keys = torch.randn(2, 64, 32, generator=draw)
    encoding = Encoding(2, group=16, channels=16)
    size = encoding.rows(32, 128) * 128
    nearest = encoding.decode(encoding.encode(keys, by, size), by, 32)
    read = encoding.decode(encoding.encode(keys, by, size, queries), by, 32)
    off, least = ((later @ (made - keys).transpose(1, 2)).square().mean() for made in (read, nearest))
    assert off < 0.5 * least
    assert (read - keys).square().mean() > (nearest - keys).square().mean()  # which is what nearest means


def test_codes_for_queries_that_say_nothing_are_the_nearest() -> None:
    encoding = Encoding(2, group=16, channels=16)
    keys = torch.randn(1, 32, 16)
    even = torch.eye(16)[None] * 3
    size = encoding.rows(16, 64) * 64
    for queries in (even, torch.zeros(1, 4, 16)):
        assert torch.equal(encoding.encode(keys, "channel", size, queries), encoding.encode(keys, "channel", size))


def test_room() -> None:
    assert Encoding(2, group=32, channels=32).rows(64, 256) == 3  # 512 bytes of codes, 256 of scales
    assert Encoding(4, group=32, channels=32).rows(64, 256) == 5
    assert Encoding(8, group=32, channels=32).rows(64, 256) == 9
    assert Encoding(2, group=32, channels=32).rows(64, 128) == 6  # rows of 16-bit numbers


def test_wrong_options() -> None:
    for wrong in ({"bits": 3}, {"bits": 4, "group": 7}, {"bits": 4, "recent": 0}, {"bits": 2, "first": -1}):
        with pytest.raises(ValueError):
            Encoding(**wrong)
        with pytest.raises(ValueError):
            Quantized(**wrong)


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny_model(layers=2)


def test_tokens_are_encoded_once_and_oldest_first(model: Model) -> None:
    policy = Quantized(bits=4, group=8, channels=8, recent=8)
    engine = Engine(model, page_size=4, kv_policy=policy, cache_bytes=1 << 22)
    prompt = [int(number) for number in torch.randint(3, VOCABULARY, (61,))]
    request = engine.request(prompt, Sampling(max_tokens=40, temperature=0.0, ignore_eos=True))
    engine.add(request)
    engine.step()
    compact = request.compact
    assert compact is not None and compact.encoded == [48, 48]  # of 61, all but eight in whole blocks
    rows = -(-61 // 4)
    assert len(request.pages) == engine.page_pool.in_use < rows
    keys, values = compact.read(0)
    # The plain engine's, for comparison: what is encoded is near it, what is not is equal.
    plain = Engine(model, page_size=4, cache_bytes=1 << 22)
    other = plain.request(prompt, Sampling(max_tokens=40, temperature=0.0, ignore_eos=True))
    plain.add(other)
    plain.step()
    slabs = plain.cache.layers[0]
    order = [*range(4, 52), *range(4), *range(52, 61)]  # the first four stay as they are, behind the blocks
    assert compact.positions_LNM[0, 0].tolist() == order
    for mine, name in ((keys, "keys"), (values, "values")):
        true = slabs[name][other.pages].flatten(0, 1)[:61].transpose(0, 1)[:, order]
        torch.testing.assert_close(mine[:, 48:], true[:, 48:], rtol=1e-4, atol=1e-5)
        assert 0 < (mine[:, :48] - true[:, :48]).abs().max() < 0.2 * true.abs().max()
    before = keys[:, :48].clone()
    while request.written < 20:
        engine.step()
    assert compact.encoded == [64, 64]
    assert torch.equal(compact.read(0)[0][:, :48], before)  # not encoded again
    assert compact.positions_LNM[0, 0].tolist()[:71] == [*range(4, 68), *range(4), 68, 69, 70]
