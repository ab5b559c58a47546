"""What an engine can do, it can do on several ranks, to the bit; what it cannot is refused in words at the start."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import moesaic
from moesaic.compress.compress import CompressionRequest, compress
from moesaic.compress.methods import Compressor
from moesaic.errors import UserError
from moesaic.methods import Method, build
from moesaic.model.directory import load
from moesaic.serve.core.drafters import Drafter
from moesaic.serve.core.drafters.model import DraftModel
from moesaic.serve.core.drafters.mtp import PredictionLayers
from moesaic.serve.core.drafters.router import DraftRouter
from moesaic.serve.core.drafters.suffix import Suffix
from moesaic.serve.core.drafters.swift import Swift
from moesaic.serve.core.engine import Engine
from moesaic.serve.core.grammar import Grammar
from moesaic.serve.core.kv_policies.h2o import H2O
from moesaic.serve.core.scheduling_policies.flow import FlowPrefill
from moesaic.serve.group.ranks import serving_layout
from moesaic.serve.group.refusals import check_options
from moesaic.serve.group.shares import check
from tests.compress.made import make
from tests.model.test_mtp import checkpoint
from tests.serve.group.groups import Case, answers, in_groups, model_directory, new_request, some_requests, written
from tests.serve.made import talking_model

OPTIONS = {"page_size": 4, "cache_bytes": 2**21}
SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 6}}, "required": ["name"]}


def compare(cases: list[Case], folder: Path) -> list[Any]:
    """Every case in its group and in one process; what they gave."""
    found, expected = in_groups(cases, folder), []  # groups first: a drafter that has drafted cannot be sent to them
    for case in cases:
        engine = Engine(moesaic.load(case.directory, **case.load), **case.options)
        expected.append(json.loads(json.dumps(case.work(engine, *case.args))))
    for case, ours, theirs in zip(cases, found, expected, strict=True):
        assert ours == theirs, f"{case.layout} {case.work.__name__} {case.directory.name} {case.options}"
    return found


def make_adapter(directory: Path, modules: dict[str, tuple[int, int]], seed: int) -> Path:
    """As `peft` writes them: `modules` with their outputs and inputs."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for module, (outputs, inputs) in modules.items():
        tensors[f"base_model.model.{module}.lora_A.weight"] = torch.randn(3, inputs, generator=generator) * 0.3
        tensors[f"base_model.model.{module}.lora_B.weight"] = torch.randn(outputs, 3, generator=generator) * 0.3
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors")
    targets = sorted({module.rpartition(".")[2] for module in modules})
    settings = {"peft_type": "LORA", "lora_alpha": 5, "r": 3, "target_modules": targets}
    (directory / "adapter_config.json").write_text(json.dumps(settings))
    return directory


def with_adapters(engine: Engine, paths: list[str], asked: list[Any]) -> Any:
    """Three ways side by side, one adapter loaded while requests run, another replaced while it is used."""
    engine.load_adapter("one", paths[0])
    requests = [new_request(engine, {**one, "adapter": [None, "one"][n % 2]}) for n, one in enumerate(asked)]
    for request in requests:
        engine.add(request)
    engine.step()
    engine.load_adapter("two", paths[1])
    late = [new_request(engine, {**one, "adapter": "two"}) for one in asked[:3]]
    engine.load_adapter("one", paths[1])
    engine.unload_adapter("two")
    for request in late:
        engine.add(request)
    while engine.working:
        engine.step()
    return [written(request) for request in requests + late]


def test_adapters(tmp_path: Path) -> None:
    asked = some_requests(8)
    glm, deepseek = (model_directory(kind, tmp_path / kind) for kind in ("glm4_moe", "deepseek_v3"))
    attention = {"q_proj": (64, 32), "k_proj": (8, 32), "v_proj": (8, 32), "o_proj": (32, 64)}
    modules = {f"model.layers.1.self_attn.{name}": size for name, size in attention.items()}
    modules |= {"model.layers.0.mlp.down_proj": (32, 50), "model.layers.2.mlp.shared_experts.up_proj": (20, 32)}
    of_glm = [str(make_adapter(tmp_path / f"glm-{n}", modules, n)) for n in range(2)]
    latent = {"q_a_proj": (24, 32), "q_b_proj": (80, 24), "kv_a_proj_with_mqa": (28, 32), "o_proj": (32, 40)}
    modules = {f"model.layers.1.self_attn.{name}": size for name, size in latent.items()}
    of_deepseek = [str(make_adapter(tmp_path / f"deepseek-{n}", modules, n)) for n in range(2)]
    cases = [
        Case("tp=2", glm, with_adapters, of_glm, asked, **OPTIONS),
        Case("tp=2 ep=2", deepseek, with_adapters, of_deepseek, asked, **OPTIONS),
        Case("ep=2", glm, with_adapters, of_glm, asked, **OPTIONS),
    ]
    first, *_ = compare(cases, tmp_path)
    assert first[0]["tokens"] != first[-3]["tokens"]  # the adapter changes something


