"""Damaged model directories: each is refused in a line or two, or read right. Never another exception, never a hang,
never memory for what the file only claims."""

from __future__ import annotations

import copy
import json
import math
import os
import random
import re
import resource
import shutil
import signal
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

import moesaic
from moesaic.errors import UserError
from moesaic.model import directory, lineage
from moesaic.model.config import Experts, Layer
from moesaic.model.transformer import Model
from moesaic.serve.api.chat import prompt_text
from moesaic.serve.api.schema.chat import ChatCompletionRequest
from tests.model import oracle

FAMILIES = {
    "llama": "llama-tied",
    "qwen3": "qwen3-window",
    "glm4": "glm4-odd",
    "mixtral": "mixtral-window-tied",
    "qwen3_moe": "qwen3_moe-window",
    "glm4_moe": "glm4_moe-groups",
    "deepseek_v3": "deepseek_v3-yarn",
    "glm_moe_dsa": "glm_moe_dsa-frequency",
    "ernie4_5_moe": "ernie4_5_moe-interval",
}
# With the own architecture, and one whose weights are in shards.
ALL = [*FAMILIES, "moesaic", "sharded"]
SECONDS = 20
ROOM = 3 * 2**30


def pyramid() -> Model:
    """What only the own architecture can say: other experts in each layer, and a residual one."""
    from tests.model.atomic_rounds import CONFIG

    layers = (
        Layer(Experts(4, 2, 16)),
        Layer(Experts(6, 2, 16, score="sigmoid", correction=True, groups=2, shared_hidden=8, residual=True)),
    )
    return Model(replace(CONFIG, layers=layers)).initialize()


@pytest.fixture(scope="session")
def bases(tmp_path_factory: Any) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("bases")
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1, "b": 2}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    for name in ALL:
        if name == "moesaic":
            directory.save(pyramid(), folder / name)
        else:
            oracle.make(FAMILIES.get(name, "llama-llama3-biases")).save_pretrained(
                folder / name, max_shard_size="20KB" if name == "sharded" else "1GB"
            )
        tokenizer.save(str(folder / name / "tokenizer.json"))
        (folder / name / "tokenizer_config.json").write_text('{"eos_token": "b", "chat_template": "{{ messages }}"}')
        (folder / name / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
        (folder / name / "moesaic.json").write_text(json.dumps(lineage.content([lineage.stage("train")])))
    return {name: folder / name for name in ALL}


class Patient:
    """A copy of a directory of which some files are replaced; the others are links to the original's."""

    def __init__(self, base: Path, path: Path) -> None:
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(base, path, copy_function=os.link)
        self.path = path

    def put(self, name: str, content: bytes) -> None:
        (self.path / name).unlink(missing_ok=True)
        (self.path / name).write_bytes(content)

    def json(self, name: str) -> Any:
        return json.loads((self.path / name).read_bytes())

    def attempt(self, again: bool) -> str | None:
        """None if it loads and runs (and, if `again`, can be saved and loaded once more), else why not."""
        try:
            model = moesaic.load(self.path, device="cpu", threads=1)
            logits = model.logits([[1, 2, 0]])[0]
            assert logits.shape == (3, model.config.vocab)
            if model.tokenizer is not None:
                model.tokenizer.decode(model.tokenizer.encode("a b c"))
            life = lineage.read(self.path)
            if again:
                directory.save(model, self.path.with_name("saved"), life=life)
                assert moesaic.load(self.path.with_name("saved"), threads=1).config == model.config
            return None
        except UserError as refusal:
            text = str(refusal)
            assert text.count("\n") <= 1 and len(text) < 3000 and text.replace("\n", "").isprintable(), text
            assert refusal.place and refusal.problem
            return refusal.problem


@pytest.fixture(autouse=True)
def limits() -> Iterator[None]:
    """A hang or an allocation far beyond these tiny models ends a test."""

    def late(*_: Any) -> None:
        raise AssertionError("no answer in time")

    usual = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + ROOM, usual[1]))
    before = signal.signal(signal.SIGALRM, late)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)
    resource.setrlimit(resource.RLIMIT_AS, usual)


