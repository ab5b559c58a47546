"""IndexCache: which layers keep an indexer is chosen by the loss, and those that do learn for all they serve."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import moesaic
from moesaic.compress import calibration
from moesaic.compress.compress import CompressionRequest, compress
from moesaic.compress.distill import reduced
from moesaic.compress.job import Job
from moesaic.compress.layer_store import LayerStore
from moesaic.compress.methods.index_cache import IndexCache, Search, shared
from moesaic.data.plain_text import builtin_text
from moesaic.errors import UserError
from moesaic.model.directory import Parts
from moesaic.model.formats.opening import open_checkpoint
from moesaic.model.layout import Layout
from moesaic.model.tokenizer import Tokenizer
from moesaic.model.transformer import Model
from tests.compress.made import make

LAYERS, LENGTH = 4, 48
Opened = Callable[[], Job]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "model"
    return make(path, "glm_moe_dsa", num_hidden_layers=LAYERS, mlp_layer_types=["dense"] * 3 + ["sparse"], index_topk=6)


@pytest.fixture
def job(place: Path, tmp_path: Path) -> Job:
    source = open_checkpoint(place)
    tokenizer = Tokenizer.from_files(source.files, source.place)
    assert tokenizer is not None
    pieces = calibration.sequences(builtin_text(), tokenizer, 4, LENGTH, "test")
    return Job(Parts(source), place, LayerStore(tmp_path / "out", {}), pieces)


def loss(job: Job, full: set[int]) -> float:
    """Worked out without the search: a model of that config, layer by layer from the start."""
    config = shared(job.config, full)
    model = Model(config, job.mode)
    model.load_state_dict(reduced(job, list(range(LAYERS)), config))
    tokens_T = torch.tensor([token for tokens in job.sequences for token in tokens])
    with torch.no_grad():
        logits_TV = model.logits_at(model(tokens_T, Layout([len(tokens) for tokens in job.sequences])))
    terms = []
    for number, tokens in enumerate(job.sequences):
        rows = logits_TV[number * LENGTH : (number + 1) * LENGTH - 1]
        terms.append(torch.nn.functional.cross_entropy(rows, torch.tensor(tokens[1:])))
    return float(torch.stack(terms).mean())


def test_the_layers_that_are_missed_least_give_their_indexer_up(job: Job) -> None:
    plan = Search(job).plan(2)
    assert plan["loss_before"] == pytest.approx(loss(job, {0, 1, 2, 3}), abs=1e-5)
    first = {number: loss(job, {0, 1, 2, 3} - {number}) for number in (1, 2, 3)}
    one = min(first, key=lambda number: first[number])
    assert plan["choices"][0] == {"layer": one, "loss": pytest.approx(first[one], abs=1e-5)}
    then = {number: loss(job, {0, 1, 2, 3} - {one, number}) for number in {1, 2, 3} - {one}}
    other = min(then, key=lambda number: then[number])
    assert plan["full"] == sorted({0, 1, 2, 3} - {one, other})
    assert plan["loss"] == pytest.approx(then[other], abs=1e-5)
    assert max(first.values()) > min(first.values()) + 1e-4  # or nothing was to be chosen


def test_kept_indexers_learn_what_the_layers_they_serve_look_at(job: Job) -> None:
    made = IndexCache(keep=0.25, steps=40, rate=0.01).run(job)
    assert [layer.index for layer in made.layers] == ["full", "shared", "shared", "shared"]
    steps = [json.loads(line) for line in (job.store.folder / "run" / "metrics.jsonl").read_text().splitlines()]
    told = [step["loss/indexer"] for step in steps]
    assert sum(told[-4:]) < 0.7 * sum(told[:4])  # four steps are a round of the samples
    changed = job.store.get("indexers").plain
    assert changed and all(name.startswith("layers.0.attention.indexer.") for name in changed)


def test_the_directory_says_who_shares_and_serves(place: Path, tmp_path: Path) -> None:
    request = CompressionRequest(samples=4, length=LENGTH, check_tokens=64)
    told = compress(place, IndexCache(keep=0.5, steps=0), tmp_path / "out", request)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["model_type"] == "glm_moe_dsa"
    assert [n for n, kind in enumerate(config["indexer_types"]) if kind == "full"] == told["plan"]["full"]
    model, prompt = moesaic.load(tmp_path / "out"), list(range(5, 45))
    assert sum("index" in shapes for shapes in model.cache_shapes()) == 2
    (answer,) = moesaic.Engine(model).generate([prompt], max_tokens=8, temperature=0.0)
    tokens = list(prompt)
    for token in answer.tokens:
        assert int(model.logits([tokens])[0][-1].argmax()) == token
        tokens.append(token)


def test_what_cannot_be_is_said(job: Job, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="takes all of samples of 6"):
        IndexCache().run(replace(job, sequences=[[1] * 6]))
    plain = make(tmp_path / "plain", "llama")
    with pytest.raises(UserError, match="no indexer"):
        IndexCache().run(Job(Parts(open_checkpoint(plain)), plain, job.store, job.sequences))
    with pytest.raises(ValueError, match="keep"):
        IndexCache(keep=0)
