"""Requests of every kind, over HTTP, get the same answers to the bit from one process and from two ranks that draft.

`python -m bench.serve_wide` asks more, of every deployment."""

from __future__ import annotations

import asyncio
from pathlib import Path

from bench.wide_load import DEPLOYMENTS, adapter_options, ask_all, make_directory, requests
from moesaic.serve.bench.server_process import serving


def test_two_ranks_answer_as_one_process(tmp_path: Path) -> None:
    directory = make_directory(tmp_path / "tiny")
    asked = requests(16, directory.name)  # two of each kind
    common = ["--threads", "1", "--cache-gb", "0.05", *adapter_options(directory)]
    with serving(directory, common) as url:
        expected = asyncio.run(ask_all(url, asked))
    assert len({str(found) for found in expected}) == len(asked), "answers must differ, or nothing is compared"
    with serving(directory, [*common, "--drafter", "suffix", *DEPLOYMENTS["tp=2"]]) as url:
        assert asyncio.run(ask_all(url, asked)) == expected
