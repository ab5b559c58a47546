"""What a model's makers recommend reaches who samples from it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moesaic.data.tokenizer_training import train_tokenizer
from moesaic.model.tokenizer import Tokenizer
from moesaic.serve.core.sampling_defaults import recommended


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        (
            {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "eos_token_id": 3},
            {"temperature": 0.6, "top_p": 0.9, "top_k": 20},
        ),
        ({"do_sample": False, "temperature": 0.6}, {"temperature": 0.0}),
        ({"do_sample": True}, {}),
        ({"temperature": "hot", "top_p": True}, {}),
        ({"temperature": -1}, {}),
        ([1], {}),
    ],
)
def test_what_is_said_is_taken_and_nonsense_is_not(content: object, wanted: dict[str, float]) -> None:
    tokenizer = train_tokenizer(["a few words"], 300)
    files = {**tokenizer.files, "generation_config.json": json.dumps(content).encode()}
    made = Tokenizer.from_files(files, Path("here"))
    assert recommended(made) == wanted


def test_nothing_is_said() -> None:
    assert recommended(None) == {}
    assert recommended(train_tokenizer(["a few words"], 300)) == {}