def outcome(patient: Patient, what: Any, again: bool = False) -> str | None:
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        return patient.attempt(again)
    except Exception as error:
        raise AssertionError(f"{type(error).__name__} for {str(what)[:300]}") from error
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


# --- config.json

DELETED = object()
VALUES: list[Any] = [DELETED, None, True, False, -1, 0, 1, 2, 3, 5, 64, 10**6, 2**31, 2**63, 10**12, 10**30, 10**400]
VALUES += [
    0.5,
    -0.5,
    1.0,
    1e-30,
    1e30,
    1e308,
    -1e308,
    math.nan,
    math.inf,
    "",
    "abc",
    "12",
    "\ud800\n\x1b[31m",
    "x" * 5000,
]
VALUES += [[], [1], [0, -1, 10**30], ["abc"], ["full", "shared"], [None], {}, {"a": 1}, {"rope_type": "yarn"}]
VALUES += ["default", "yarn", "linear", "dynamic", "llama3", "shared", "softmax", [[[[]]]] * 3]


def spots(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where a value can be changed: every key of every mapping, every entry of every list."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from spots(inner, (*path, key))


def changed(value: Any, spot: tuple[Any, ...], new: Any) -> None:
    for key in spot[:-1]:
        value = value[key]
    if new is DELETED:
        del value[spot[-1]]
    else:
        value[spot[-1]] = new


# Keys a configuration may have, which those written here lack.
OPTIONAL = {
    "rope_scaling": {"type": "yarn", "factor": 2.0},
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.5,
    "num_nextn_predict_layers": 1,
    "torch_dtype": "float16",
    "quantization_config": {"quant_method": "fp8"},
    "index_topk_pattern": "FFFFF",
    "layer_types": ["full_attention"] * 5,
}


@pytest.mark.parametrize("name", ALL)
def test_config_values(name, bases, tmp_path):
    chooser = random.Random(name)
    base = json.loads((bases[name] / "config.json").read_bytes())
    raw = (
        base if name == "moesaic" else base | {key: value for key, value in OPTIONAL.items() if chooser.random() < 0.2}
    )
    for key in ("quantization_config", "rope_scaling"):
        raw.pop(key, None)
    places = list(spots(raw)) + [(key,) for key in OPTIONAL]
    refused = 0
    for number in range(120):
        mutant = copy.deepcopy(raw)
        done = []
        for _ in range(chooser.choice([1, 1, 1, 2, 3])):
            spot, new = chooser.choice(places), chooser.choice(VALUES)
            try:
                changed(mutant, spot, new)
            except (KeyError, IndexError, TypeError):
                continue  # an earlier change took the place away
            done.append((spot, new))
        patient = Patient(bases[name], tmp_path / "mutant")
        patient.put("config.json", json.dumps(mutant).encode())
        refused += outcome(patient, done, again=number % 6 == 0) is not None
    assert refused > 20


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("llama", {"num_hidden_layers": 10**9}),
        ("llama", {"num_hidden_layers": 10**4}),
        ("llama", {"vocab_size": 10**12}),
        ("llama", {"vocab_size": 2**31 - 1, "hidden_size": 2**31 - 1}),
        ("llama", {"head_dim": 2**30}),
        ("qwen3_moe", {"num_experts": 10**8, "num_experts_per_tok": 1}),
        ("qwen3_moe", {"num_experts": 2**31 - 1, "num_hidden_layers": 10**4}),
        ("mixtral", {"num_local_experts": 10**8, "intermediate_size": 1, "hidden_size": 1, "head_dim": 2}),
        ("glm4_moe", {"n_routed_experts": 10**8, "num_nextn_predict_layers": 100, "n_group": 1, "topk_group": 1}),
        ("deepseek_v3", {"n_shared_experts": 10**8}),
        ("glm_moe_dsa", {"index_n_heads": 2**30, "index_topk": 2**31 - 1}),
    ],
    ids=str,
)
def test_enormous_sizes_cost_nothing(name, keys, bases, tmp_path):
    patient = Patient(bases[name], tmp_path / "mutant")
    patient.put("config.json", json.dumps(patient.json("config.json") | keys).encode())
    usual = resource.getrusage(resource.RUSAGE_SELF).ru_utime
    assert outcome(patient, keys) is not None
    assert resource.getrusage(resource.RUSAGE_SELF).ru_utime - usual < 2


