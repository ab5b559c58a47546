"""Alignment of a model whose layers keep states of sequences: trainer and engine agree to the bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moesaic.align.align import align
from moesaic.errors import UserError
from tests.align.made import ADAMW, recipe_of
from tests.random_models import save_random, small_config
from tests.serve.made import TEXTS, VOCABULARY

FAMILY = "builtin:chain_sum:min_terms=2,max_terms=2,min_digits=1,max_digits=1"
SFT = f'{{name: sft, steps: 2, lr: 0.01, data: [{{path: "{FAMILY}"}}], batch_tokens: 300, max_tokens: 4}}'
POLICY = (
    f'name: policy, steps: 2, lr: 0.001, data: [{{path: "{FAMILY}"}}], prompts: 3, group: 3, max_tokens: 6, updates: 2,'
    " rewards: [{name: length, weight: 0.1, max_length: 4, slack: 4}, {name: task}], advantage: group_centred"
)


@pytest.fixture(scope="module")
def stateful(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = small_config(
        "qwen3_next", VOCABULARY, hidden=48, ffn=64, layers=2, heads=(4, 2), head_dim=16,
        moe_intermediate_size=24, shared_expert_intermediate_size=24, num_experts=4, num_experts_per_tok=2,
        initializer_range=0.2, max_position_embeddings=256, eos_token_id=0, full_attention_interval=2,
        linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
    )  # fmt: skip
    return save_random(config, tmp_path_factory.mktemp("stateful"), TEXTS)


def test_sft_then_grpo(stateful: Path, tmp_path: Path) -> None:
    align(recipe_of(tmp_path, SFT, f"{{{POLICY}}}", more=ADAMW), stateful, tmp_path / "out", quiet=True)
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 2
    assert all(line["mismatch_max"] == 0.0 and line["routers_differ"] == 0.0 for line in lines)


def test_rollouts_with_a_drafter_are_refused(stateful: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="rejected draft token"):
        align(recipe_of(tmp_path, f"{{{POLICY}, drafter: suffix}}", more=ADAMW), stateful, tmp_path / "out", quiet=True)
