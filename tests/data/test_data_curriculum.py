"""recipes/data-curriculum.yaml: its three parts are all there, and each does what it is for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from moesaic.data.mixture import make_plan
from moesaic.data.preparation.prepare import prepare
from moesaic.data.shards import Shards
from moesaic.data.stream import TokenStream
from moesaic.recipe import load_recipe
from moesaic.train.pretrain import pretrain
from moesaic.train.quantile_proxies import run_proxies

FILE = Path(__file__).parents[2] / "recipes" / "data-curriculum.yaml"
SMALL = [
    "data.sources=[{name: code, path: 'builtin:stdlib', separator: \"\\n\\n\", documents: 700, max_epochs: 4},"
    " {name: sums, path: 'builtin:sums', documents: 400, max_epochs: 4}]",
    "data.tokenizer_sample=100000",
    "train.steps=60",
    "train.warmup_steps=4",
    "train.evaluate_tokens=1000",
    "data.sequence_length=64",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("data-curriculum")
    prepare(load_recipe(FILE, SMALL), made / "data")
    return made


def drawn(folder: Path) -> tuple[Shards, list[np.ndarray], list[np.ndarray]]:
    """Of each fifth of the run, the quality of its code and the share of its tokens that is code."""
    data = Shards(folder / "data")
    recipe = load_recipe(FILE, SMALL)
    plan = TokenStream.open(folder / "data", recipe).plan
    quality, total = data.column("quality"), recipe.train.steps * recipe.train.batch_tokens
    code = data.domains.index("code")
    found, shares = [], []
    for number in range(5):
        spans = plan.spans(total * number // 5, total * (number + 1) // 5)
        starts = np.concatenate([span.starts for span in spans])
        lengths = np.concatenate([span.lengths for span in spans])
        document = np.searchsorted(data.starts, starts, side="right") - 1
        mine = data.domain[document] == code
        found.append(np.average(quality[document[mine]], weights=lengths[mine]))
        shares.append(lengths[mine].sum() / lengths.sum())
    return data, found, shares


def test_the_order_rises_within_a_source_and_the_ratio_stays(folder: Path) -> None:
    _, quality, shares = drawn(folder)
    assert quality[0] < quality[1] < quality[2]  # worst to best, within the first phase
    assert quality[4] > np.mean(quality[:3])  # and the best at the end
    assert shares == pytest.approx([0.7] * 5, abs=0.05)


def test_the_last_phase_repeats_the_best(folder: Path) -> None:
    data, recipe = Shards(folder / "data"), load_recipe(FILE, SMALL)
    plan = make_plan(data, recipe.data, tokens=recipe.train.steps * recipe.train.batch_tokens)
    pools = {use.pool: use for use in plan.usage}
    best, whole = pools["code (best 0.5)"], pools["code"]
    assert best.tokens == pytest.approx(whole.tokens / 2, rel=0.05)
    without = recipe.changed(data={"phases": ()})
    once = make_plan(data, without.data, tokens=recipe.train.steps * recipe.train.batch_tokens)
    assert {use.pool for use in once.usage} == {"code", "sums"}


def test_it_trains_and_its_proxies_run(folder: Path) -> None:
    given = [*SMALL, f"train.data={folder / 'data'}"]
    told = pretrain(load_recipe(FILE, [*given, "train.steps=8", "train.warmup_steps=2"]), folder / "run", quiet=True)
    assert told["outcome"] == "finished"
    found = run_proxies(load_recipe(FILE, given), folder / "quantiles", steps=2, quantiles=2, tokens=500)
    assert {piece.source for piece in found.table.slices} == {"code", "sums"} and len(found.table.slices) == 4