# --- bytes


def damaged(raw: bytes, chooser: random.Random, end: int | None = None) -> bytes:
    """Flip, overwrite, cut, repeat, insert or drop bytes; most of the harm before `end`."""
    data = bytearray(raw)
    for _ in range(chooser.choice([1, 1, 2, 5])):
        place = chooser.randrange(max(1, end or len(data))) if data else 0
        match chooser.randrange(6):
            case 0 | 1 if place < len(data):
                data[place] ^= 1 << chooser.randrange(8)
            case 2 if place < len(data):
                data[place] = chooser.choice(b'\x00\xff{}[]",:0129-e\\\n')
            case 3:
                del data[place : place + chooser.choice([1, 2, 8, len(data)])]
            case 4:
                data[place:place] = chooser.choice([b"\x00", b"}", b"0", b"-", data[:50], bytes(8)])
            case _:
                data += chooser.choice([b"\x00", b"{}", data[-20:]])
    return bytes(data)


@pytest.mark.parametrize(
    "file", ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "moesaic.json"]
)
def test_bytes_of_texts(file, bases, tmp_path):
    chooser = random.Random(file)
    garbage = [
        b"",
        b"\xff\xfe",
        b"null",
        b"[]",
        b"1",
        b"{",
        b'{"a":' * 100_000,
        b"[" * 100_000,
        b"\x00" * 1000,
        b'"\\ud800"',
    ]
    garbage += [b'{"eos_token_id": "x", "life": 3}', b'{"life": [1]}', b'{"life": {}}', b"9" * 5000, b"\xef\xbb\xbf{}"]
    names = ["llama", "moesaic"]
    refused = 0
    for number in range(60):
        name = names[number % 2]
        patient = Patient(bases[name], tmp_path / "mutant")
        raw = (patient.path / file).read_bytes()
        content = garbage[number] if number < len(garbage) else damaged(raw, chooser)
        patient.put(file, content)
        refused += outcome(patient, content, again=number % 10 == 0) is not None
    if file in ("generation_config.json", "tokenizer_config.json"):
        assert refused == 0  # settings one can do without
    else:
        assert refused > 20


@pytest.mark.parametrize("name", ["llama", "mixtral", "deepseek_v3", "moesaic"])
def test_bytes_of_weights(name, bases, tmp_path):
    chooser = random.Random(name)
    raw = (bases[name] / "model.safetensors").read_bytes()
    header = 8 + struct.unpack("<Q", raw[:8])[0]
    refused = 0
    for number in range(90):
        match number % 3:
            case 0:
                content = damaged(raw, chooser, header)
            case 1:
                content = raw[
                    : chooser.choice([0, 1, 7, 8, 9, header - 1, header, header + 1, len(raw) - 1, number * 7])
                ]
            case _:
                length = chooser.choice([0, 1, header - 9, header - 7, 2**31, 2**62, 2**64 - 1, 100 * 2**20])
                content = struct.pack("<Q", length) + raw[8:]
        patient = Patient(bases[name], tmp_path / "mutant")
        patient.put("model.safetensors", content)
        refused += outcome(patient, (number, len(content))) is not None
    assert refused > 60


def repacked(raw: bytes, edit: Callable[[dict[str, Any], bytearray], Any]) -> bytes:
    length = struct.unpack("<Q", raw[:8])[0]
    header, data = json.loads(raw[8 : 8 + length]), bytearray(raw[8 + length :])
    edit(header, data)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(data)


