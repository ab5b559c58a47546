"""A model on native kernels says the same to the bit alone, in a crowd, at once and token by token."""

from __future__ import annotations

import pytest
import torch

import moesaic
from moesaic.kernels import native
from moesaic.model.layout import Layout
from moesaic.model.transformer import Model
from tests.model import oracle


@pytest.fixture(scope="module", params=["qwen3_moe", "glm4_moe-groups", "mixtral-window-tied", "qwen3-window"])
def model(request, tmp_path_factory) -> Model:
    path = tmp_path_factory.mktemp(request.param)
    oracle.save(request.param, path)
    return moesaic.load(path)


def sequences(model: Model, lengths: list[int]) -> list[list[int]]:
    return [torch.randint(3, model.config.vocab, (n,)).tolist() for n in lengths]


@pytest.mark.parametrize("threads", [1, 2])
def test_a_crowd_changes_nothing(model, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    assert model.ops is native.kernels()
    texts = sequences(model, [33, 1, 70, 2, 17, 9])
    together = model.logits(texts)
    for text, logits in zip(texts, together, strict=True):
        assert torch.equal(model.logits([text])[0], logits)
    torch.set_num_threads(before)


@torch.inference_mode()
def test_token_by_token_equals_at_once(model):
    texts = sequences(model, [40, 25, 66])
    whole = model.logits(texts)
    cache = model.new_cache(40, 4)
    pages = [list(range(39, 28, -1)), list(range(0, 20, 2)), list(range(1, 20, 2)) + list(range(20, 28))]
    done = [0, 0, 0]
    while any(d < len(text) for d, text in zip(done, texts)):
        # One reads in large pieces while the others go token by token.
        new = [min(size, len(text) - d) for size, text, d in zip((1, 1, 20), texts, done)]
        tokens = torch.tensor([token for text, d, n in zip(texts, done, new) for token in text[d : d + n]])
        layout = Layout(new, cached=list(done), cache=cache, pages=pages)
        logits = model.logits_at(model(tokens, layout))
        for span, d in zip(layout.spans, list(done)):
            assert torch.equal(logits[span.start : span.stop], whole[span.number][d : d + span.new])
        done = [d + n for d, n in zip(done, new)]


def test_the_library_kernels_agree(model):
    from moesaic.kernels import cpu

    texts = sequences(model, [33, 5])
    layout = Layout([33, 5])
    with torch.inference_mode():
        tokens = torch.tensor([token for text in texts for token in text])
        ours, library = model(tokens, layout), model(tokens, layout, ops=cpu)
    torch.testing.assert_close(ours, library, rtol=1e-4, atol=1e-4)
