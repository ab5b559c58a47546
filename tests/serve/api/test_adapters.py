"""LoRA adapters over HTTP: loaded, named as a model, unloaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from safetensors.torch import save_file

from moesaic.serve.core.engine import Engine
from tests.serve.api.running import NAME, running


def write_adapter(path: Path, seed: int) -> Path:
    """As `peft` writes it, for the queries of the first layer."""
    path.mkdir()
    torch.manual_seed(seed)
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 8, "target_modules": ["q_proj"], "bias": "none"}
    (path / "adapter_config.json").write_text(json.dumps(settings))
    module = "base_model.model.model.layers.0.self_attn.q_proj"
    tensors = {f"{module}.lora_A.weight": torch.randn(2, 48), f"{module}.lora_B.weight": torch.randn(64, 2)}
    save_file(tensors, path / "adapter_model.safetensors")
    return path


def test_an_adapter_comes_and_goes(new_engine: Callable[..., Engine], tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "mine", 1)
    with running(new_engine(), allow_adapters=True) as server:
        client = server.client()

        def said(model: str) -> str:
            answer = client.completions.create(
                model=model, prompt="The number 7 is", temperature=0, max_tokens=20, extra_body={"ignore_eos": True}
            )
            assert answer.model == model
            return answer.choices[0].text

        plain = said(NAME)
        with pytest.raises(openai.NotFoundError):
            said("mine")
        loaded = server.post("/v1/load_lora_adapter", {"lora_name": "mine", "lora_path": str(path)})
        assert loaded.status_code == 200
        assert {model.id: model.root for model in client.models.list()} == {NAME: NAME, "mine": NAME}
        assert said("mine") != plain
        assert said(NAME) == plain
        assert server.post("/v1/unload_lora_adapter", {"lora_name": "mine"}).status_code == 200
        with pytest.raises(openai.NotFoundError):
            said("mine")
        assert server.post("/v1/unload_lora_adapter", {"lora_name": "mine"}).status_code == 404
        for wrong, status in (
            ({"lora_name": "x", "lora_path": "/no/such"}, 404),
            ({"lora_name": NAME, "lora_path": str(path)}, 400),
        ):
            refused = server.post("/v1/load_lora_adapter", wrong)
            assert refused.status_code == status
            assert "/no/such" not in refused.text


def test_nobody_loads_files_unless_it_is_allowed(server: Any) -> None:
    wish = {"lora_name": "x", "lora_path": "/etc"}
    assert server.post("/v1/load_lora_adapter", wish).status_code == 404
