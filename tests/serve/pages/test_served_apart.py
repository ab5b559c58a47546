"""`moesaic serve --prefill 1 --decode 1`, and tiers below the KV cache, over HTTP with the openai client."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import openai
import pytest

from moesaic.errors import UserError
from moesaic.serve.bench.server_process import serving
from moesaic.serve.cluster.prefill_decode import Apart, roles
from moesaic.serve.core.engine import Engine
from moesaic.serve.core.kv_policies.snapkv import SnapKV
from tests.serve.cluster.workers import options
from tests.waiting import PATIENCE

PROMPTS = [f"{n} The number {n} is a number; def f(x): return x + {n}" * 2 for n in range(6)]


def metric(url: str, name: str) -> float:
    found = re.search(rf"^moesaic:{name}(?:_total)?{{.*}} (\S+)$", httpx.get(f"{url}/metrics").text, re.MULTILINE)
    assert found is not None, name
    return float(found[1])


def completions(url: str, stream: bool) -> list[tuple[str, int, int, int]]:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=PATIENCE, max_retries=0)
    (model,) = [one.id for one in client.models.list()]
    found = []
    for number, prompt in enumerate(PROMPTS):
        asked = {"model": model, "prompt": prompt, "max_tokens": 8, "seed": number, "extra_body": {"ignore_eos": True}}
        if stream:
            parts = list(client.completions.create(stream=True, stream_options={"include_usage": True}, **asked))
            text, usage = "".join(part.choices[0].text for part in parts if part.choices), parts[-1].usage
        else:
            whole = client.completions.create(**asked)
            text, usage = whole.choices[0].text, whole.usage
        assert usage is not None and usage.prompt_tokens_details is not None
        details = usage.prompt_tokens_details.model_dump()
        moved, again = details["transferred_tokens"], details["recomputed_tokens"]
        found.append((text, usage.prompt_tokens, moved, again))
    return found


@pytest.mark.parametrize("stream", [False, True])
def test_over_http(directory: Path, alone: Engine, stream: bool) -> None:
    with serving(directory, ["--prefill", "1", "--decode", "1", "--threads", "1", "--cache-gb", "0.01"]) as url:
        said = completions(url, stream)
        texts = [
            alone.generate([prompt], max_tokens=8, seed=number, ignore_eos=True)[0].text
            for number, prompt in enumerate(PROMPTS)
        ]
        assert [text for text, *_ in said] == texts
        assert all(moved > 0 and again == 0 for _, _, moved, again in said)
        assert httpx.get(f"{url}/health").status_code == 200
        client = httpx.Client(base_url=url, timeout=PATIENCE)
        while metric(url, "transferred_tokens") < sum(moved for _, _, moved, _ in said):
            client.get("/health")  # counters are read once a second
        assert metric(url, "recomputed_tokens") == 0 == metric(url, "failed_transfers")
        assert metric(url, "transferred_bytes") > 0


def test_tiers_over_http(directory: Path, alone: Engine, tmp_path: Path) -> None:
    """A KV cache of few pages, so that every prompt evicts the one before; and again after a restart."""
    flags = ["--threads", "1", "--cache-gb", "0.0002", "--cache-host-gb", "0.0002", "--cache-disk-gb", "0.01"]
    for turn in range(2):
        with serving(directory, [*flags, "--cache-dir", str(tmp_path / "pages")]) as url:
            first, second = completions(url, False), completions(url, True)
            assert [text for text, *_ in first] == [text for text, *_ in second]
            for number, (text, *_) in enumerate(first):
                assert text == alone.generate([PROMPTS[number]], max_tokens=8, seed=number, ignore_eos=True)[0].text
            assert metric(url, "host_hit_tokens") + metric(url, "disk_hit_tokens") > 0
            assert metric(url, "cache_host_bytes") <= 0.0002 * 2**30
            if turn:
                assert metric(url, "disk_hit_tokens") > 0
    assert list((tmp_path / "pages").glob("*/??/*.page"))


def test_what_cannot_be_is_said(directory: Path) -> None:
    with pytest.raises(UserError, match="--decode"):
        Apart.of(1, None)
    with pytest.raises(UserError, match="--prefill-layout"):
        Apart.of(None, None, prefill_layout="tp=2")
    assert Apart.of(None, None) is None
    with pytest.raises(UserError, match="kv-policy"):
        roles(options(directory, kv_policy=SnapKV()), Apart(1, 1))
    with pytest.raises(UserError, match="cannot be served"), serving(directory, ["--prefill", "1"]):
        pass
    with pytest.raises(UserError, match="needs a directory"), serving(directory, ["--cache-disk-gb", "1"]):
        pass
