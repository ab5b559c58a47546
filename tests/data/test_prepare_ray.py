"""Preparing on a Ray cluster: the bytes of one process, wherever it is cut off, and a clear word without Ray."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moesaic.cli import main
from moesaic.data import sources
from moesaic.data.preparation import on_ray
from moesaic.data.preparation import prepare as preparing
from moesaic.data.preparation.on_ray import RayExaminer
from moesaic.data.preparation.prepare import Status, prepare
from moesaic.data.records import ReadPosition
from moesaic.errors import UserError
from tests.data.models import tiny_model
from tests.data.test_prepare import corpus as corpus  # a fixture
from tests.data.test_prepare import recipe, text, tree


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file is a piece, and comes back in several groups."""
    monkeypatch.setattr(sources, "PIECE_BYTES", 1)
    monkeypatch.setattr(sources, "PIECE_TASKS", 7)


@pytest.fixture(scope="module")
def examiner() -> Iterator[RayExaminer]:
    ray = pytest.importorskip("ray")
    pytest.importorskip("ray.data")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    with RayExaminer().cluster() as made:
        yield made
    assert ray.is_initialized(), "what was running before is left running"
    ray.shutdown()


class Here:
    """Examines in this process what a cluster would, in the same pieces."""

    def examine(self, corpus: Any, start: ReadPosition, examination: Any) -> Iterator[Any]:
        for piece in on_ray.pieces_of(corpus, start):
            yield from on_ray.examined(corpus, piece, examination)


VARIANTS: dict[str, dict[str, Any]] = {
    "near": {},
    "exact": {"dedupe": {"near": False}, "quality": "compression", "scores": []},
    "everything": {"dedupe": {"exact": False, "near": False}, "held_out": 0.0},
}


def more(corpus: Path, **data: Any) -> Any:
    """With tasks, and a source that ends early; enough text that documents come in several groups."""
    plain = json.loads(recipe(corpus, **data).model_dump_json())["data"]["sources"]
    plain += [{"name": "sums", "path": "builtin:sums", "documents": 30}]
    (corpus / "few.txt").write_text("<>".join(text(n) for n in range(200, 240)))
    plain += [{"name": "few", "path": str(corpus / "few.txt"), "separator": "<>", "documents": 12}]
    return recipe(corpus, **data, sources=plain)


@pytest.mark.parametrize("name", VARIANTS)
def test_pieces_give_the_bytes_of_one_process(
    corpus: Path, tmp_path: Path, small_pieces: None, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_ray, "GROUP_RECORDS", 11)
    asked = more(corpus, **VARIANTS[name])
    prepare(asked, tmp_path / "one")
    prepare(asked, tmp_path / "pieces", examiner=Here())
    assert tree(tmp_path / "pieces") == tree(tmp_path / "one")


def test_a_cluster_gives_the_bytes_of_one_process(
    corpus: Path, tmp_path: Path, small_pieces: None, examiner: RayExaminer, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = more(corpus)
    monkeypatch.chdir(tmp_path)
    prepare(asked, tmp_path / "one")
    made = prepare(asked, tmp_path / "cluster", examiner=examiner)
    assert tree(tmp_path / "cluster") == tree(tmp_path / "one")
    assert [counts.broken for counts in made.counts] == [2, 0, 0, 0] and made.counts[3].taken == 12

    # Cut off after some documents, it goes on in one process, and the other way round.
    monkeypatch.setattr(preparing, "SAVE_SECONDS", -1.0)
    for first, then in ((examiner, None), (None, examiner)):
        out = tmp_path / f"resumed-{first is None}"
        with pytest.raises(KeyboardInterrupt):
            prepare(asked, out, examiner=first, on_status=stop_in("stories"))
        assert not (out / "manifest.json").exists()
        prepare(asked, out, examiner=then)
        assert tree(out) == tree(tmp_path / "one")


def stop_in(source: str) -> Any:
    def on_status(status: Status) -> None:
        if status.doing == f"tokenizing {source}":
            raise KeyboardInterrupt

    return on_status


def test_strict_stops_at_the_first_broken_record(corpus: Path, tmp_path: Path, examiner: RayExaminer) -> None:
    with pytest.raises(UserError) as alone:
        prepare(recipe(corpus), tmp_path / "one", strict=True)
    with pytest.raises(UserError) as found:
        prepare(recipe(corpus), tmp_path / "cluster", strict=True, examiner=examiner)
    assert str(found.value) == str(alone.value)


def test_scores_of_batches_are_refused(corpus: Path, tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model")
    with pytest.raises(UserError, match="perplexity scores documents in batches"):
        prepare(recipe(corpus, scores=[{"name": "perplexity", "model": str(model)}]), tmp_path / "no", examiner=Here())


def test_without_ray(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    file = tmp_path / "recipe.json"
    file.write_text(recipe(corpus).model_dump_json())
    assert main(["prepare", str(file), "--out", str(tmp_path / "out"), "--engine", "ray"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "--engine ray" in said and "moesaic[cluster]" in said
    assert not (tmp_path / "out").exists()
