"""Records that name files of rows: read with their text, kept beside the shards, learned from; never unpickled."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from moesaic.cli import main
from moesaic.data.given_rows import GIVEN, ROWS
from moesaic.data.preparation.prepare import Status, prepare
from moesaic.data.shards import Shards
from moesaic.data.tokenizer_training import load_tokenizer
from moesaic.errors import UserError
from moesaic.recipe import Recipe, load_recipe
from moesaic.train.pretrain import pretrain
from tests.data.test_prepare import tree
from tests.data.test_prepare_ray import Here

SIZE, LETTERS, RECORDS = 32, "abcd", 200
RECIPE = """
model: {family: qwen3_moe, vocab: 300, hidden: 32, layers: 2, heads: 2, kv_heads: 1, head_size: 16, dense_layers: 0,
        experts: 2, expert_hidden: 16, shared_experts: 0, context: 32, router: {score: softmax, correction: false}}
data:
  sources: [{name: seen, path: FOLDER/seen.jsonl, rows: {field: picture, mark: "<picture>", size: 32}}]
  sequence_length: 32
  quality: null
  held_out: 0.1
  shard_tokens: 500
train: {steps: 30, batch_tokens: 256, evaluate_every: 30, save_every: 30}
optimizer: {name: adamw, lr: 0.02}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Records whose letter nothing but their picture tells: two rows, the second of which is that of the letter."""
    draw = np.random.default_rng(0)
    table = {letter: draw.normal(size=SIZE).astype(np.float32) for letter in LETTERS}
    (tmp_path / "pictures").mkdir()
    lines = []
    for number in range(RECORDS):
        letter, name = LETTERS[draw.integers(4)], f"pictures/{number}.npy"
        rows = np.stack([np.full(SIZE, number / RECORDS, np.float32), table[letter]])
        if number % 5:
            np.save(tmp_path / name, rows)
        else:
            name = name.replace(".npy", ".safetensors")
            save_file({"rows": torch.from_numpy(rows)}, tmp_path / name)
        lines.append(json.dumps({"text": f"{number}<picture>{letter}", "picture": name}))
    (tmp_path / "seen.jsonl").write_text("\n".join(lines))
    (tmp_path / "recipe.yaml").write_text(RECIPE.replace("FOLDER", str(tmp_path)))
    return tmp_path


def recipe(folder: Path, *overrides: str) -> Recipe:
    return load_recipe(folder / "recipe.yaml", list(overrides))


def test_rows_stand_where_the_marks_did(folder: Path) -> None:
    prepare(recipe(folder), folder / "data")
    data = Shards(folder / "data", verify=True)
    tokenizer = load_tokenizer(folder / "data" / "tokenizer")
    assert data.rows is not None and len(data.rows.places) == 2 * RECORDS and len(data.manifest["shards"]) > 2
    for number in range(data.documents):
        tokens = data.document(number)
        span = data.starts[number : number + 1], data.lengths[number : number + 1]
        columns = data.rows.columns(*span)
        given = columns[GIVEN].numpy()
        before, after = (tokenizer.decode(part.tolist()) for part in (tokens[: given.argmax()], tokens[~given][:-1]))
        assert after == before + after[-1] and given.sum() == 2 and given[given.argmax() + 1]
        name = f"pictures/{before}"
        kept = columns[ROWS][torch.from_numpy(given)].numpy()
        file = folder / f"{name}.npy"
        assert kept[0, 0] == pytest.approx(int(before) / RECORDS)
        if file.exists():
            assert np.array_equal(kept, np.load(file))
    assert "<picture>" not in tokenizer.decode(data.gather(data.starts[:1], data.lengths[:1]).tolist())


def test_a_model_learns_from_what_records_bring(folder: Path) -> None:
    pretrain(recipe(folder), folder / "right", quiet=True)
    lines = [json.loads(line) for line in (folder / "seen.jsonl").read_text().splitlines()]
    pictures = np.random.default_rng(1).permutation([line["picture"] for line in lines])
    exchanged = [json.dumps(line | {"picture": str(name)}) for line, name in zip(lines, pictures, strict=True)]
    (folder / "seen.jsonl").write_text("\n".join(exchanged))
    pretrain(recipe(folder), folder / "exchanged", quiet=True)
    last = {name: (folder / name / "metrics.jsonl").read_text().splitlines()[-1] for name in ("right", "exchanged")}
    losses = {name: json.loads(line)["loss/held_out"] for name, line in last.items()}
    assert losses["right"] < losses["exchanged"] - 0.25  # the letter is one of some four tokens


def test_interrupted_or_in_pieces_it_is_the_same(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moesaic.data.preparation.prepare.CHUNK_DOCUMENTS", 16)
    monkeypatch.setattr("moesaic.data.preparation.prepare.SAVE_SECONDS", 0.0)
    prepare(recipe(folder), folder / "whole")
    prepare(recipe(folder), folder / "pieces", examiner=Here())

    seen = 0

    def stop(status: object) -> None:
        nonlocal seen
        seen += 1
        if seen in (6, 13):
            raise KeyboardInterrupt

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            prepare(recipe(folder), folder / "killed", on_status=stop)
    prepare(recipe(folder), folder / "killed", on_status=stop)
    assert tree(folder / "whole") == tree(folder / "killed") == tree(folder / "pieces")


def test_the_same_words_around_another_picture_are_no_copy(folder: Path) -> None:
    line = {"text": "the same <picture> words", "picture": "pictures/1.npy"}
    lines = [line, line | {"picture": "pictures/2.npy"}, line]
    (folder / "seen.jsonl").write_text("\n".join(map(json.dumps, lines)))
    made = prepare(recipe(folder, "data.held_out=0"), folder / "data")
    assert made.counts[0].documents == 2 and made.counts[0].duplicate == 1


def pickled(path: Path) -> None:
    np.save(path, np.array([{"a": 1}], dtype=object), allow_pickle=True)


WRONG: list[tuple[dict[str, object], Callable[[Path], None], str]] = [
    ({"picture": "pictures/none.npy"}, lambda path: None, "no such file"),
    ({"picture": "../elsewhere.npy"}, lambda path: None, "not below the folder of its record"),
    ({"picture": "/etc/passwd"}, lambda path: None, "not below the folder"),
    ({"picture": 3}, lambda path: None, "not the name of a file"),
    ({"picture": ["x.npy", "x.npy"]}, lambda path: None, '1 times "<picture>" in its text, and files for 2'),
    ({}, lambda path: None, '1 times "<picture>" in its text, and files for 0'),
    ({"picture": "x.npy"}, pickled, "cannot be read"),
    ({"picture": "x.npy"}, lambda path: path.write_bytes(pickle.dumps([1])), "cannot be read"),
    ({"picture": "x.npy"}, lambda path: path.write_bytes(b"\x93NUMPY\x01\x00v\x00{'descr'"), "cannot be read"),
    ({"picture": "x.npy"}, lambda path: np.save(path, np.ones((2, 31), np.float32)), "(2, 31), not rows of 32"),
    ({"picture": "x.npy"}, lambda path: np.save(path, np.ones(32, np.float32)), "(32,), not rows of 32"),
    ({"picture": "x.npy"}, lambda path: np.save(path, np.full((1, 32), np.inf)), "no finite number"),
    ({"picture": "x.npy"}, lambda path: np.save(path, np.ones((1, 32), np.int64)), "no finite number"),
    ({"picture": "x.safetensors"}, lambda path: (path.parent / "x.safetensors").write_bytes(b"{}"), "x.safetensors"),
    ({"picture": "x.png"}, lambda path: (path.parent / "x.png").write_bytes(b"png"), "is not .npy or .safetensors"),
]


@pytest.mark.parametrize(("record", "make", "told"), WRONG)
def test_what_is_wrong_with_a_record_is_said(
    folder: Path, record: dict[str, object], make: Callable[[Path], None], told: str
) -> None:
    make(folder / "x.npy")
    right = (folder / "seen.jsonl").read_text()
    (folder / "seen.jsonl").write_text(json.dumps({"text": "a <picture>"} | record) + "\n" + right)
    made = prepare(recipe(folder), folder / "data")
    assert made.counts[0].broken == 1 and made.counts[0].documents == RECORDS
    assert told in json.loads((folder / "data" / "broken.jsonl").read_text())["why"]


def test_what_cannot_be_is_refused_before_data_is_prepared(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for override, told in (
        ("model.hidden=48", "32 numbers in a row, and 48 in the model's hidden states"),
        ("train.objective=blank_infilling", "blank_infilling reads tokens alone"),
        ("data.dedupe.near=true", "records with the same words may have other rows"),
        ("data.sources.0.path=builtin:sums", "without fields"),
    ):
        words = ["train", str(folder / "recipe.yaml"), "--out", str(folder / "run"), override]
        assert main(words) == 2
        assert told in " ".join(capsys.readouterr().err.split())
        assert not (folder / "run").exists()


def test_a_file_that_changes_meanwhile_is_noticed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def change(status: Status) -> None:
        if status.doing.startswith("tokenizing"):
            np.save(folder / "pictures" / "1.npy", np.ones((5, SIZE), np.float32))

    with pytest.raises(UserError, match="1.npy: has changed: 5 rows, and had 2"):
        prepare(recipe(folder), folder / "data", on_status=change)
