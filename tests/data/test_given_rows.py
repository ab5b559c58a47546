"""Rows in place of tokens: kept beside shards, carried by batches, read by the model, never predicted."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import moesaic
from moesaic.data.given_rows import GIVEN, ROWS, give_rows, places_of
from moesaic.data.held_out import held_out_batches
from moesaic.data.ordering import TokenSpans
from moesaic.data.packing import IGNORED, Batch, pack
from moesaic.data.preparation.prepare import prepare
from moesaic.data.shards import Shards
from moesaic.data.stream import TokenStream
from moesaic.data.tokenizer_training import load_tokenizer
from moesaic.errors import UserError
from moesaic.model.context import Routing
from moesaic.recipe import Recipe, load_recipe
from moesaic.train.objectives.next_token import NextToken
from moesaic.train.pretrain import pretrain
from moesaic.train.validate import fit_to_data
from tests.model import oracle

HIDDEN, LETTERS, DOCUMENTS = 32, "abcd", 240
RECIPE = """
model: {family: qwen3_moe, vocab: 300, hidden: 32, layers: 2, heads: 2, kv_heads: 1, head_size: 16, dense_layers: 0,
        experts: 2, expert_hidden: 16, shared_experts: 0, context: 16, router: {score: softmax, correction: false}}
data:
  sources: [{name: seen, path: FOLDER/seen.jsonl}]
  sequence_length: 16
  quality: null
  dedupe: {exact: false}
  held_out: 0.1
train: {steps: 30, batch_tokens: 256, data: FOLDER/data, evaluate_every: 30}
optimizer: {name: adamw, lr: 0.02}
"""


@pytest.fixture
def prepared(tmp_path: Path) -> tuple[Recipe, Shards, np.ndarray]:
    """Documents of a mark and a letter that nothing but the row at the mark tells; and the places of the marks."""
    chosen = np.random.default_rng(0).integers(len(LETTERS), size=DOCUMENTS)
    lines = [json.dumps({"text": f"{number} #{LETTERS[letter]}"}) for number, letter in enumerate(chosen)]
    (tmp_path / "seen.jsonl").write_text("\n".join(lines))
    (tmp_path / "recipe.yaml").write_text(RECIPE.replace("FOLDER", str(tmp_path)))
    recipe = load_recipe(tmp_path / "recipe.yaml")
    prepare(recipe, tmp_path / "data")
    data = Shards(tmp_path / "data")
    mark = load_tokenizer(tmp_path / "data" / "tokenizer").encode(" #")[-1]
    return recipe, data, places_of(data, mark)


def rows_of(data: Shards, places: np.ndarray, size: int = HIDDEN) -> np.ndarray:
    """By the token behind each."""
    after = data.gather(places + 1, np.ones(len(places), int))
    table = np.random.default_rng(1).normal(size=(300, size))
    return table[after]


def test_a_model_learns_from_rows_what_tokens_do_not_say(prepared, tmp_path: Path) -> None:
    recipe, data, places = prepared
    assert len(places) == DOCUMENTS
    pretrain(recipe, tmp_path / "without", quiet=True)
    give_rows(data, places, rows_of(data, places))
    pretrain(recipe, tmp_path / "with", quiet=True)
    lines = {
        name: json.loads((tmp_path / name / "metrics.jsonl").read_text().splitlines()[-1])
        for name in ("with", "without")
    }
    assert lines["with"]["loss/held_out"] < lines["without"]["loss/held_out"] - 0.25
    assert lines["with"]["loss"] < lines["without"]["loss"] - 0.25


def test_batches_carry_rows_and_never_predict_them(prepared, tmp_path: Path) -> None:
    recipe, data, places = prepared
    given = rows_of(data, places).astype(np.float16)
    give_rows(data, places, given)
    data = Shards(data.directory, verify=True)
    assert data.rows is not None and isinstance(data.rows.rows, np.memmap)
    starts, lengths = data.starts[3:9], data.lengths[3:9]
    batch = pack(data, [TokenSpans(starts, lengths, data.domain[3:9])], 4, {})  # documents in pieces
    at = 0
    for number in range(3, 9):
        for place in range(data.starts[number], data.starts[number] + data.lengths[number]):
            row = np.flatnonzero(places == place)
            assert bool(batch.columns[GIVEN][at]) == bool(len(row))
            if len(row):
                assert np.array_equal(batch.columns[ROWS][at], given[row[0]].astype(np.float32))
                assert at == 0 or batch.targets_T[at - 1] == IGNORED
            else:
                assert not batch.columns[ROWS][at].any()
            at += 1
    assert at == len(batch.tokens_T) and batch.count == int((batch.targets_T != IGNORED).sum())
    halves = batch.parts(2)
    assert sum(int(half.columns[GIVEN].sum()) for half in halves) == 6
    assert sum(
        int((one.targets_T != IGNORED).sum()) for one in held_out_batches(data, batch_tokens=64, sequence_length=8)
    )


def test_the_loss_is_that_of_transformers_on_embeddings(tmp_path: Path) -> None:
    theirs = oracle.save("qwen3_moe", tmp_path)
    model = moesaic.load(tmp_path)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, 97, (11,), generator=generator)
    given = torch.tensor([0, 1, 0, 0, 0, 1, 1, 0, 0, 0, 0]).bool()
    rows = torch.randn(11, 48, generator=generator) * given[:, None]
    targets = torch.tensor([IGNORED, *tokens[2:5], IGNORED, IGNORED, *tokens[7:], IGNORED])
    batch = Batch(tokens, targets, [11], [0], 8 - 1, columns={ROWS: rows, GIVEN: given})
    loss = NextToken()(model, batch, Routing()).total
    loss.backward()
    embedded = theirs.model.embed_tokens(tokens[None]).masked_scatter(given[None, :, None], rows[given])
    logits = theirs(inputs_embeds=embedded, use_cache=False).logits[0]
    wanted = torch.nn.functional.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum") / 7
    torch.testing.assert_close(loss, wanted, rtol=1e-4, atol=1e-5)
    unread = set(tokens[given].tolist()) - set(tokens[~given].tolist())
    assert unread and not model.embed.grad[list(unread)].any()  # the output matrix is another


def test_what_does_not_fit_is_said(prepared, tmp_path: Path) -> None:
    recipe, data, places = prepared
    before = data.fingerprint
    for wrong in (places[::-1], places + 10**6, places[:-1]):
        with pytest.raises(UserError, match="in order|belong together"):
            give_rows(data, wrong, rows_of(data, places))
    give_rows(data, places, rows_of(data, places, size=16))
    assert Shards(data.directory).fingerprint != before  # a run that began without them does not go on
    with pytest.raises(UserError, match="16 numbers each, and the model's hidden states 32"):
        pretrain(recipe, tmp_path / "narrow", quiet=True)
    for change, words in (
        ("train.objective=blank_infilling", "blank_infilling reads tokens alone"),
        ("train.memory={ram: 8, disk: 16}", "remembers tokens alone"),
    ):
        changed = load_recipe(tmp_path / "recipe.yaml", [change])
        with pytest.raises(UserError, match=words):
            fit_to_data(changed, TokenStream.open(data.directory, recipe))
    values = data.directory / "rows" / "values.npy"
    values.write_bytes(values.read_bytes()[:-8] + bytes(8))
    with pytest.raises(UserError, match="has changed"):
        Shards(data.directory, verify=True)
