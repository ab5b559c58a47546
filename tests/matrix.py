"""Every pluggable method, once, with options small enough for a tiny model.

The tests of a kind (`TestEveryKVPolicy`, `TestEveryCompressor`, ...) run for all that is listed here. A method is its
file in the package and its line in this one; `tests/test_matrix.py` misses the line of a file that has none.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

Options = dict[str, Any]

# Serving


@dataclass(frozen=True)
class KVCase:
    pruning: Options  # prunes prompts of a hundred tokens and answers of thirty
    whole: Options  # nothing is lost


KV_POLICIES: dict[str, KVCase] = {
    "sinks": KVCase({"share": 0.4, "least": 8, "every": 8}, {"share": 1.0, "every": 8}),
    "snapkv": KVCase({"share": 0.4, "least": 8, "window": 8}, {"share": 1.0}),
    "h2o": KVCase({"share": 0.4, "least": 8, "every": 8}, {"share": 1.0, "every": 8}),
    "lethe": KVCase({"share": 0.4, "least": 8, "every": 8}, {"share": 1.0, "every": 8}),
    "kvmerger": KVCase({"share": 0.4, "least": 8, "window": 8}, {"share": 1.0}),
    "fastgen": KVCase({"share": 0.4, "least": 8, "window": 8, "every": 8}, {"share": 1.0, "every": 8}),
    "quantized": KVCase({"bits": 4, "group": 8, "recent": 8}, {"recent": 200}),
    "minikv": KVCase(
        {"share": 0.6, "least": 8, "window": 8, "group": 8, "recent": 8},
        {"share": 1.0, "recent": 200},
    ),
}
# {other} is the directory of another, smaller model.
DRAFTERS: dict[str, Options] = {
    "suffix": {"tokens": 100_000},
    "mtp": {"length": 3},
    "model": {"path": "{other}", "length": 3, "cache_bytes": 100_000},
    "swift": {"path": "{other}", "width": 3, "nodes": 12, "wait": 30.0},
    "router": {"draft_model": "{other}"},
}
SCHEDULING_POLICIES: dict[str, Options] = {"chunked": {"tokens": 48}, "flow": {"itl": 0.05}}
PARSERS = [
    *("apertus", "apriel", "cohere", "command_r", "deepseek_v3", "deepseek_v32", "function_gemma"),
    *("functionary_v31", "functionary_v32", "gemma", "gemma4", "gigachat", "glm", "gpt_oss"),
    *("granite", "granite_20b", "hermes", "hunyuan_v3", "internlm2", "kimi_k2", "kimi_k3"),
    *("lfm2", "llama3", "llama4", "longcat", "minicpm5", "minimax_m2", "minimax_m3"),
    *("mistral", "muse", "nemotron", "olmo3", "phi4", "plain", "pythonic"),
    *("qwen3_coder", "seed_oss", "solar", "step3", "tool_calls", "xlam"),
]

# Compression


@dataclass(frozen=True)
class Compression:
    options: Options
    bytes_left: float  # the largest share of the model's bytes
    logit_change: float | None  # the largest change of the logits; None: it is another model
    kind: str = "qwen3_moe"  # of the tiny model


COMPRESSORS: dict[str, Compression] = {
    "rtn": Compression({"bits": 4, "group": 32}, 0.25, 0.4),
    "gptq": Compression({"bits": 4, "group": 32}, 0.28, 0.4),
    "awq": Compression({"bits": 4, "group": 32}, 0.25, 0.4),
    "hqq": Compression({"bits": 4, "group": 32}, 0.28, 0.4),
    "milo": Compression({"bits": 3, "group": 32, "rank": 8, "expert_rank": 4}, 0.5, 0.6),
    "zeroquant": Compression({"bits": 8, "group": 0, "steps": 3}, 0.35, 0.1),
    "mixed": Compression({"bits": 4.0, "group": 32}, 0.28, 0.45),
    "nm": Compression({"score": "admm", "bits": 4, "group": 32}, 0.25, None),
    "iss": Compression({"keep": 0.5}, 0.95, None),
    "nm_mixed": Compression({"bits": 3.0, "macs": 0.5, "group": 32}, 0.25, None),
    "prune_experts": Compression({"keep": 2}, 0.95, None),
    "merge_experts": Compression({"keep": 2}, 0.95, None),
    "index_cache": Compression({"keep": 0.5, "steps": 4}, 0.999, None, "glm_moe_dsa"),
    "students": Compression({"depth": 0.5, "steps": 4}, 0.75, None),
    "xtc": Compression({"bits": 1, "group": 32, "depth": 0.5, "steps": 4}, 0.25, None),
}

# Training


@dataclass(frozen=True)
class ObjectiveCase:
    options: Options
    reaches: frozenset[str]  # parts of a model with prediction layers and a value head that it trains
    by_targets: bool = True  # a token without a target, weight or label is not trained on


BODY = frozenset({"embed", "layers", "norm"})
OBJECTIVES: dict[str, ObjectiveCase] = {
    # Its targets are the blanks it cuts itself, wherever they fall.
    "blank_infilling": ObjectiveCase({"share": 0.3}, BODY | {"head"}, by_targets=False),
    "distill": ObjectiveCase({"teacher": "{other}"}, BODY | {"head"}),
    "knowledge": ObjectiveCase({}, BODY | {"head"}),
    "next_token": ObjectiveCase({}, BODY | {"head", "mtp"}),
    "policy": ObjectiveCase({}, BODY | {"head"}),
    "preference": ObjectiveCase({}, BODY | {"head"}),
    "reward_model": ObjectiveCase({}, BODY | {"value"}),
}
CONSTRAINTS: dict[str, Options] = {
    "iss": {"keep": 0.5},
    "nm": {"n": 2, "m": 4, "every": 2, "settle": 0.5, "bits": 4, "group": 32},
    "quantized": {"bits": 2, "group": 32, "ternary": True},
}
OPTIMIZERS: dict[str, Options] = {"adamw": {}, "muon": {}, "zero_one_adam": {}}
SCHEDULES: dict[str, Options] = {
    "constant": {},
    "cosine": {"floor": 0.1},
    "from_file": {"path": "{schedule}"},
    "linear": {"floor": 0.1},
    "moderate": {"end": 0.5, "decay": 0.3},
    "wsd": {"decay": 0.3, "floor": 0.1, "shape": "exponential"},
    "wsd_power": {"decay": 0.3, "power": 2.0},
}

# Data

CURRICULA: dict[str, Options] = {
    "column": {"column": "grade", "descending": True},
    "consistency": {},
    "length": {},
    "multi_domain": {},
    "quality": {"best_first": True},
    "rarity": {},
}
QUALITY_SCORES: dict[str, Options] = {
    "column": {"column": "edu"},
    "compression": {},
    "consistency": {"models": ["{model}"], "tokens": 16, "batch_tokens": 24},
    "length": {},
    "perplexity": {"model": "{model}", "tokens": 16, "batch_tokens": 24},
    "repetition": {"words": 2},
}

# Alignment and evaluation

UNREACHABLE = "http://127.0.0.1:9/v1"
REWARDS: dict[str, Options] = {
    "code_tests": {"bare": True, "seconds": 120.0},
    "constraints": {},
    "critic": {"model": "{reward_model}", "tokens": 4},
    "critique": {"url": UNREACHABLE, "model": "judge", "retries": 0},
    "detector": {"model": "{reward_model}"},
    "environment": {},
    "exact": {},
    "explained": {},
    "faithfulness": {},
    "format": {},
    "json_schema": {"default_schema": {"type": "object"}},
    "length": {"max_length": 10},
    "math": {"seconds": 1.0},
    "model": {"path": "{reward_model}", "by": "min"},
    "numeric": {},
    "overlong": {"limit": 100},
    "process": {},
    "repetition": {},
    "slides": {"metric": "balance"},
    "supported": {},
    "task": {},
}
SELECTIONS: dict[str, Options] = {
    "cropi": {"pool": 10, "validation": ({"path": "builtin:gcd:max_value=9"},), "validation_prompts": 2, "every": 2},
    "rlcs": {"pool": 5},
    "uniform": {},
}
STAGES = [
    *("critiques", "demonstrations", "distill", "policy", "preference", "rejection", "reward_model", "sft"),
    "trajectories",
]
TOOLS = ["python", "search"]
# Environments with tasks of their own: so many episodes a solver that knows the rules must win.
WORLDS: dict[str, int] = {
    **{"shell": 14, "sql": 40, "graph": 40, "cards": 40, "house": 40, "multihop": 40},
    **{"shop": 12, "browse": 12, "lateral": 40, "repair": 10, "kernel": 9},
}
ENVIRONMENTS = [*WORLDS, "planner", "retrieval", "several", "tool_use"]
SUITES = [
    "agents", "choice", "instructions", "lm_eval", "longbench", "longcontext", "machine", "math", "multihop",
    "perplexity", "safety", "tasks",
]  # fmt: skip

# Models: what each is compared with `transformers` on is in tests/model/oracle.py, three or more cases for each.
ENCODERS = ["bert", "modernbert"]
FAMILIES = [
    *("chatglm", "deepseek_v3", "deepseek_v32", "ernie4_5_moe", "glm", "glm4", "glm4_moe", "glm_moe_dsa", "kimi_k2"),
    *("gpt_oss", "llama", "mixtral", "moesaic", "qwen3", "qwen3_moe"),
    *("dots1", "hunyuan_v1_moe", "llama4_text", "minimax_m2", "olmoe", "qwen2_moe", "qwen3_next", "qwen3_5_moe_text"),
]
# What `transformers` knows under another name.
RENAMED = {"chatglm", "kimi_k2"}

METHODS: dict[str, Collection[str]] = {
    "align/rewards": REWARDS,
    "align/selection": SELECTIONS,
    "align/stages": STAGES,
    "compress/methods": COMPRESSORS,
    "data/curricula": CURRICULA,
    "data/quality": QUALITY_SCORES,
    "evaluate/suites": SUITES,
    "model/families": [*ENCODERS, *FAMILIES],
    "serve/core/drafters": DRAFTERS,
    "serve/core/kv_policies": KV_POLICIES,
    "serve/core/scheduling_policies": SCHEDULING_POLICIES,
    "serve/parsers": PARSERS,
    "train/constraints": CONSTRAINTS,
    "train/objectives": OBJECTIVES,
    "train/optimizers": OPTIMIZERS,
    "train/schedules": SCHEDULES,
    "worlds/environments": ENVIRONMENTS,
    "worlds/tools": TOOLS,
}


# Kinds whose methods are compared with others' implementations case by case; each of all others has an idea, and a
# line in tests/ideas/ that removes it: `python -m tests.mutations` demands that a test notices.
COMPARED = {"model/families", "serve/parsers"}


def filled(options: Options, **paths: object) -> Options:
    """Options with the paths that stand for {names}."""

    def one(value: object) -> object:
        if isinstance(value, list):
            return [one(item) for item in value]
        return value.format(**paths) if isinstance(value, str) and value.startswith("{") else value

    return {key: one(value) for key, value in options.items()}
