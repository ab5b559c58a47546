"""Offloading by flag: the same words from `moesaic chat`, mistakes refused before loading, and numbers in stats."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from moesaic.cli import main
from moesaic.serve.core.engine import Engine
from moesaic.serve.core.stats import EngineStats
from moesaic.serve.offload.loading import load_served
from tests.serve.made import talking_model

FLAGS = [[], ["--offload", "experts", "--expert-cache-gb", "0.0001"], ["--offload", "weights"]]


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    return talking_model(tmp_path_factory.mktemp("talking") / "model")


def test_chat_says_the_same(directory, capsys, monkeypatch) -> None:
    said = []
    for flags in FLAGS:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"The number 7\n")))
        assert main(["chat", str(directory), "--temperature", "0", "--max-tokens", "12", *flags]) == 0
        said.append(capsys.readouterr().out)
    assert said[0].strip() and said[1:] == [said[0]] * 2


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["--expert-cache-gb", "1"], "--expert-cache-gb"),
        (["--offload", "experts", "--expert-cache-gb", "0"], "--expert-cache-gb"),
        (["--offload", "weights", "--expert-cache-gb", "1"], "--expert-cache-gb"),
        (["--offload-from", "host"], "--offload-from"),
        (["--offload", "experts", "--layout", "tp=2"], "--offload"),
    ],
)
def test_flags_that_make_no_sense_are_refused(directory, capsys, flags, word) -> None:
    assert main(["serve", str(directory), "--port", "0", *flags]) == 2
    assert word in capsys.readouterr().err


def test_stats_count_what_was_fetched(directory) -> None:
    for flags, names in (
        ({"offload": "experts", "expert_cache_bytes": 1 << 17}, ("expert_hits", "expert_misses", "experts_predicted")),
        ({"offload": "weights"}, ()),
    ):
        engine = Engine(load_served(directory, threads=1, **flags), cache_bytes=1 << 20, max_requests=2)
        engine.generate([[1, 2, 3, 4, 5, 6, 7, 8]], max_tokens=8, temperature=0.0)
        stats = EngineStats.of(engine)
        assert all(getattr(stats, name) > 0 for name in (*names, "offload_bytes"))
        assert (stats + stats).offload_bytes == 2 * stats.offload_bytes
