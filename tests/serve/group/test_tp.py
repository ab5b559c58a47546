"""Two tensor ranks give the tokens and the bits of one process."""

from __future__ import annotations

from pathlib import Path

from tests.model import oracle
from tests.serve.group.groups import Case, alone, answers, in_groups, model_directory, some_requests

MODELS = [("qwen3_moe", False), ("qwen3_moe", True), ("glm4_moe", False), ("deepseek_v3", False), ("qwen3", True)]
MODELS += [("glm_moe_dsa", False)]
OPTIONS = {"page_size": 4, "cache_bytes": 2**21}


def test_two_ranks_answer_with_the_bits_of_one_process(tmp_path: Path) -> None:
    asked = some_requests()
    cases, expected = [], []
    for kind, tied in MODELS:
        directory = tmp_path / f"{kind}-{tied}"
        if kind == "glm_moe_dsa":
            oracle.save(kind, directory)
        else:
            model_directory(kind, directory, tied)
        cases.append(Case("tp=2", directory, answers, asked, **OPTIONS))
        expected.append(alone(directory, asked, **OPTIONS))
    found = in_groups(cases, tmp_path)
    for (kind, tied), ours, theirs in zip(MODELS, found, expected, strict=True):
        assert ours == theirs, f"{kind}, tied: {tied}"
    assert len({str(answer["tokens"]) for answer in expected[0]}) > 5  # they are not all the same
