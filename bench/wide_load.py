"""What is asked of every deployment of `moesaic serve`: the same requests, of every kind, whose answers must be equal.

`DEPLOYMENTS` are the ways to serve one model on several processes; `requests` are completions and chats of mixed
lengths, greedy and sampled with seeds, with tools, schemas, adapters, siblings, stop strings and log-probabilities;
`answer` is what of a response must not depend on who computed it, to the last bit.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors.torch import save_file

from moesaic.data.tokenizer_training import save_tokenizer, train_tokenizer
from moesaic.model.directory import save
from moesaic.model.families import read_config
from moesaic.model.transformer import Model
from moesaic.serve.bench.load import random_words

DEPLOYMENTS: dict[str, list[str]] = {
    "one process": [],
    "tp=2": ["--layout", "tp=2"],
    "ep=2": ["--layout", "ep=2"],
    "tp=2 ep=2": ["--layout", "tp=2 ep=2"],
    "prefill (tp=2) + decode": ["--prefill", "1", "--decode", "1", "--prefill-layout", "tp=2"],
    "attention 2 + experts 2": ["--attention", "2", "--experts", "2"],
}
ADAPTERS = ("terse", "loud")
TEMPLATE = (
    "{% if tools %}tools: {{ tools | tojson }}\n{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
)
COMMON: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "initializer_range": 0.15,
}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_key_value_heads": 2, "head_dim": 16, "num_experts": 8},
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "q_lora_rank": 48,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "num_nextn_predict_layers": 0,
    },
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"place": {"enum": ["here", "there"]}, "days": {"type": "integer"}},
            "required": ["place", "days"],
            "additionalProperties": False,
        },
    },
}
SCHEMA = {
    "type": "json_schema",
    "json_schema": {
        "name": "answer",
        "schema": {
            "type": "object",
            "properties": {"yes": {"type": "boolean"}, "number": {"enum": [1, 2, 3]}},
            "required": ["yes", "number"],
            "additionalProperties": False,
        },
    },
}

Request = tuple[str, dict[str, Any]]  # the path it is posted to, and its body


def make_directory(path: Path, family: str = "qwen3_moe") -> Path:
    """A small model of random weights, and two adapters of it beside it."""
    torch.manual_seed(0)
    save(Model(read_config({"model_type": family, **COMMON, **SHAPES[family]}, "bench")).initialize(), path)
    texts = [random_words(random.Random(n), 60) + f' {{"name": "x", "place": {n}}}\n' for n in range(80)]
    save_tokenizer(train_tokenizer(texts, COMMON["vocab_size"]), path)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    for seed, name in enumerate(ADAPTERS):
        write_adapter(path.parent / name, seed, "o_proj", (64, 64))
    return path


def write_adapter(path: Path, seed: int, module: str, shape: tuple[int, int], rank: int = 4) -> None:
    """As `peft` writes it."""
    path.mkdir()
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 16, "target_modules": [module], "bias": "none"}
    (path / "adapter_config.json").write_text(json.dumps(settings))
    made, (inputs, outputs) = torch.Generator().manual_seed(seed), shape
    tensors = {}
    for layer in range(COMMON["num_hidden_layers"]):
        name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
        tensors[f"{name}.lora_A.weight"] = torch.randn(rank, inputs, generator=made) * 0.2
        tensors[f"{name}.lora_B.weight"] = torch.randn(outputs, rank, generator=made) * 0.2
    save_file(tensors, path / "adapter_model.safetensors")


def adapter_options(directory: Path) -> list[str]:
    return [word for name in ADAPTERS for word in ("--adapter", f"{name}={directory.parent / name}")]


def requests(count: int, model: str, seed: int = 0) -> list[Request]:
    """So many, of every kind in turn."""
    chosen = random.Random(seed)
    return [_KINDS[number % len(_KINDS)](chosen, number, model) for number in range(count)]


def _words(chosen: random.Random, least: int, most: int) -> str:
    shared = random_words(random.Random(chosen.randrange(6)), 24)  # a prefix that others have, too
    return f"{shared} {random_words(chosen, chosen.randint(least, most))}"


def _body(chosen: random.Random, number: int, model: str, tokens: int) -> dict[str, Any]:
    return {"model": model, "max_tokens": chosen.randint(1, tokens), "seed": number, "ignore_eos": True}


def _completion(chosen: random.Random, number: int, model: str, **more: Any) -> Request:
    body = _body(chosen, number, model, 24) | {"prompt": _words(chosen, 1, 60), "logprobs": 3}
    return "/v1/completions", body | more


def _chat(chosen: random.Random, number: int, model: str, **more: Any) -> Request:
    message = {"role": "user", "content": _words(chosen, 1, 30)}
    body = _body(chosen, number, model, 24) | {"messages": [message], "logprobs": True, "top_logprobs": 2}
    return "/v1/chat/completions", body | more


def _greedy(chosen: random.Random, number: int, model: str) -> Request:
    return _completion(chosen, number, model, temperature=0)


def _sampled(chosen: random.Random, number: int, model: str) -> Request:
    return _completion(chosen, number, model, temperature=0.9, top_p=0.95)


def _adapted(chosen: random.Random, number: int, model: str) -> Request:
    return _completion(chosen, number, chosen.choice(ADAPTERS), temperature=0.7)


def _siblings(chosen: random.Random, number: int, model: str) -> Request:
    return _chat(chosen, number, model, n=2, temperature=1.0, top_k=40)


def _tools(chosen: random.Random, number: int, model: str) -> Request:
    more = {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "weather"}}}
    return _chat(chosen, number, model, temperature=0.8, **more, max_tokens=40)


def _structured(chosen: random.Random, number: int, model: str) -> Request:
    return _chat(chosen, number, model, temperature=0.8, response_format=SCHEMA, max_tokens=40)


def _stopped(chosen: random.Random, number: int, model: str) -> Request:
    return _completion(chosen, number, model, temperature=0.8, stop=["a ", "the"], presence_penalty=0.5)


def _echoed(chosen: random.Random, number: int, model: str) -> Request:
    return _completion(chosen, number, model, temperature=0, echo=True)


_KINDS: Sequence[Callable[[random.Random, int, str], Request]] = (
    _greedy, _sampled, _adapted, _siblings, _tools, _structured, _stopped, _echoed,
)  # fmt: skip


def answer(response: dict[str, Any]) -> list[dict[str, Any]]:
    """The choices without what is made up anew each time. Floats come as written, so that equal is equal to the bit."""
    choices = json.loads(json.dumps(response["choices"]))
    for choice in choices:
        for call in (choice.get("message") or {}).get("tool_calls") or ():
            call.pop("id")
    return choices  # type: ignore[no-any-return]


async def ask_all(url: str, asked: Sequence[Request], at_once: int = 16) -> list[list[dict[str, Any]]]:
    """The answers to all, in their order."""
    gate = asyncio.Semaphore(at_once)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=httpx.Limits(max_connections=None)) as client:

        async def one(path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
            async with gate:
                response = await client.post(path, json=body)
            assert response.status_code == 200, f"{response.status_code}: {response.text[:500]}"
            return answer(response.json())

        return await asyncio.gather(*(one(*request) for request in asked))
