"""Batches: the same for any number of ranks, from any position, in any cut; and nothing but pieces of documents."""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moesaic.data.held_out import held_out_batches
from moesaic.data.packing import divide
from moesaic.data.shards import Shards, shard_files
from moesaic.data.stream import Batch, TokenStream
from moesaic.errors import UserError
from tests.data.made import make_recipe, make_shards, random_lengths

SECTIONS: list[dict[str, Any]] = [
    {},
    {"curriculum": "multi_domain"},
    {"curriculum": {"name": "length", "stages": 4, "pacing": "root"}},
    {"length_warmup": {"steps": 6, "start": 8, "batch": "shrink"}},
    {
        "phases": [
            {"share": 0.4, "weights": {"a": 1, "b": 1}},
            {"share": 0.6, "weights": {"a": 1, "b": 3}, "keep": {"a": 0.3}},
        ],
        "extra": {"b": {"max_epochs": 1}},
    },
]
sections = st.sampled_from(SECTIONS)


@pytest.fixture(scope="module")
def where(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("stream") / "data"
    make_shards(directory, {"a": random_lengths(0, 60), "b": random_lengths(1, 30)}, held_out=[1, 2, 61])
    return directory


@pytest.fixture(scope="module")
def open_stream(where: Path) -> Any:
    def open_stream(section: dict[str, Any] = {}, batch: int = 64, steps: int = 12, **more: Any) -> TokenStream:  # noqa: B006
        return TokenStream.open(where, make_recipe({"a": 2, "b": 1}, steps, batch, **section), **more)

    return open_stream


def pieces(batch: Batch) -> list[tuple[int, ...]]:
    return [tuple(piece.tolist()) for piece in batch.tokens_T.split(batch.lengths)] if batch.lengths else []


class TestBatches:
    @settings(max_examples=25)
    @given(section=sections, batch=st.integers(2, 200))
    def test_are_pieces_of_documents(self, open_stream: Any, section: dict[str, Any], batch: int) -> None:
        stream = open_stream(section, batch)
        held = {n for number in (1, 2, 61) for n in stream.data.document(number).tolist()}
        for found in islice(stream, 8):
            assert found.tokens_T.dtype == found.targets_T.dtype == torch.long
            assert sum(found.lengths) == len(found.tokens_T)
            if "length_warmup" not in section:
                assert len(found.tokens_T) == batch
            assert found.count == int((found.targets_T != -100).sum()) == len(found.tokens_T) - len(found.lengths)
            targets = found.targets_T.split(found.lengths)
            for piece, target, domain in zip(pieces(found), targets, found.domains, strict=True):
                assert len(piece) <= 16
                assert list(piece) == list(range(piece[0], piece[0] + len(piece)))  # tokens count up within the data
                document = int(np.searchsorted(stream.data.starts, piece[0] - 1, side="right")) - 1
                assert piece[-1] <= stream.data.starts[document] + stream.data.lengths[document]
                assert domain == stream.data.domain[document]
                assert target.tolist() == [*piece[1:], -100]
                assert piece[0] not in held

    def test_documents_are_cut_no_more_than_they_must(self, where: Path) -> None:
        data = Shards(where)
        lengths = data.lengths[(data.domain == 0) & ~data.held_out]
        batch = next(TokenStream.open(where, make_recipe({"a": 1}, 1, int(lengths.sum()))))
        assert len(batch.lengths) == int(-(-lengths // 16).sum())
        # Two sources: each may be cut once more, where the batch ends.
        both = next(TokenStream.open(where, make_recipe({"a": 1, "b": 1}, 1, 800)))
        ends = [n for n, piece in enumerate(pieces(both)) if piece[-1] not in {*(data.starts + data.lengths).tolist()}]
        assert sum(both.lengths[n] < 16 for n in ends) <= 4

    def test_a_long_document_is_spread_over_the_run(self, tmp_path: Path) -> None:
        make_shards(tmp_path, {"a": [1600, *[16] * 100]})
        stream = TokenStream.open(tmp_path, make_recipe({"a": 1}, steps=50))
        shares = [float((batch.tokens_T <= 1600).float().mean()) for batch in islice(stream, 50)]  # tokens count up
        assert 0.45 < sum(shares) / 50 < 0.55 and sum(share == 1 for share in shares) < 10

    def test_warm_up_grows_in_multiples_of_eight(self, where: Path) -> None:
        for kind, tokens in (("same", 256), ("shrink", None)):
            warmup = {"steps": 10, "start": 8, "batch": kind}
            recipe = make_recipe({"a": 1}, 20, 256, sequence_length=48, length_warmup=warmup)
            batches = list(islice(TokenStream.open(where, recipe), 12))
            sequence_length = [max(batch.lengths) for batch in batches]
            allowed = [8, 8, 16, 16, 24, 24, 32, 32, 40, 40, 48, 48]
            assert sequence_length[:10] == allowed[:10] and max(sequence_length) <= 48
            for batch, length in zip(batches, allowed):
                assert len(batch.tokens_T) == (tokens or 256 * length // 48)

    def test_parts_and_devices(self, open_stream: Any) -> None:
        batch = next(open_stream(batch=300))
        parts = batch.parts(3, "cpu")
        assert len(parts) == 3
        assert {part.count for part in parts} == {batch.count}
        assert sum(int((part.targets_T != -100).sum()) for part in parts) == batch.count
        assert Counter(piece for part in parts for piece in pieces(part)) == Counter(pieces(batch))
        assert max(len(part.tokens_T) for part in parts) - min(len(part.tokens_T) for part in parts) <= 16
        assert pieces(batch.parts(1)[0]) == pieces(batch)
        assert sum(len(part.lengths) for part in batch.parts(1000)) == len(batch.lengths)


class TestRanks:
    @settings(max_examples=25)
    @given(section=sections, batch=st.integers(2, 300), ranks=st.sampled_from([2, 3, 4]))
    def test_shares_are_the_one_rank_batch(
        self, open_stream: Any, section: dict[str, Any], batch: int, ranks: int
    ) -> None:
        alone = open_stream(section, batch)
        shares = [open_stream(section, batch, rank=rank, ranks=ranks) for rank in range(ranks)]
        for _ in range(6):
            whole = next(alone)
            parts = [next(share) for share in shares]
            order = pieces(whole)
            assert Counter(piece for part in parts for piece in pieces(part)) == Counter(order)
            for part in parts:
                assert part.position_after == whole.position_after
                assert part.count == whole.count
                places = iter(order)
                assert all(piece in places for piece in pieces(part))  # in the order of the whole batch
            assert max(len(part.tokens_T) for part in parts) - min(len(part.tokens_T) for part in parts) <= 16

    def test_1_2_and_4_ranks_see_the_same_sequence(self, open_stream: Any) -> None:
        runs = []
        for ranks in (1, 2, 4):
            streams = [open_stream(batch=128, rank=rank, ranks=ranks) for rank in range(ranks)]
            runs.append(
                [sorted(piece for part in step for piece in pieces(part)) for step in islice(zip(*streams), 40)]
            )
        assert len(runs[0]) == 40
        assert runs[0] == runs[1] == runs[2]

    @given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 9))
    def test_division_is_balanced(self, lengths: list[int], shares: int) -> None:
        found = divide(lengths, shares)
        assert sorted(n for share in found for n in share) == list(range(len(lengths)))
        loads = [sum(lengths[n] for n in share) for share in found]
        assert max(loads) - min(loads) <= max(lengths, default=0)


class TestPositions:
    @pytest.mark.parametrize("section", SECTIONS, ids=str)
    def test_resumes_after_every_batch(self, open_stream: Any, section: dict[str, Any]) -> None:
        batches = list(islice(open_stream(section), 20))
        for number in range(19):
            position = json.loads(json.dumps(batches[number].position_after))
            again = next(open_stream(section).from_position(position))
            assert pieces(again) == pieces(batches[number + 1])
            assert again.position_after == batches[number + 1].position_after

    @pytest.mark.parametrize("section", SECTIONS, ids=str)
    def test_resumes_at_every_token(self, open_stream: Any, section: dict[str, Any]) -> None:
        """However a run's tokens are cut into batches, each pool's line of tokens is the same."""
        section = {key: value for key, value in section.items() if key != "length_warmup"}
        stream = open_stream(section)
        whole = lines(stream, 0, 700)
        for token in range(0, 700):
            assert add(lines(stream, 0, token), lines(stream, token, 700)) == whole

    @settings(max_examples=25)
    @given(section=sections, cuts=st.lists(st.integers(1, 90), min_size=1, max_size=12))
    def test_another_batch_size_goes_on_with_the_next_token(
        self, open_stream: Any, section: dict[str, Any], cuts: list[int]
    ) -> None:
        section = {key: value for key, value in section.items() if key != "length_warmup"}
        position = None
        seen: dict[int, list[int]] = {}
        for cut in cuts:
            stream = open_stream(section)
            stream.batch_tokens = cut
            batch = next(stream.from_position(position))
            position = batch.position_after
            seen = add(seen, by_domain(batch))
        assert position is not None and position["tokens"] == sum(cuts)
        together = open_stream(section)
        together.batch_tokens = sum(cuts)
        whole = by_domain(next(together))
        assert {domain: sorted(tokens) for domain, tokens in seen.items()} == {
            domain: sorted(tokens) for domain, tokens in whole.items()
        }

    def test_skips_data_but_no_steps(self, open_stream: Any) -> None:
        section = {"length_warmup": {"steps": 6, "start": 8}}
        batches = list(islice(open_stream(section), 10))
        good, bad = batches[1].position_after, batches[3].position_after
        stream = open_stream(section).from_position(good).skip(bad)
        assert (stream.tokens, stream.step) == (bad["tokens"], good["step"])
        assert stream.tokens == open_stream(section).from_position(good).skip(128).tokens
        assert max(next(stream).lengths) == max(batches[2].lengths)
        assert open_stream().from_position(bad).skip(good).tokens == bad["tokens"]

    def test_goes_on_past_the_planned_end(self, open_stream: Any) -> None:
        for section in SECTIONS[:3]:
            assert len(list(islice(open_stream(section, steps=2), 30))) == 30

    def test_ends_where_the_mixture_ends(self, open_stream: Any) -> None:
        batches = list(open_stream({"extra": {"b": {"max_epochs": 1}}, "when_exhausted": "stop"}, steps=1000))
        assert 20 < len(batches) < 100

    def test_other_data_or_another_order_is_refused(self, open_stream: Any, tmp_path: Path) -> None:
        position = next(open_stream()).position_after
        for section in ({"seed": 1}, {"curriculum": "multi_domain"}, {"sequence_length": 32}):
            with pytest.raises(UserError, match="mixes or orders the data differently"):
                open_stream(section).from_position(position)
        other = make_shards(tmp_path / "other", {"a": random_lengths(5, 60), "b": random_lengths(1, 30)})
        stream = TokenStream.open(other.directory, make_recipe({"a": 2, "b": 1}))
        with pytest.raises(UserError, match="is not the data that this run was started with"):
            stream.from_position(position)
        assert next(open_stream(steps=999).from_position(position)).tokens_T is not None  # longer runs may go on

    def test_a_shard_that_vanished_is_told_at_the_start(self, tmp_path: Path) -> None:
        make_shards(tmp_path / "d", {"a": random_lengths(5, 60)})
        shard_files(tmp_path / "d", 1)[1].unlink()
        with pytest.raises(UserError, match="00001.documents: is missing"):
            TokenStream.open(tmp_path / "d", make_recipe({"a": 1}))


def lines(stream: TokenStream, start: int, stop: int) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for span in stream.plan.spans(start, stop):
        for first, length, domain in zip(span.starts.tolist(), span.lengths.tolist(), span.domains.tolist()):
            found.setdefault(domain, []).extend(range(first, first + length))
    return {domain: sorted(tokens) for domain, tokens in found.items()}


def add(one: dict[int, list[int]], other: dict[int, list[int]]) -> dict[int, list[int]]:
    return {domain: sorted(one.get(domain, []) + other.get(domain, [])) for domain in {*one, *other}}


def by_domain(batch: Batch) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for piece, domain in zip(pieces(batch), batch.domains):
        found.setdefault(domain, []).extend(piece)
    return found


class TestHeldOut:
    def test_is_seen_once_through(self, where: Path) -> None:
        data = Shards(where)
        batches = list(held_out_batches(data, batch_tokens=40, sequence_length=16))
        found = sorted(token for batch in batches for token in batch.tokens_T.tolist())
        assert found == sorted(token for number in (1, 2, 61) for token in data.document(number).tolist())
        only = list(held_out_batches(data, batch_tokens=40, sequence_length=16, source="b"))
        assert {domain for batch in only for domain in batch.domains} == {1}
        assert sum(
            len(b.tokens_T) for b in held_out_batches(data, batch_tokens=40, sequence_length=16, max_tokens=10)
        ) < len(found)

    def test_a_book_is_read_in_pieces(self, tmp_path: Path) -> None:
        data = make_shards(tmp_path / "d", {"a": [3, 1000, 3]}, held_out=[1])
        sizes = [len(batch.tokens_T) for batch in held_out_batches(data, batch_tokens=40, sequence_length=16)]
        assert sum(sizes) == 1000 and max(sizes) < 40 + 16
        few = list(held_out_batches(data, batch_tokens=40, sequence_length=16, max_tokens=64))
        assert [len(batch.tokens_T) for batch in few] == [32, 24] and few[-1].tokens_T[-1] == data.document(1)[-1]

    def test_nothing_held_out(self, tmp_path: Path) -> None:
        data = make_shards(tmp_path / "d", {"a": [3, 4]})
        with pytest.raises(UserError, match="data.held_out"):
            next(held_out_batches(data, batch_tokens=40, sequence_length=16))
