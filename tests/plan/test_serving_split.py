"""The ratio of prefill to decode workers."""

from __future__ import annotations

import pytest

from moesaic.errors import UserError
from moesaic.parallel.layout import ParallelLayout
from moesaic.plan.hardware import load_cluster
from moesaic.plan.models import load_model
from moesaic.plan.serving.split import PrefillDecode, Split, confirm, search_split

MODEL = load_model("llama-3-8b")
ONE = ParallelLayout()


def divided(prompt: int, output: int) -> PrefillDecode:
    return PrefillDecode(MODEL, load_cluster("8xH200"), ONE, ONE, prompt, output, dtype="fp8")


def best(prompt: int, output: int, tpot: float = 12.0) -> list[Split]:
    return search_split(divided(prompt, output), max_ttft_ms=2000, max_tpot_ms=tpot)


def test_long_prompts_want_more_prefill_workers_than_long_answers() -> None:
    reading = [split for split in best(8192, 128) if split.prefill_workers]
    writing = [split for split in best(512, 2048) if split.prefill_workers]
    assert reading[0].prefill_workers > writing[0].prefill_workers
    assert all(split.prefill_workers + split.workers == 8 for split in reading + writing)


def test_every_entry_keeps_the_bounds_and_a_looser_bound_gives_no_less() -> None:
    tight, loose = best(2048, 256, 9.0), best(2048, 256, 20.0)
    assert all(split.plan.tpot_ms <= 9.0 and split.plan.ttft_ms <= 2000 for split in tight)
    assert loose[0].plan.output_tokens_per_second >= tight[0].plan.output_tokens_per_second
    rates = [split.rate for split in tight]
    assert rates == sorted(rates, reverse=True)


def test_events_confirm_the_split_at_less_than_its_full_load() -> None:
    split = next(split for split in best(2048, 256) if split.prefill_workers)
    calm = confirm(split, divided(2048, 256), share=0.5)
    crowded = confirm(split, divided(2048, 256), share=1.5)
    assert calm.attainment(ttft_ms=2000, tpot_ms=14) > 0.9
    assert calm.percentile("ttft", 0.99) < crowded.percentile("ttft", 0.99)


def test_bounds_that_cannot_be_kept_are_refused() -> None:
    with pytest.raises(UserError, match="no split"):
        best(2048, 256, 0.01)