def test_every_lie_in_a_header_is_refused(bases, tmp_path):
    raw = (bases["llama"] / "model.safetensors").read_bytes()
    first, second = "model.norm.weight", "model.layers.0.input_layernorm.weight"
    embed = "model.embed_tokens.weight"

    def entry(**keys: Any) -> Callable[[dict[str, Any], bytearray], Any]:
        return lambda header, _: header[first].update(keys)

    def swap(header: dict[str, Any], _: bytearray) -> None:
        header["x"] = header.pop(first)

    lies: dict[str, tuple[Callable[[dict[str, Any], bytearray], Any], str]] = {
        "overlap": (lambda h, _: h[first].update(data_offsets=h[second]["data_offsets"]), "overlap or leave gaps"),
        "gap": (lambda h, _: h.pop(first), "overlap or leave gaps|longer|missing"),
        "reversed": (lambda h, _: h[first].update(data_offsets=h[first]["data_offsets"][::-1]), "corrupt entry"),
        "negative": (entry(data_offsets=[-192, 0]), "corrupt entry"),
        "far": (entry(data_offsets=[2**62, 2**62 + 192]), "overlap or leave gaps"),
        "three": (entry(data_offsets=[0, 1, 2]), "corrupt entry"),
        "text": (entry(data_offsets=["0", "192"]), "corrupt entry"),
        "half": (entry(dtype="F16"), "corrupt entry"),
        "wide": (entry(dtype="F64"), "corrupt entry"),
        "whole numbers": (entry(dtype="I32"), "has type 'I32', and only"),
        "unknown type": (entry(dtype="Q" * 9999), "and only F64, F32, F16, BF16 can be read"),
        "no type": (entry(dtype=None), "corrupt entry"),
        "shape": (entry(shape=[2, 24]), "misshapen: model.norm.weight is 2x24, not 48"),
        "huge shape": (entry(shape=[2**40, 2**40]), "corrupt entry"),
        "negative shape": (entry(shape=[-1, -48]), "corrupt entry"),
        "no shape": (entry(shape=[]), "corrupt entry"),
        "many dimensions": (entry(shape=[1] * 10**5 + [48]), "corrupt entry"),
        "zero": (entry(shape=[0, 10**9]), "corrupt entry"),
        "true": (entry(shape=[True, 48]), "corrupt entry"),
        "renamed": (swap, "1 tensor missing: model.norm.weight"),
        "unreadable name": (lambda h, _: h.update({"a\nb\x1b": h.pop(first)}), "unreadable name"),
        "long name": (lambda h, _: h.update({"a" * 10**6: h.pop(first)}), "unreadable name"),
        "appended": (lambda _, data: data.extend(b"123"), "longer than its header says"),
        "cut": (lambda _, data: data.__delitem__(slice(-4, None)), "truncated"),
        "empty": (lambda h, data: (h.clear(), data.clear()), "far more than the 0 tensors"),
        "list": (lambda h, _: h.update({first: []}), "corrupt entry"),
        "embedding in halves": (
            lambda h, _: h[embed].update(shape=[97 * 2, 24]),
            "misshapen: model.embed_tokens.weight is 194x24, not 97x48",
        ),
    }
    for name, (lie, message) in lies.items():
        patient = Patient(bases["llama"], tmp_path / "mutant")
        patient.put("model.safetensors", repacked(raw, lie))
        problem = outcome(patient, name)
        with pytest.raises(UserError, match=message):
            raise UserError("", problem or f"nothing wrong with {name}")
    extra = {"__metadata__": ["not", "a", "mapping"]}
    patient.put("model.safetensors", repacked(raw, lambda h, _: h.update(extra)))
    assert outcome(patient, "metadata") is None  # nobody needs it


BROKEN_TOKENIZERS = {
    # The library panics at these, the second only when it is used.
    "a prefix longer than a token": {"model": {"continuing_subword_prefix": "x" * 50}},
    "an unknown special token": {
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {},
        }
    },
    "a long unknown name": {"model": {"type": "x" * 5000}},
    "no model": {"model": None},
}


