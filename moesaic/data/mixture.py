"""The data mixture of a run: how much of which source, when. A pure function of the data, the recipe and the seed.

    plan = make_plan(Shards(directory), recipe.data, curriculum, tokens=steps * batch_tokens)
    plan.usage                 # per source: tokens, epochs, and the effective epochs
    plan.warnings              # sources that are repeated too often
    plan.spans(start, stop)    # the documents between two tokens of the run

The run's tokens are cut into slots of one sequence length. Segments (phases, and within them the stages of a curriculum
and the moments at which a source is exhausted) each give their slots to pools at fixed ratios. A pool is a source, or
the part of it that a phase keeps (`keep`: the best share, which is thereby repeated more: Kaiyuan's strategic selective
repetition), or one difficulty band of that. A pool continues, in a later segment, where an earlier one left it.

A pool that has been sampled for `max_epochs` (rounded up to whole slots) is exhausted. Then, by `when_exhausted`, the
others take over its share in proportion to their weights, or the data ends. Beyond the planned tokens (a run that
skipped some) the last segment continues.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from moesaic.data.curricula import Curriculum
from moesaic.data.interleaving import Interleaving
from moesaic.data.ordering import Pool, Table, TokenSpans, cut, sorted_window, token_ranks
from moesaic.data.reuse import BORROWED, ReuseLaw, load_reuse, subset
from moesaic.data.shards import Shards
from moesaic.errors import UserError
from moesaic.recipe_sections import DataSection, PhaseSection
from moesaic.strict import did_you_mean


@dataclass(frozen=True)
class Segment:
    """From slot `first` on, `pools` share the slots by `rotation`; each had given `used` slots before."""

    first: int
    phase: int
    pools: tuple[Pool, ...]
    weights: tuple[float, ...]
    interleaving: Interleaving
    used: tuple[int, ...]

    def counts(self, slot: int) -> list[int]:
        """Slots sampled from each pool before `slot`, from the start of the run."""
        return [used + count for used, count in zip(self.used, self.interleaving.counts(slot - self.first))]


@dataclass(frozen=True)
class PoolUsage:
    """How much a run samples from a pool: `epochs` epochs, worth `effective` epochs of fresh data."""

    source: str
    pool: str
    tokens: int
    drawn: int
    epochs: float
    effective: float


@dataclass
class Plan:
    slot: int
    segments: list[Segment]
    end: int | None  # the slot before which the data ends, where it does
    usage: list[PoolUsage]
    fingerprint: str
    reuse: ReuseLaw = BORROWED
    _at: tuple[int, int, list[int]] = field(default=(-1, 0, []), repr=False)

    @property
    def tokens(self) -> int | None:
        """How many there are; None where there is always more."""
        return None if self.end is None else self.end * self.slot

    @property
    def warnings(self) -> list[str]:
        found = []
        for use in self.usage:
            if use.epochs > self.reuse.useful(use.tokens):
                worth = self.reuse.marginal(use.epochs, use.tokens)
                found.append(
                    f"{use.pool} is repeated for {use.epochs:.1f} epochs, worth about {use.effective:.1f} fresh ones;"
                    f" its last epoch adds {worth:.0%} of what fresh data would"
                    f" (past {self.reuse.useful(use.tokens):.0f} epochs of {use.tokens:,} tokens it is less than half)"
                )
        return found

    def spans(self, start: int, stop: int) -> list[TokenSpans]:
        """The documents between two tokens of the run: one span of each pool."""
        found = []
        while start < stop:
            number = bisect_right(self.segments, start // self.slot, key=lambda segment: segment.first) - 1
            following = self.segments[number + 1].first * self.slot if number + 1 < len(self.segments) else stop
            found += self._within(number, start, min(stop, following))
            start = following
        return found

    def _within(self, number: int, start: int, stop: int) -> list[TokenSpans]:
        segment = self.segments[number]
        first, last = start // self.slot, -(-stop // self.slot)
        before = self._counts(number, first)
        owners = segment.interleaving.owners(first - segment.first, last - first)
        given = np.bincount(owners, minlength=len(segment.pools))
        found = []
        _, appearance = np.unique(owners, return_index=True)
        for pool in owners[np.sort(appearance)].tolist():
            low = before[pool] * self.slot
            high = low + int(given[pool]) * self.slot
            low += start - first * self.slot if owners[0] == pool else 0
            high -= last * self.slot - stop if owners[-1] == pool else 0
            found.append(segment.pools[pool].span(low, high))
        whole = stop // self.slot  # the last slot may have been given in part only
        after = [was + int(more) for was, more in zip(before, given)]
        if whole < last:
            after[int(owners[-1])] -= 1
        self._at = number, whole, after
        return found

    def _counts(self, number: int, slot: int) -> list[int]:
        if self._at[:2] != (number, slot):  # batches mostly follow one another, and the counts with them
            return self.segments[number].counts(slot)
        return self._at[2]


def make_plan(
    data: Shards,
    section: DataSection,
    curriculum: Curriculum | None = None,
    *,
    tokens: int,
    documents: np.ndarray | None = None,
) -> Plan:
    """`tokens` is the length of the run. `documents` restricts the data to these; else all but the held-out ones."""
    return _Planner(data, section, curriculum, tokens, documents).plan()


def phases_of(section: DataSection) -> tuple[PhaseSection, ...]:
    """The phases of a recipe, one if it lists none; a UserError if they are inconsistent."""
    known = [source.name for source in section.sources]
    if not known:
        raise UserError("data.sources", "the recipe names no source of text", "Add one, such as builtin:stdlib.")
    phases = section.phases
    if not phases:
        return (PhaseSection(share=1.0, weights={source.name: source.weight for source in section.sources}),)
    for number, phase in enumerate(phases):
        for kind, keys in (("weights", phase.weights), ("keep", phase.keep)):
            for name in keys:
                if name not in known and section.mix_by is None:  # a column's values are known once there is data
                    place = f"data.phases.{number}.{kind}.{name}"
                    raise UserError(place, f'no source is named "{name}"{did_you_mean(name, known)}')
        if not any(phase.weights.values()):
            raise UserError(f"data.phases.{number}.weights", "samples from no source", "Give one a weight above 0.")
    total = sum(phase.share for phase in phases)
    if abs(total - 1) > 1e-6:
        raise UserError("data.phases", f"their shares sum to {total:g}", "Make them sum to 1.")
    return phases


class _Planner:
    def __init__(
        self,
        data: Shards,
        section: DataSection,
        curriculum: Curriculum | None,
        tokens: int,
        documents: np.ndarray | None,
    ) -> None:
        self.data, self.section, self.curriculum = data, section, curriculum
        self.slot = section.sequence_length
        self.slots = max(1, -(-tokens // self.slot))
        # A document from here on is a sequence of at most `slot` tokens; `whole` is the index of the one it is from.
        self.table, self.whole = cut(Table(data.starts, data.lengths, data.domain), self.slot)
        wanted = ~data.held_out if documents is None else np.isin(np.arange(data.documents), documents)
        if section.unique_tokens is not None:
            named = {source.name for source in section.sources} if section.mix_by is None else set(data.domains)
            mine = [number for number, name in enumerate(data.domains) if name in named]
            candidates = np.flatnonzero(wanted & np.isin(data.domain, mine))
            kept = subset(candidates, data.lengths[candidates], section.unique_tokens, section.seed)
            wanted = np.isin(np.arange(data.documents), kept)
        chosen = np.flatnonzero(wanted[self.whole])
        self.by_source = {name: chosen[self.table.domain[chosen] == at] for at, name in enumerate(data.domains)}
        self.difficulty = None if curriculum is None else curriculum.difficulty(data)[self.whole]
        self.pools: dict[str, Pool] = {}
        self.source_of: dict[str, str] = {}
        self.used: dict[str, int] = {}
        self.end: int | None = None
        self.reuse = load_reuse(section.reuse)

    def plan(self) -> Plan:
        phases = self._phases()
        segments: list[Segment] = []
        first, share = 0, 0.0
        for number, phase in enumerate(phases):
            share += phase.share
            last = self.slots if number == len(phases) - 1 else round(share * self.slots)
            began = dict(self.used)
            mine = self._segments(number, phase, first, last) if first < last else []
            if self.curriculum is not None and self.curriculum.is_sorted:
                mine = self._sorted(mine, began)
            segments += mine
            first = last
            if self.end is not None:
                break
        return Plan(self.slot, segments, self.end, self._uses(), self._fingerprint(segments), self.reuse)

    def _phases(self) -> tuple[PhaseSection, ...]:
        names = self.data.domains
        if missing := [source.name for source in self.section.sources if source.name not in names]:
            raise UserError(self.data.directory, f"was prepared without {missing[0]}", "Prepare the data again.")
        return phases_of(self.section)

    def _segments(self, number: int, phase: PhaseSection, first: int, last: int) -> list[Segment]:
        """A phase, split where the curriculum admits harder documents and where a pool is exhausted."""
        openings = self.curriculum.openings() if self.curriculum is not None else [(0.0, 1.0)]
        begins = [round(done * self.slots) for done, _ in openings]
        segments: list[Segment] = []
        for stage, begin in enumerate(begins):
            low, high = max(first, begin), min(last, begins[stage + 1] if stage + 1 < len(begins) else last)
            while low < high and self.end is None:
                weights = self._weights(phase, [share for _, share in openings[: stage + 1]], low)
                segment, low = self._segment(number, weights, low, high)
                segments += [segment] if segment is not None else []
        return segments

    def _weights(self, phase: PhaseSection, shares: list[float], slot: int) -> dict[str, float]:
        """Weight by pool. A source's weight is divided over its open bands, in proportion to their tokens."""
        weights: dict[str, float] = {}
        for name, weight in phase.weights.items():
            if not weight:
                continue
            bands = self._bands(name, phase.keep.get(name, 1.0), shares)
            left = [pool for pool in bands if not self._exhausted(pool)]
            if len(left) < len(bands) and self.section.when_exhausted == "stop":
                self.end = slot
            open_tokens = sum(self.pools[pool].tokens for pool in left)
            weights |= {pool: weight * self.pools[pool].tokens / open_tokens for pool in left}
        if not weights and self.end is None:
            raise UserError(
                "data.sources",
                f"the sources have {slot * self.slot:,} tokens within their max_epochs,"
                f" and the run needs {self.slots * self.slot:,}",
                "Raise max_epochs, train for fewer steps, or set data.when_exhausted=stop.",
            )
        return weights

    def _bands(self, source: str, keep: float, shares: list[float]) -> list[str]:
        """The open pools of a source, by key; created at first use."""
        documents = self.by_source[source]
        if not len(documents):
            raise UserError("data.sources", f"{source} has no documents to sample from", "Leave it out of the mixture.")
        lengths = self.table.lengths
        name = source if keep >= 1 else f"{source} (best {keep:g})"
        ranks: np.ndarray | None = None
        keys = []
        for low, high in zip([0.0, *shares], shares):
            key = name if (low, high) == (0.0, 1.0) else f"{name} ({low:.3g} to {high:.3g} of difficulty)"
            if key not in self.source_of:
                if ranks is None:
                    if keep < 1:
                        quality = self.data.column("quality")[self.whole[documents]]
                        if np.isnan(quality).any():
                            problem = f'keeps the best of {source}, whose column "quality" has gaps'
                            raise UserError("data.phases", problem, "Prepare the data with a data.quality.")
                        best = documents[token_ranks(quality, lengths[documents]) >= 1 - keep]
                        documents = best if len(best) else documents[[int(np.argmax(quality))]]
                    ranks = np.zeros(len(documents))
                    if self.difficulty is not None and shares != [1.0]:
                        ranks = token_ranks(self.difficulty[documents], lengths[documents])
                band = documents[(ranks >= low) & (ranks < high)]
                self.source_of[key] = source
                if len(band):  # a long document may leave a band empty
                    self.pools[key] = Pool(key, band, self.table, self.section.seed)
                    self.used[key] = 0
            if key in self.pools:
                keys.append(key)
        return keys

    def _cap(self, pool: str) -> int | None:
        """Slots after which a pool is exhausted."""
        limits = {source.name: source.max_epochs for source in self.section.sources}
        limit = limits[self.source_of[pool]]
        return None if limit is None else int(-(-limit * self.pools[pool].tokens // self.slot))

    def _exhausted(self, pool: str) -> bool:
        cap = self._cap(pool)
        return cap is not None and self.used[pool] >= cap

    def _segment(self, phase: int, weights: Mapping[str, float], low: int, high: int) -> tuple[Segment | None, int]:
        """One segment from slot `low` to `high`, or to where the first pool is exhausted; and where it ends."""
        if self.end is not None:
            return None, high
        keys = list(weights)
        offset = hashlib.blake2b(f"{self.section.seed} {low}".encode(), digest_size=8).digest()
        interleaving = Interleaving(list(weights.values()), int.from_bytes(offset, "little"))
        caps = [self._cap(key) for key in keys]

        def fits(slot: int) -> bool:
            counts = interleaving.counts(slot - low)
            return all(cap is None or self.used[key] + n <= cap for key, n, cap in zip(keys, counts, caps))

        if not fits(high):
            inside, outside = low, high  # the last slot up to which every pool has enough
            while outside - inside > 1:
                middle = (inside + outside) // 2
                inside, outside = (middle, outside) if fits(middle) else (inside, middle)
            assert inside > low, "a pool that is not exhausted has a slot left"
            high = inside
        pools = tuple(self.pools[key] for key in keys)
        used = tuple(self.used[key] for key in keys)
        segment = Segment(low, phase, pools, tuple(weights.values()), interleaving, used)
        for key, count in zip(keys, segment.counts(high)):
            self.used[key] = count
        return segment, high

    def _sorted(self, segments: list[Segment], began: Mapping[str, int]) -> list[Segment]:
        """The same segments of one phase, with every pool's part of the phase sorted."""
        assert self.difficulty is not None
        windows: dict[str, Pool] = {}
        for segment in segments:
            for pool in segment.pools:
                low, high = began.get(pool.key, 0) * self.slot, self.used[pool.key] * self.slot
                if pool.key not in windows:
                    windows[pool.key] = sorted_window(pool, low, max(high, low + 1), self.difficulty)
        return [
            replace(
                segment,
                pools=tuple(windows[pool.key] for pool in segment.pools),
                used=tuple(used - began.get(pool.key, 0) for pool, used in zip(segment.pools, segment.used)),
            )
            for segment in segments
        ]

    def _uses(self) -> list[PoolUsage]:
        found = []
        for key, pool in self.pools.items():
            drawn = self.used[key] * self.slot
            epochs = drawn / pool.tokens
            effective = self.reuse.effective(epochs, pool.tokens)
            found.append(PoolUsage(self.source_of[key], key, pool.tokens, drawn, epochs, effective))
        return found

    def _fingerprint(self, segments: list[Segment]) -> str:
        """Of everything that decides which token comes when, except where the last segment ends."""
        facts = hashlib.blake2b(digest_size=8)
        facts.update(json.dumps([self.slot, self.section.seed, self.end]).encode())
        for segment in segments:
            facts.update(json.dumps([segment.first, segment.interleaving.bounds, segment.used]).encode())
            for pool in segment.pools:
                facts.update(pool.key.encode() + pool.documents.astype("<i8").tobytes())
        return facts.hexdigest()