def test_an_adapter_that_no_engine_can_run_is_refused_before_any_rank_reads_it(tmp_path: Path) -> None:
    """It would end the group in the middle of a step."""
    model = load(model_directory("deepseek_v3", tmp_path / "model"))
    wrong = make_adapter(tmp_path / "adapter", {"model.layers.1.self_attn.kv_b_proj": (88, 20)}, 0)
    with pytest.raises(UserError, match="expands cached latents"):
        Engine(model).load_adapter("wrong", wrong)


def test_quantized_weights(tmp_path: Path) -> None:
    wish = CompressionRequest(samples=2, length=64, check_tokens=0)
    packed = CompressionRequest(samples=2, length=64, check_tokens=0, layout="compressed-tensors")
    model = make(tmp_path / "model")
    ways: list[tuple[str, dict[str, Any], CompressionRequest]] = [
        ("rtn", {"bits": 4, "group": 32}, wish),
        ("rtn", {"bits": 8, "group": 32, "symmetric": False}, wish),
        ("milo", {"bits": 4, "group": 32, "turns": 1}, wish),
        ("rtn", {"bits": 4, "group": 32}, packed),
    ]
    cases, asked = [], some_requests(6, tokens=4)
    for number, (method, options, how) in enumerate(ways):
        made = build(Method(method, options), Compressor, "test")  # type: ignore[type-abstract]
        compress(model, made, tmp_path / f"q{number}", how)
        cases.append(Case("tp=2", tmp_path / f"q{number}", answers, asked, **OPTIONS))
    cases.append(Case("tp=2 ep=2", tmp_path / "q0", answers, asked, **OPTIONS))
    cases.append(Case("ep=2", tmp_path / "q1", answers, asked, **OPTIONS))
    assert load(tmp_path / "q0").quantized
    compare(cases, tmp_path)


def test_samplers(tmp_path: Path) -> None:
    """Rank 0 samples, whatever with."""
    asked = some_requests(8, tokens=9)
    kinds: list[dict[str, Any]] = [
        {"mirostat": 2, "mirostat_tau": 3.0, "mirostat_eta": 0.5},
        {"dry_multiplier": 2.0, "dry_allowed_length": 1, "dry_penalty_last_n": -1},
        {"xtc_probability": 0.5, "xtc_threshold": 0.02, "typical_p": 0.9},
        {"top_n_sigma": 1.0, "dynatemp_range": 0.5, "bad_words": ((5,), (7, 9))},
    ]
    for one, kind in zip(asked, kinds * 2, strict=True):
        one["sampling"] |= {"temperature": 1.2} | kind
    directory = model_directory("glm4_moe", tmp_path / "model")
    compare([Case("tp=2", directory, answers, asked, **OPTIONS)], tmp_path)


def drafted(engine: Engine, asked: list[Any]) -> Any:
    found = answers(engine, asked)
    assert engine.counts.accepted_tokens > 0
    return found


def drafted_beside(engine: Engine, asked: list[Any]) -> Any:
    """Its trees come when they come: how many draft tokens a step has depends on that, what is answered does not."""
    found = answers(engine, asked)
    assert engine.counts.drafted_tokens > 0
    return found


def routed(drafter: Drafter) -> DraftRouter:
    return DraftRouter.over(drafter, always=True)


def test_drafters(tmp_path: Path) -> None:
    """The small model drafts like itself with other last layers; answers go round in circles, so that drafts fit."""
    directory, further = model_directory("glm4_moe", tmp_path / "glm"), tmp_path / "mtp"
    checkpoint("glm4_moe", 1, further)
    asked = some_requests(4)
    for one in asked:
        one["prompt"] = one["prompt"][:4] * 6
        one["sampling"]["max_tokens"] = 12
    own = DraftModel(str(directory), length=3)
    ways = [("tp=2", directory, Suffix()), ("tp=2", directory, own), ("ep=2", directory, own)]
    ways.append(("tp=2", further, PredictionLayers(length=2)))
    ways.append(("tp=2 ep=2", further, PredictionLayers(length=2)))
    cases = [
        # Random layers draft nothing that fits; what they draft must do no harm.
        Case(layout, path, drafted if path == directory else answers, asked, drafter=routed(drafter), **OPTIONS)
        for layout, path, drafter in ways
    ]
    swift = routed(Swift(str(directory), wait=60.0))
    # In a tree a token and its parent have others between them, and sums over keys round by that: here lines only.
    lines = {"mode": "invariant"}
    cases.append(Case("tp=2", directory, drafted_beside, asked, load=lines, drafter=swift, **OPTIONS))
    compare(cases, tmp_path)


