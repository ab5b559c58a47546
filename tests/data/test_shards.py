"""Token shards: what is written is what is read, and what has changed since is told."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moesaic.data.preparation.shard_writer import GrowingFile, ShardWriter
from moesaic.data.shards import MANIFEST, Shards, shard_files, token_type
from moesaic.errors import UserError
from tests.data.made import make_shards, random_lengths

same_folder = settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def data(tmp_path: Path) -> Shards:
    return make_shards(tmp_path / "data", {"a": random_lengths(0, 40), "b": random_lengths(1, 20)}, held_out=[3])


class TestReading:
    def test_documents_come_back(self, data: Shards) -> None:
        assert len(data.manifest["shards"]) > 3
        tokens = np.concatenate([data.document(number) for number in range(data.documents)])
        assert tokens.tolist() == list(range(1, data.tokens + 1))
        assert data.lengths.tolist() == random_lengths(0, 40) + random_lengths(1, 20)
        assert data.domain.tolist() == [0] * 40 + [1] * 20
        assert np.flatnonzero(data.held_out).tolist() == [3]
        assert data.column("quality")[1] == np.float32(7919 % 101 / 101)

    def test_any_stretches_at_once(self, data: Shards) -> None:
        chosen = np.random.RandomState(0).randint(0, data.documents, 200)
        begin = data.lengths[chosen] // 3
        found = data.gather(data.starts[chosen] + begin, data.lengths[chosen] - begin)
        expected = [data.document(number)[first:] for number, first in zip(chosen.tolist(), begin.tolist())]
        assert found.tolist() == np.concatenate(expected).tolist()
        assert not len(data.gather(np.zeros(0, int), np.zeros(0, int)))

    def test_numbers_take_as_much_room_as_they_need(self) -> None:
        assert token_type(1 << 16).itemsize == 2
        assert token_type((1 << 16) + 1).itemsize == 4

    def test_columns_can_be_added(self, data: Shards) -> None:
        before = data.fingerprint
        data.add_column("grade", np.arange(data.documents))
        again = Shards(data.directory)
        assert again.columns == ["grade", "quality"]
        assert again.column("grade").tolist() == list(range(data.documents))
        assert again.fingerprint == before
        with pytest.raises(UserError, match='no column "qualty"; did you mean quality?'):
            data.column("qualty")


class TestChanges:
    def test_a_vanished_shard(self, data: Shards) -> None:
        shard_files(data.directory, 1)[0].unlink()
        with pytest.raises(UserError, match="00001.tokens: is missing"):
            Shards(data.directory)

    def test_a_shorter_shard(self, data: Shards) -> None:
        path = shard_files(data.directory, 0)[1]
        path.write_bytes(path.read_bytes()[:-1])
        with pytest.raises(UserError, match="00000.documents: has changed"):
            Shards(data.directory)

    def test_another_byte_is_seen_on_request(self, data: Shards) -> None:
        path = shard_files(data.directory, 2)[0]
        raw = bytearray(path.read_bytes())
        raw[5] ^= 1
        path.write_bytes(raw)
        Shards(data.directory)
        with pytest.raises(UserError, match="00002.tokens: has changed: its checksum"):
            Shards(data.directory, verify=True)

    def test_what_is_no_prepared_data(self, data: Shards, tmp_path: Path) -> None:
        with pytest.raises(UserError, match="holds no prepared data"):
            Shards(tmp_path / "nowhere")
        (data.directory / MANIFEST).write_text("{")
        with pytest.raises(UserError, match="is not JSON.*copy the file from where it is whole"):
            Shards(data.directory)
        (data.directory / MANIFEST).write_text('{"format": 99}')
        with pytest.raises(UserError, match="not written by this version"):
            Shards(data.directory)
        (data.directory / MANIFEST).unlink()
        (data.directory / "progress.json").write_text("{}")
        with pytest.raises(UserError, match="not finished"):
            Shards(data.directory)


class TestWriting:
    @same_folder
    @given(
        lengths=st.lists(st.integers(1, 30), min_size=1, max_size=30), cut=st.integers(0, 29), lost=st.integers(0, 9)
    )
    def test_goes_on_from_any_state_as_if_nothing_had_happened(
        self, tmp_path_factory: pytest.TempPathFactory, lengths: list[int], cut: int, lost: int
    ) -> None:
        plain, resumed = tmp_path_factory.mktemp("plain"), tmp_path_factory.mktemp("resumed")

        def append(writer: ShardWriter, numbers: range) -> None:
            for number in numbers:
                writer.append([number] * lengths[number], 0, False, {"x": number})

        whole = ShardWriter(plain, 300, ["x"], 50)
        append(whole, range(len(lengths)))
        cut = min(cut, len(lengths))
        first = ShardWriter(resumed, 300, ["x"], 50)
        append(first, range(cut))
        state = {**first.state(), "finished": list(first.finished)}
        append(first, range(cut, min(cut + lost, len(lengths))))  # written, but never known
        first.close()
        second = ShardWriter(resumed, 300, ["x"], 50, state)
        append(second, range(cut, len(lengths)))
        assert whole.finish() == second.finish()
        names = sorted(path.name for path in (plain / "shards").iterdir())
        assert names == sorted(path.name for path in (resumed / "shards").iterdir())
        for name in names:
            assert (plain / "shards" / name).read_bytes() == (resumed / "shards" / name).read_bytes()

    def test_a_growing_file_forgets_what_was_not_settled(self, tmp_path: Path) -> None:
        file = GrowingFile(tmp_path / "a")
        file.append(b"kept")
        size = file.sync()
        file.append(b"lost")
        file.close()
        again = GrowingFile(tmp_path / "a", size)
        again.append(b" more")
        again.close()
        assert (tmp_path / "a").read_bytes() == b"kept more"
