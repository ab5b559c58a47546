"""Evicted pages come back from host memory and disk: the same tokens and log-probabilities to the bit, within bounds,
and never for somebody else, from a damaged file or for other weights."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from moesaic.errors import UserError
from moesaic.model.transformer import Model
from moesaic.serve.core.engine import Engine
from moesaic.serve.core.kv_policies.snapkv import SnapKV
from moesaic.serve.core.request import Completion, Sampling
from moesaic.serve.core.stats import EngineStats
from moesaic.serve.pages.disk_tier import HEADER, DiskTier
from moesaic.serve.pages.outside import TierOptions
from tests.random_models import save_random, small_config
from tests.serve.tiny import page_bytes, tiny_latent_model, tiny_model

SIZE, PAGES = 4, 12
PROMPTS = [[start + n % 50 for n in range(33)] for start in (0, 10, 20, 30)]


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny_model()


def engine_of(model: Model, tiers: TierOptions | None, **more: Any) -> Engine:
    return Engine(model, cache_bytes=PAGES * page_bytes(model, SIZE), page_size=SIZE, tiers=tiers, **more)


def ask(engine: Engine, rounds: int = 3, salt: str = "") -> list[Completion]:
    """One after the other, so that each evicts the pages of the one before."""
    found = []
    for turn in range(rounds):
        for number, prompt in enumerate(PROMPTS):
            sampling = Sampling(max_tokens=5, seed=number, logprobs=2)
            found += engine.complete([engine.request([*prompt, turn], sampling, salt=salt)])
            if engine.outside is not None:
                engine.outside.flush()
    return found


def said(completions: list[Completion]) -> list[Any]:
    return [(one.tokens, one.logprobs, one.finish_reason) for one in completions]


def disk(folder: Path, pages: int = 1000, **more: Any) -> TierOptions:
    return TierOptions(disk_bytes=pages * 5000, directory=folder, page_seconds=1e9, **more)


@pytest.mark.parametrize("kind", ["host", "disk", "both", "small"])
@pytest.mark.parametrize("latent", [False, True])
def test_the_same_bits_with_and_without(model: Model, tmp_path: Path, kind: str, latent: bool) -> None:
    if latent:  # whose fast kernels have other bits for few new tokens, with a prefix cache of any kind
        model = tiny_latent_model()
        model.mode = "invariant"
    size = page_bytes(model, SIZE)
    tiers = {
        "host": TierOptions(host_bytes=100 * size),
        "disk": disk(tmp_path),
        "both": disk(tmp_path, host_bytes=20 * size),
        "small": disk(tmp_path, pages=30, host_bytes=5 * size),
    }[kind]
    plain, tiered = engine_of(model, None), engine_of(model, tiers)
    assert said(ask(plain)) == said(ask(tiered))
    stats, without = EngineStats.of(tiered), EngineStats.of(plain)
    assert stats.prompt_tokens + stats.host_tokens + stats.disk_tokens <= without.prompt_tokens + SIZE * 40
    assert stats.pages_in_use == 0 and stats.spilled_pages > 0 and stats.dropped_pages == 0
    assert stats.cache_host_bytes <= tiers.host_bytes and stats.cache_disk_bytes <= tiers.disk_bytes
    if kind in ("host", "both"):
        assert stats.host_tokens > 0
    if kind in ("disk", "both"):
        assert stats.disk_tokens > 0 and stats.cache_disk_bytes > 0
    if kind != "small":  # all prompts fit in: only what is new in each turn is computed
        assert stats.prompt_tokens < without.prompt_tokens / 2


def test_what_is_on_disk_is_there_after_a_restart(tmp_path: Path) -> None:
    config = small_config(
        "qwen3_moe", 101, hidden=32, ffn=32, layers=2, heads=(4, 2), head_dim=8, moe_intermediate_size=16,
        num_experts=4, num_experts_per_tok=2, max_position_embeddings=256, initializer_range=0.3,
    )  # fmt: skip
    save_random(config, tmp_path / "model")
    script = f"""
import moesaic
from pathlib import Path
from moesaic.serve.pages.outside import TierOptions
tiers = TierOptions(disk_bytes=10**8, directory=Path({str(tmp_path / "cache")!r}), page_seconds=1e9)
engine = moesaic.Engine(moesaic.load({str(tmp_path / "model")!r}), cache_bytes=10**6, page_size=4, tiers=tiers)
found = engine.generate([list(range(1, 40))], max_tokens=4, seed=3, logprobs=1)[0]
print(found.tokens, [one.logprob for one in found.logprobs], engine.counts.prompt_tokens,
      engine.outside.counts.disk_tokens)