def in_words(engine: Engine, prompts: list[str]) -> Any:
    grammar = Grammar.json(SCHEMA)
    found = engine.generate(prompts, n=2, max_tokens=40, temperature=1.0, seed=2, grammar=grammar)
    return [[answer.text, answer.tokens, [one.logprob.hex() for one in answer.logprobs]] for answer in found]


def test_structured_output(tmp_path: Path) -> None:
    directory = talking_model(tmp_path / "talking")
    case = Case("tp=2", directory, in_words, ["Answer:", "The number"], **OPTIONS)
    for text, *_ in compare([case], tmp_path)[0]:
        assert text.startswith("{")


def all_reports(engine: Engine, asked: list[Any]) -> Any:
    """Prompt log-probabilities, routes, embeddings, then the same with weights that changed in between."""
    found = answers(engine, asked)
    embedded = [new_request(engine, {**one, "embed": True}) for one in asked[:3]]
    requests = [new_request(engine, one) for one in asked[:4]]
    for request in embedded + requests:
        engine.add(request)
    engine.step()
    engine.weights_changed()
    while engine.working:
        engine.step()
    return found + [written(request) for request in embedded + requests]


def preempted(engine: Engine, asked: list[Any]) -> Any:
    found = answers(engine, asked)
    assert engine.scheduler.preemptions > 0 and engine.page_pool.in_use == 0
    return found


def test_reports_preemption_and_a_float8_cache(tmp_path: Path) -> None:
    directory = model_directory("qwen3_moe", tmp_path / "qwen3")
    asked = some_requests(8)
    for number, one in enumerate(asked):
        given = {"logprobs": 0, "logprob_tokens": (7, 3)}
        one["sampling"] |= {"prompt_logprobs": 2} | given if number % 2 else {"record_routes": True}
    page = 3 * 2 * 2 * 8 * 4 * 4  # layers, keys and values, heads, head size, page size, bytes
    many = some_requests(10, tokens=20)
    cases = [
        Case("tp=2", directory, all_reports, asked, **OPTIONS),
        Case("ep=2", directory, all_reports, asked, **OPTIONS),
        Case("tp=2", directory, answers, asked, cache_dtype="float8", **OPTIONS),
        Case("tp=2 ep=2", directory, answers, asked, cache_dtype="bfloat16", **OPTIONS),
        # A rank's half of the heads makes its pages half as large.
        Case("tp=2", directory, preempted, many, page_size=4, cache_bytes=20 * page // 2),
        Case("ep=2", directory, preempted, many, page_size=4, cache_bytes=20 * page),
    ]
    compare(cases[:4], tmp_path)
    found = in_groups(cases[4:], tmp_path)
    assert found[0] == found[1] == answers(Engine(moesaic.load(directory, threads=1), **OPTIONS), many)


def other_weights(engine: Any, asked: list[Any], directory: str) -> Any:
    before = answers(engine, asked)
    engine.load_weights(directory)
    return before, answers(engine, asked)


def test_weights_are_read_again_from_another_directory(tmp_path: Path) -> None:
    one, two = (model_directory("qwen3_moe", tmp_path / f"{n}", initializer_range=0.2 + 0.1 * n) for n in range(2))
    asked = some_requests(4)
    ((before, after),) = in_groups([Case("tp=2", one, other_weights, asked, str(two), **OPTIONS)], tmp_path)
    expected = [answers(Engine(moesaic.load(path, threads=1), **OPTIONS), asked) for path in (one, two)]
    assert [before, after] == expected and before != after


@pytest.mark.parametrize(
    ("layout", "options", "problem"),
    [
        ("tp=2", {"kv_policy": H2O()}, "no rank has all heads"),
        ("tp=2", {"policy": FlowPrefill()}, "interrupts forwards between layers"),
        ("ep=2", {"drafter": PredictionLayers()}, "requests or experts on ranks of their own"),
    ],
)
def test_what_a_group_cannot_do_is_said_at_the_start(layout: str, options: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        check_options(options, serving_layout(layout).dp == 1)


@pytest.mark.parametrize(
    ("layout", "problem"),
    [
        ("pp=2", "is for training"),
        ("cp=2", "is for training"),
        ("tp=3", "does not divide the model's 4 attention heads.*tp=2"),
        ("ep=3 dp=3", "does not divide a layer's 8 experts.*ep=2"),
        ("tp=2 xp=3", "unknown part"),
    ],
)
def test_layouts_that_do_not_fit_are_refused(layout: str, problem: str, tmp_path: Path) -> None:
    directory = model_directory("qwen3_moe", tmp_path / "model")
    with pytest.raises(UserError, match=problem):
        check(load(directory).config, serving_layout(layout))
