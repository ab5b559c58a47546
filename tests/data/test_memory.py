"""Episodic memory: what is remembered, what comes round, and that a killed run remembers the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from moesaic.data.memory import FILE, EpisodicMemory
from moesaic.errors import UserError


def sequences(domain: int, count: int, start: int = 0) -> tuple[list[np.ndarray], list[int]]:
    """Each begins with its number in the stream."""
    return [np.array([start + n, domain, 7, 8, 9][: 3 + n % 3]) for n in range(count)], [domain] * count


def stream(memory: EpisodicMemory, domain: int, count: int) -> None:
    for start in range(0, count, 10):
        memory.remember(*sequences(domain, min(10, count - start), start))


def numbers(found: list[tuple[np.ndarray, int]]) -> list[tuple[int, int]]:
    return [(int(tokens[0]), domain) for tokens, domain in found]


def test_domains_share_the_places_and_a_domain_is_a_fair_sample_of_its_stream(tmp_path: Path) -> None:
    memory = EpisodicMemory(tmp_path, ram=30, disk=90, swap=5)
    stream(memory, 0, 900)
    stream(memory, 1, 300)
    stream(memory, 2, 60)
    domains = memory.table_P3[:, 2]
    assert [int((domains == domain).sum()) for domain in range(3)] == [30, 30, 30]
    kept = [int(tokens[0]) for tokens in memory._read(memory.table_P3[domains == 0])]
    assert 300 < np.mean(kept) < 600 and min(kept) < 250 and max(kept) > 650  # neither the first nor the last
    assert memory.size < 0.5 * 4 * 4 * 1260  # bytes of the whole stream
    memory.close()


@pytest.mark.parametrize(("swap", "everything"), [(3, True), (0, False)])
def test_the_carousel_brings_all_that_is_remembered_round(swap: int, everything: bool, tmp_path: Path) -> None:
    memory = EpisodicMemory(tmp_path, ram=6, disk=60, swap=swap)
    stream(memory, 0, 60)
    met = {one for _ in range(150) for one in numbers(memory.replay(20, without={1}))}
    assert len(memory.held) == 6
    assert len(met) == (60 if everything else 6)
    assert all(len(tokens) == entry[1] and tokens[1] == 0 for entry, tokens in memory.held)
    memory.close()


def test_what_is_being_learned_is_not_replayed_and_no_more_than_asked(tmp_path: Path) -> None:
    memory = EpisodicMemory(tmp_path, ram=20, disk=20, swap=2)
    assert memory.replay(100, without=set()) == []
    stream(memory, 0, 20)
    stream(memory, 1, 20)
    assert {domain for _, domain in memory.replay(1000, without={1})} == {0}
    assert memory.replay(1000, without={0, 1}) == []
    assert sum(len(tokens) for tokens, _ in memory.replay(17, without=set())) in (16, 17)
    memory.close()


def test_what_is_measured_on_is_never_replayed_and_another_size_is_filled_from_disk(tmp_path: Path) -> None:
    memory = EpisodicMemory(tmp_path, ram=10, disk=80, swap=4, apart=True)
    stream(memory, 0, 80)
    apart = {int(tokens[0]) for tokens in memory.never_replayed(100, without={1})[0]}
    assert 3 <= len(apart) <= 20 and memory.never_replayed(100, without={0}) == {}
    met = {number for _ in range(150) for number, _ in numbers(memory.replay(30, without={1}))}
    assert met == set(range(80)) - apart
    memory.resize(40)
    assert len({int(entry[0]) for entry, _ in memory.held}) == 40
    assert all(len(tokens) == entry[1] for entry, tokens in memory.held)
    memory.resize(5)
    assert len(memory.held) == 5
    memory.close()


def life(memory: EpisodicMemory, begin: int, end: int) -> list[list[tuple[int, int]]]:
    found = []
    for step in range(begin, end):
        found.append(numbers(memory.replay(15, without={step // 12})))
        memory.remember(*sequences(step // 12, 4, 4 * step))
    return found


def test_killed_at_any_moment_it_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    whole = EpisodicMemory(tmp_path / "whole", ram=8, disk=40, swap=3)
    expected = life(whole, 0, 40)
    for step in (0, 7, 25):
        folder = tmp_path / str(step)
        killed = EpisodicMemory(folder, ram=8, disk=40, swap=3)
        life(killed, 0, step)
        state = {name: tensor.clone() for name, tensor in killed.state().items()}
        life(killed, step, 33)  # written, and in no checkpoint
        killed.close()
        again = EpisodicMemory(folder, ram=8, disk=40, swap=3)
        again.restore(state)
        assert life(again, step, 40) == expected[step:]
        assert (folder / FILE).read_bytes() == (tmp_path / "whole" / FILE).read_bytes()
        again.restore(state)  # a run that goes back to before a spike
        assert life(again, step, 40) == expected[step:]
        again.close()
    whole.close()


def test_a_changed_file_is_refused(tmp_path: Path) -> None:
    memory = EpisodicMemory(tmp_path, ram=8, disk=8, swap=0)
    stream(memory, 0, 8)
    state, raw = memory.state(), (tmp_path / FILE).read_bytes()
    (tmp_path / FILE).write_bytes(raw[:-4])
    with pytest.raises(UserError, match="is shorter than"):
        memory.restore(state)
    (tmp_path / FILE).write_bytes(b"\1" + raw[1:])
    with pytest.raises(UserError, match="its checksum"):
        memory.restore(state)
    memory.close()
