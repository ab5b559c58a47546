"""Encoders behind the API: vectors as sentence-transformers', scores as its CrossEncoder's, and no text from either."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import moesaic
from moesaic.errors import UserError
from moesaic.model.minilm import find_minilm
from moesaic.serve.cluster.serialization import deserialize_request, serialize_request
from moesaic.serve.core.encoder_engine import EncoderEngine, engine_for
from moesaic.serve.core.engine import Engine
from tests.serve.api.running import Running, running

sentence_transformers = pytest.importorskip("sentence_transformers")
pytestmark = pytest.mark.usefixtures("minilm")

QUERY = "Which animal says meow?"
DOCUMENTS = ["Cats meow when they are hungry.", "The bank raised its rates.", "", "Ünïcödé 你好 🙂 " * 40]


@pytest.fixture(scope="module")
def minilm() -> Path:
    try:
        return find_minilm()
    except UserError as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="module")
def server(minilm: Path) -> Iterator[Running]:
    with running(engine_for(moesaic.load(minilm, device="cpu"))) as found:
        yield found


@pytest.fixture(scope="module", params=["sigmoid", "identity"])
def cross(
    request: pytest.FixtureRequest, minilm: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Running]:
    """A tiny random cross-encoder with the real tokenizer."""
    path = tmp_path_factory.mktemp("cross")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=32, num_attention_heads=2, num_hidden_layers=2, intermediate_size=48, max_position_embeddings=64,
        num_labels=1, initializer_range=0.5,
    )  # fmt: skip
    if request.param == "identity":
        config.sentence_transformers = {"activation_fn": "torch.nn.modules.linear.Identity"}
    transformers.BertForSequenceClassification(config).save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        shutil.copy(minilm / name, path / name)
    with running(engine_for(moesaic.load(path, device="cpu"))) as found:
        yield path, found


def test_embeddings_are_those_of_sentence_transformers(server: Running, minilm: Path) -> None:
    theirs = sentence_transformers.SentenceTransformer(str(minilm), device="cpu")
    answer = server.post("/v1/embeddings", {"input": [QUERY, *DOCUMENTS]})
    assert answer.status_code == 200, answer.text
    found = np.array([one["embedding"] for one in answer.json()["data"]])
    assert np.abs(found - theirs.encode([QUERY, *DOCUMENTS], normalize_embeddings=True)).max() < 1e-5
    ranked = server.post("/v1/rerank", {"query": QUERY, "documents": DOCUMENTS}).json()["results"]
    cosines = found[1:] @ found[0]
    assert [one["index"] for one in ranked] == list(np.argsort(-cosines))
    assert np.allclose([one["relevance_score"] for one in ranked], sorted(cosines, reverse=True), atol=1e-5)


def test_longer_texts_are_refused_or_cut(server: Running, minilm: Path) -> None:
    theirs = sentence_transformers.SentenceTransformer(str(minilm), device="cpu")
    text = "a long story " * 200
    answer = server.post("/v1/embeddings", {"input": text})
    assert answer.status_code == 400 and "256" in answer.text
    answer = server.post("/v1/embeddings", {"input": text, "truncate_prompt_tokens": -1})
    found = np.array(answer.json()["data"][0]["embedding"])
    assert np.abs(found - theirs.encode(text, normalize_embeddings=True)).max() < 1e-5


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}]}),
        ("/v1/completions", {"prompt": "Hello"}),
        ("/v1/responses", {"input": "Hello"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}),
        ("/v1/score", {"text_1": "a", "text_2": "b", "scoring": "generative", "labels": ["yes", "no"]}),
    ],
)
def test_it_writes_no_text(server: Running, path: str, body: dict[str, Any]) -> None:
    answer = server.post(path, {"model": "tiny", **body})
    assert answer.status_code == 400 and "is an encoder" in answer.text


def test_texts_are_tokenized(server: Running) -> None:
    answer = server.post("/tokenize", {"prompt": "hello world"})
    assert answer.json()["tokens"] == [101, 7592, 2088, 102]


@torch.inference_mode()
def test_a_cross_encoder_scores_pairs(cross: tuple[Path, Running]) -> None:
    path, server = cross
    theirs = sentence_transformers.CrossEncoder(str(path), device="cpu")
    expected = theirs.predict([(QUERY, document) for document in DOCUMENTS])
    answer = server.post("/v1/score", {"text_1": QUERY, "text_2": DOCUMENTS})
    assert answer.status_code == 200, answer.text
    assert np.abs(np.array([one["score"] for one in answer.json()["data"]]) - expected).max() < 1e-5
    ranked = server.post("/v1/rerank", {"query": QUERY, "documents": DOCUMENTS}).json()["results"]
    assert [one["index"] for one in ranked] == list(np.argsort(-expected))
    answer = server.post("/v1/rerank", {"query": QUERY, "documents": DOCUMENTS, "instruction": "be strict"})
    assert answer.status_code == 400 and "cross-encoders" in answer.text


def test_no_engine_generates_with_it(server: Running) -> None:
    model = server.engine.model
    with pytest.raises(UserError, match="is an encoder"):
        Engine(model)
    with pytest.raises(UserError, match="LoRA"):
        EncoderEngine(model).load_adapter("a", "b")


def test_requests_travel_to_workers(cross: tuple[Path, Running]) -> None:
    """And so do their results: on a GPU, or with replicas, the engine is another process's."""
    engine = cross[1].engine
    assert isinstance(engine, EncoderEngine)
    tokens = engine.encoding.pairs([(QUERY, DOCUMENTS[0])])[0]
    request = engine.request(tokens.ids, embed=True, classify=True, token_types=tokens.types)
    there = deserialize_request(engine, serialize_request(engine, request))
    assert list(there.prompt) == list(tokens.ids) and there.classify and there.token_types == list(tokens.types)