engine.outside.close()
"""
    runs = [
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split("]")
        for _ in range(2)
    ]
    assert runs[0][:2] == runs[1][:2]
    assert runs[0][2].split() == ["39", "0"] and runs[1][2].split() == ["3", "36"]


def restarted(model: Model, folder: Path, **more: Any) -> Engine:
    return engine_of(model, disk(folder), **more)


def spill_all(model: Model, folder: Path) -> list[Path]:
    """Of a first engine all pages are on disk, and it is gone."""
    engine = restarted(model, folder)
    ask(engine, rounds=1)
    assert engine.outside is not None
    engine.outside.close()
    files = sorted(folder.glob("*/??/*.page"))
    assert len(files) > 20
    return files


def test_damaged_and_foreign_files_are_ignored(model: Model, tmp_path: Path) -> None:
    files = spill_all(model, tmp_path)
    good = files[0].read_bytes()
    for number, file in enumerate(files):
        content = file.read_bytes()
        damage = number % 6
        if damage == 0:
            file.write_bytes(content[:-1])  # cut off
        elif damage == 1:
            file.write_bytes(content[:10])
        elif damage == 2:
            file.write_bytes(content[:-5] + bytes([content[-5] ^ 1]) + content[-4:])
        elif damage == 3:
            file.write_bytes(good if number else b"")  # a page, but another one
        elif damage == 4:
            file.write_bytes(content + b"more")
        else:
            file.write_bytes(b"\x80\x04cposix\nsystem\n")  # what would be run, if it were unpickled
    folder = files[0].parent.parent
    (folder / "notes.txt").write_text("mine")
    (folder / "ab").mkdir(exist_ok=True)
    (folder / "ab" / "other.page").write_text("not a page")
    (folder / "ab" / ("ab" + "0" * 38 + ".writing")).write_text("left by one that was killed")
    engine = restarted(model, tmp_path)
    assert said(ask(engine, rounds=1)) == said(ask(engine_of(model, None), rounds=1))
    assert engine.outside is not None and engine.outside.disk is not None
    assert engine.outside.counts.disk_tokens == 0 and engine.outside.disk.damaged > 0
    assert (folder / "notes.txt").read_text() == "mine" and (folder / "ab" / "other.page").exists()
    assert not list(folder.glob("*/*.writing"))


def test_other_tenants_and_other_weights_never_see_them(model: Model, tmp_path: Path) -> None:
    spill_all(model, tmp_path)
    for other, salt in ((model, "another"), (tiny_model(seed=7), ""), (model, "")):
        engine = restarted(other, tmp_path)
        ask(engine, rounds=1, salt=salt)
        assert engine.outside is not None
        came_back = engine.outside.counts.disk_tokens
        assert came_back > 0 if other is model and not salt else came_back == 0
        engine.outside._writer.shutdown()
        assert engine.outside.disk is not None
        engine.outside.disk.close()


def test_changed_weights_leave_all_of_it_behind(tmp_path: Path) -> None:
    model = tiny_model()
    engine = engine_of(model, disk(tmp_path, host_bytes=50 * page_bytes(model, SIZE)))
    ask(engine, rounds=1)
    before = EngineStats.of(engine)
    engine.weights_changed()
    ask(engine, rounds=1)
    after = EngineStats.of(engine)
    assert after.prompt_tokens == 2 * before.prompt_tokens
    assert (after.host_tokens, after.disk_tokens) == (before.host_tokens, before.disk_tokens)


def test_bounds_hold_and_the_least_recently_used_goes_first(tmp_path: Path) -> None:
    import torch

    pages = {bytes([number]) * 20: torch.full((100,), number, dtype=torch.uint8) for number in range(10)}
    size = HEADER.size + 100
    tier = DiskTier(tmp_path, 4 * size + 7)
    for name, data in pages.items():
        assert tier.put(name, data)
        if bytes(20) in tier:
            assert tier.get(bytes(20), 100) is not None  # the first is used all the time
        assert tier.bytes == size * min(len(tier.sizes), 4) <= tier.max_bytes
        assert sum(path.stat().st_size for path in tmp_path.glob("*/*/*.page")) == tier.bytes
    names = list(pages)
    assert list(tier.sizes) == [*names[7:], names[0]]
    assert not tier.put(b"x" * 20, torch.zeros(10_000, dtype=torch.uint8))
    with pytest.raises(AssertionError):
        assert tier.get(names[8], 99) is not None  # a page of another size is none
    second = DiskTier(tmp_path, 4 * size)  # another engine at the same time
    assert second.folder != tier.folder and not second.sizes
    tier.close()
    smaller = DiskTier(tmp_path, 2 * size)  # after a restart, with less room
    assert smaller.folder == tier.folder and len(smaller.sizes) == 2 == len(list(tier.folder.glob("??/*.page")))


def test_what_cannot_be_is_said(model: Model, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="needs a directory"):
        TierOptions(disk_bytes=5)
    with pytest.raises(UserError, match="needs a size"):
        TierOptions(directory=tmp_path)
    with pytest.raises(UserError, match="prefix cache"):
        Engine(model, kv_policy=SnapKV(), tiers=TierOptions(host_bytes=1 << 20))
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be used"):
        engine_of(model, disk(tmp_path / "file"))


def test_a_full_disk_makes_it_slower_and_nothing_else(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = restarted(model, tmp_path)

    def full(*given: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("moesaic.serve.pages.disk_tier.os.replace", full)
    assert said(ask(engine)) == said(ask(engine_of(model, None)))
    assert engine.outside is not None and engine.outside.disk is not None
    assert engine.outside.disk.bytes == 0 and not list(tmp_path.glob("*/*/*"))