@pytest.mark.parametrize("change", BROKEN_TOKENIZERS.values(), ids=BROKEN_TOKENIZERS)
def test_tokenizers_that_break_the_library(change, bases, tmp_path):
    tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    raw = json.loads(tokenizer.to_str())
    for key, value in change.items():
        raw[key] = raw[key] | value if isinstance(raw[key], dict) and value else value
    patient = Patient(bases["llama"], tmp_path / "mutant")
    patient.put("tokenizer.json", json.dumps(raw).encode())
    problem = outcome(patient, change)
    assert problem is not None and problem.startswith("cannot be read (")


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{{ messages[0].x.y }}", "fails on these messages ('dict object' has no attribute 'x')"),
        ("{{ 1 / 0 }}", "fails on these messages (ZeroDivisionError: division by zero)"),
        ("{% for x in 3 %}{% endfor %}", "fails on these messages (TypeError: 'int' object is not iterable)"),
        ("{% if %}", "cannot be read (Expected an expression"),
        ("{{ messages | no_filter }}", "cannot be read (No filter named 'no_filter'"),
        ("{{ 'a' + 1 }}", "fails on these messages (TypeError: "),
    ],
)
def test_templates_that_fail(template, problem, bases, tmp_path):
    patient = Patient(bases["llama"], tmp_path / "mutant")
    text = f"\n\n{template}"
    ways = {"chat_template.jinja": text, "tokenizer_config.json": json.dumps({"chat_template": text})}
    for name, content in ways.items():
        (patient.path / "chat_template.jinja").unlink(missing_ok=True)
        patient.put(name, content.encode())
        tokenizer = moesaic.load(patient.path).tokenizer
        with pytest.raises(UserError, match=re.escape(f"the chat template ({name}), line 3, {problem}")) as raised:
            tokenizer.chat([{"role": "user", "content": "hi"}])
        assert raised.value.place == str(patient.path)
    form = ChatCompletionRequest.model_validate({"messages": [{"role": "user", "content": "hi"}]})
    with pytest.raises(UserError, match=f"^messages: the chat template .*, line 3, {problem[:5]}"):
        prompt_text(form, tokenizer)  # what the server answers with 400: the line, and no folder of its own


def test_a_template_that_refuses_is_quoted(bases, tmp_path):
    patient = Patient(bases["llama"], tmp_path / "mutant")
    patient.put("chat_template.jinja", b"{{ raise_exception('System role not supported') }}")
    with pytest.raises(
        UserError, match=r"the chat template refuses the messages \(System role not supported\). Correct"
    ):
        moesaic.load(patient.path).tokenizer.chat([{"role": "user", "content": "hi"}])


# --- index and files


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("../outside.safetensors", "points outside the directory"),
        ("/etc/passwd.safetensors", "points outside the directory"),
        ("sub/model.safetensors", "points outside the directory"),
        ("..", "is not in a safetensors file"),
        ("/etc/passwd", "is not in a safetensors file"),
        ("..\\a.safetensors", "points outside the directory"),
        (".hidden.safetensors", "points outside the directory"),
        ("a\x00.safetensors", "points outside the directory"),
        ("a\n.safetensors", "points outside the directory"),
        ("\ud800.safetensors", "points outside the directory"),
        ("x" * 400 + ".safetensors", "cannot be read|which is not there"),
        ("gone.safetensors", "names gone.safetensors, which is not there"),
        ("pytorch_model.bin", "is not in a safetensors file"),
        ("", "is not in a safetensors file"),
        (None, "is not in a safetensors file"),
        (3, "is not in a safetensors file"),
        (["a.safetensors"], "is not in a safetensors file"),
        ({"a": 1}, "is not in a safetensors file"),
    ],
    ids=str,
)
def test_index_entries(name, message, bases, tmp_path):
    patient = Patient(bases["sharded"], tmp_path / "model")
    shutil.copy(next(patient.path.glob("*.safetensors")), tmp_path / "outside.safetensors")
    index = patient.json("model.safetensors.index.json")
    index["weight_map"]["model.norm.weight"] = name
    patient.put("model.safetensors.index.json", json.dumps(index).encode())
    problem = outcome(patient, name)
    with pytest.raises(UserError, match=message):
        raise UserError("", problem or "nothing wrong")


def test_shuffled_and_damaged_indexes(bases, tmp_path):
    chooser = random.Random(3)
    for number in range(60):
        patient = Patient(bases["sharded"], tmp_path / "mutant")
        index = patient.json("model.safetensors.index.json")
        mapping = index["weight_map"]
        a, b = chooser.sample(sorted(mapping), 2)
        content: Any = index
        harmless = False
        match number % 6:
            case 0:
                harmless = mapping[a] == mapping[b]
                mapping[a], mapping[b] = mapping[b], mapping[a]
            case 1:
                mapping["x"] = mapping.pop(a)
            case 2:
                harmless = mapping[a] in {file for name, file in mapping.items() if name != a}
                del mapping[a]  # found all the same, if its shard is opened
            case 3:
                content = chooser.choice([{}, [], {"weight_map": []}, {"weight_map": {}}, {"weight_map": None}, 3])
            case 4:
                (patient.path / chooser.choice(sorted(set(mapping.values())))).unlink()
            case _:
                text = damaged(json.dumps(index).encode(), chooser)
                patient.put("model.safetensors.index.json", text)
                outcome(patient, text)
                continue
        patient.put("model.safetensors.index.json", json.dumps(content).encode())
        assert (outcome(patient, (number % 6, a, b)) is None) == harmless


