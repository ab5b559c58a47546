"""Parallel context windows: as a plain implementation gives them, whatever else the engine does, and further than the
model's context."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import moesaic
from moesaic.errors import UserError
from moesaic.serve.core.context_windows import joined
from moesaic.serve.core.drafters.router import DraftRouter
from moesaic.serve.core.drafters.suffix import Suffix
from moesaic.serve.core.engine import Engine
from moesaic.serve.core.request import Sampling
from moesaic.serve.core.scheduling_policies.chunked import Chunked
from tests.model import oracle
from tests.serve.tiny import serve_all

LENGTHS = [[7, 19, 12], [33, 5], [16, 16, 1, 9]]


@torch.no_grad()
def reference(model: Any, contexts: Sequence[Sequence[int]], task: Sequence[int], count: int) -> list[int]:
    """Greedy tokens by `transformers`: one whole forward for each, with the mask and the positions written out."""
    longest, before = max(map(len, contexts)), sum(map(len, contexts))
    said: list[int] = []
    for _ in range(count):
        tail = [*task, *said]
        tokens = [token for context in contexts for token in context] + tail
        sees = torch.zeros(len(tokens), len(tokens), dtype=torch.bool)
        start, positions = 0, []
        for context in contexts:
            sees[start : start + len(context), start : start + len(context)] = True
            positions += range(len(context))
            start += len(context)
        sees[before:] = True
        positions += range(longest, longest + len(tail))
        mask = torch.zeros(sees.shape).masked_fill(~sees.tril(), torch.finfo(torch.float32).min)
        found = model(
            torch.tensor([tokens]),
            attention_mask=mask[None, None],
            position_ids=torch.tensor([positions]),
            use_cache=False,
        )
        said.append(int(found.logits[0, -1].argmax()))
    return said


def texts(lengths: Sequence[int], seed: int) -> list[list[int]]:
    draws = random.Random(seed)
    return [[draws.randrange(3, 97) for _ in range(length)] for length in lengths]


@pytest.mark.parametrize("case", ["llama-tied", "deepseek_v3"])  # latents keep a part that turns: they repeat too
def test_as_a_plain_implementation(case: str, tmp_path: Path):
    """In chunks, beside other requests, preempted, and with draft tokens."""
    plain = oracle.save(case, tmp_path).eval()
    model = moesaic.load(tmp_path, threads=1)
    task = [5, 6, 7]
    expected = [reference(plain, texts(lengths, seed), task, 6) for seed, lengths in enumerate(LENGTHS)]
    for options in (
        {"page_size": 16},
        {"page_size": 4, "policy": Chunked(tokens=9)},
        {"page_size": 4, "drafter": DraftRouter.over(Suffix(), always=True)},
    ):
        engine = Engine(model, **options)
        sampling = Sampling(max_tokens=6, temperature=0.0, ignore_eos=True)
        requests = []
        for seed, lengths in enumerate(LENGTHS):
            prompt, windows = joined(texts(lengths, seed), task)
            requests += [engine.request(prompt, sampling, windows=windows), engine.request(texts([30], 9)[0], sampling)]
        for request in requests:
            engine.add(request)
        for step in itertools.count():
            if not engine.working:
                break
            engine.step()
            holding = [one for one in requests[::2] if one.pages and one.finish_reason is None]
            if step % 5 == 4 and holding and engine.scheduler.preemptions < 4:  # in a window, between two, behind them
                engine.scheduler.preempt(holding[-1])
        assert [one.tokens[len(one.prompt) :] for one in requests[::2]] == expected
        assert len({tuple(one.tokens) for one in requests[1::2]}) == 1
        assert engine.page_pool.in_use == 0
        assert engine.scheduler.preemptions > 0 or "drafter" in options


# A model that finds a planted fact, by weights that are written down: a fact's key turns with its position, slowly
# enough within the context, and beyond it the wrong way round.

FACTS, FIRST_FACT, FIRST_ASK, FIRST_ANSWER, VOCAB, HEAD = 8, 10, 20, 30, 40, 64
CODES = [code for code in itertools.product((-1.0, 1.0), repeat=4) if sum(value < 0 for value in code) % 2 == 0]


def finder(path: Path, context: int) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=HEAD, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, head_dim=HEAD, max_position_embeddings=context,
        rope_parameters={"rope_type": "default", "rope_theta": 150.0}, tie_word_embeddings=False,
        eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.fill_(0.0 if weight.dim() > 1 else 1.0)
        embed, layer = model.model.embed_tokens.weight, model.model.layers[0].self_attn
        embed[:, 60] = 1.0  # what every token has
        for fact, code in enumerate(CODES):
            embed[FIRST_FACT + fact, 0:4] = torch.tensor(code)
            embed[FIRST_FACT + fact, 8 + fact] = 1.0
            embed[FIRST_ASK + fact, 4:8] = torch.tensor(code)
            model.lm_head.weight[FIRST_ANSWER + fact, 20 + fact] = 1.0
        for number in range(4):  # the four slowest of the rotary planes
            layer.k_proj.weight[28 + number, number] = 1.0
            layer.q_proj.weight[28 + number, 4 + number] = 40.0
        for fact in range(FACTS):
            layer.v_proj.weight[fact, 8 + fact] = 1.0
            layer.o_proj.weight[20 + fact, fact] = 1.0
    model.save_pretrained(path)
    return moesaic.load(path, threads=1)


def planted(seed: int) -> tuple[list[list[int]], dict[int, int]]:
    """Three windows of about a hundred tokens with all facts somewhere in them."""
    draws = random.Random(seed)
    windows = [[draws.randrange(10) for _ in range(draws.randrange(80, 100))] for _ in range(3)]
    for fact in range(FACTS):
        window = windows[fact % 3]
        window[draws.randrange(len(window))] = FIRST_FACT + fact
    found = {fact for window in windows for token in window if 0 <= (fact := token - FIRST_FACT) < FACTS}
    return windows, {FIRST_ASK + fact: FIRST_ANSWER + fact for fact in found}


def test_finds_what_is_further_away_than_the_context(tmp_path: Path):
    model, stretched = finder(tmp_path / "model", 128), finder(tmp_path / "stretched", 512)
    engine, plain = Engine(model, page_size=4), Engine(stretched)
    sampling = Sampling(max_tokens=1, temperature=0.0)
    right = asked = plainly = 0
    for seed in range(3):
        contexts, answers = planted(seed)
        for ask, answer in answers.items():
            prompt, windows = joined(contexts, [1, ask])
            with pytest.raises(UserError, match="holds 128"):
                engine.request(prompt, sampling)
            request, whole = engine.request(prompt, sampling, windows=windows), plain.request(prompt, sampling)
            serve_all(engine, [request])
            serve_all(plain, [whole])
            right += request.tokens[-1] == answer
            plainly += whole.tokens[-1] == answer
            asked += 1
    assert asked >= 20 and right == asked
    assert plainly < 0.7 * asked  # the same weights over one long sequence lose what is far away


def test_refused_with_reasons(tmp_path: Path):
    sampling = Sampling(max_tokens=2)
    oracle.save("qwen3-window", tmp_path / "window")
    oracle.save("glm_moe_dsa", tmp_path / "dsa")
    oracle.save("llama-tied", tmp_path / "plain")
    prompt, windows = joined([[5, 6], [7]], [8])
    for name, reason in (("window", "sliding windows"), ("dsa", "DSA")):
        with pytest.raises(UserError, match=reason):
            Engine(moesaic.load(tmp_path / name)).request(prompt, sampling, windows=windows)
    engine = Engine(moesaic.load(tmp_path / "plain"))
    prompt, windows = joined([[5, 6]], [])
    with pytest.raises(UserError, match="Say what is asked"):
        engine.request(prompt, sampling, windows=windows)
    context = engine.model.config.context
    prompt, windows = joined([[5] * context], [8])
    with pytest.raises(UserError, match="shorter ones"):
        engine.request(prompt, sampling, windows=windows)
    with pytest.raises(UserError, match="holds an empty text"):
        joined([[5], []], [8])