def test_a_tensor_in_two_shards(bases, tmp_path):
    patient = Patient(bases["sharded"], tmp_path / "mutant")
    mapping = patient.json("model.safetensors.index.json")
    shard = mapping["weight_map"]["model.norm.weight"]
    shutil.copy(patient.path / shard, patient.path / "again.safetensors")
    mapping["weight_map"]["model.norm.weight"] = "again.safetensors"
    patient.put("model.safetensors.index.json", json.dumps(mapping).encode())
    assert "is also in" in str(outcome(patient, "twice"))


@pytest.mark.parametrize("file", ["config.json", "model.safetensors", "tokenizer.json"])
@pytest.mark.parametrize("kind", ["directory", "pipe", "loop", "broken link", "device", "gone"])
def test_files_that_are_none(file, kind, bases, tmp_path):
    patient = Patient(bases["llama"], tmp_path / "mutant")
    path = patient.path / file
    path.unlink()
    match kind:
        case "directory":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)
        case "loop":
            path.symlink_to(file)
        case "broken link":
            path.symlink_to("gone")
        case "device":
            path.symlink_to("/dev/zero")
    refused = outcome(patient, kind) is not None
    assert refused or file == "tokenizer.json"


def test_files_that_may_not_be_read(bases, tmp_path, monkeypatch):
    """The super-user may read all; so the system is made to refuse."""
    open_file, read = os.open, Path.read_bytes
    for file in ("config.json", "model.safetensors", "tokenizer.json"):
        patient = Patient(bases["llama"], tmp_path / "mutant")

        def refuse(path: Any, *rest: Any, file: str = file, **more: Any) -> int:
            if str(path).endswith(f"mutant/{file}"):
                raise PermissionError(13, "Permission denied")
            return open_file(path, *rest, **more)

        def refuse_read(path: Path, file: str = file) -> bytes:
            if str(path).endswith(f"mutant/{file}"):
                raise PermissionError(13, "Permission denied")
            return read(path)

        monkeypatch.setattr(os, "open", refuse)
        monkeypatch.setattr(Path, "read_bytes", refuse_read)
        assert outcome(patient, file) == "cannot be read (Permission denied)"
        monkeypatch.undo()


@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.pt", "consolidated.00.pth", "last.ckpt"])
def test_pickled_weights_are_not_opened(file, bases, tmp_path):
    class Bomb:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "exploded"),)

    patient = Patient(bases["llama"], tmp_path / "mutant")
    (patient.path / "model.safetensors").unlink()
    torch.save({"model.norm.weight": Bomb()}, patient.path / file)
    assert "pickled weights are never opened" in str(outcome(patient, file))
    patient.put("model.safetensors", (patient.path / file).read_bytes())  # nor under a false name
    assert outcome(patient, file) is not None
    assert not (tmp_path / "exploded").exists()


def test_a_file_that_shrinks_while_it_is_read(bases, tmp_path):
    from moesaic.model.formats.checkpoint import Checkpoint

    patient = Patient(bases["llama"], tmp_path / "mutant")
    patient.put("model.safetensors", (bases["llama"] / "model.safetensors").read_bytes())
    source = Checkpoint(patient.path)
    os.truncate(patient.path / "model.safetensors", 5000)
    with pytest.raises(UserError, match="can no longer be read: the file became shorter"):
        for name in source.shapes():
            source.tensor(name)


@pytest.mark.parametrize("path", ["gone", "a/b/c", "file", "file/x", "x\x00y", "n" * 5000, "", "loop"])
def test_places_that_are_no_directory(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    Path("loop").symlink_to("loop")
    with pytest.raises(UserError) as caught:
        moesaic.load(path)
    assert "\n" not in str(caught.value)
