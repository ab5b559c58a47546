"""The rollout buffer: nothing too old is trained on, nothing comes twice, and all of it can be kept in a checkpoint."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import pytest
import torch

from moesaic.align.examples import Mixture
from moesaic.align.rewards import Judged
from moesaic.align.rollouts.async_stream import AsyncOptions, AsyncRolloutStream
from moesaic.align.rollouts.buffer import Buffer, Group, Task
from moesaic.align.rollouts.rollout import Sample, as_batch
from moesaic.align.rollouts.stream import RolloutSettings
from moesaic.align.rollouts.weight_sync import CopiedWeights
from moesaic.align.rollouts.worker import Finished
from moesaic.align.rollouts.worker_pool import PoolCounts
from moesaic.align.selection.uniform import InTurn
from moesaic.data.packing import IGNORED
from moesaic.errors import UserError
from moesaic.parallel.world import World
from moesaic.worlds.example import Example


def sample(versions: list[int], reward: float = 0.0, learn: list[bool] | None = None) -> Sample:
    tokens = list(range(10, 10 + len(versions)))
    return Sample([1, 2], tokens, [-0.5] * len(tokens), versions, "said", "stop", Judged(reward, {}), None, 1.0, learn)


def test_tokens_of_old_weights_are_left_out_of_the_loss():
    group = Group(Task(0, (0, 0), 0, 1), [sample([1, 2, 3]), sample([3, 3], learn=[True, False])])
    assert group.mask_before(2) == 1
    assert group.samples[0].learned == [False, True, True] and group.samples[1].learned == [True, False]
    assert group.mask_before(2) == 0 and group.trainable
    batch = as_batch(group.samples, 3, "token", {}, {})
    assert batch.targets_T.tolist() == [IGNORED, IGNORED, 11, 12, IGNORED, IGNORED, 10, IGNORED, IGNORED]
    assert batch.count == 3 and batch.columns["weight"].tolist() == pytest.approx(
        [0, 0, 1 / 3, 1 / 3, 0, 0, 1 / 3, 0, 0]
    )
    each = as_batch(group.samples, 3, "sequence", {}, {}).columns["weight"].tolist()
    assert each == pytest.approx([0, 0, 1 / 4, 1 / 4, 0, 0, 1 / 2, 0, 0])
    assert group.mask_before(9) == 3 and not group.trainable


def test_a_buffer_comes_back_from_plain_data():
    buffer = Buffer()
    for n in range(3):
        buffer.submit((0, n), 7 + n, 4, (2, 1))
    assert buffer.arrived(1, [sample([4, 4], 0.5), sample([3], 1.0, [False])]) is not None
    assert buffer.arrived(1, []) is None and buffer.arrived(9, []) is None  # twice, and never asked
    buffer.drop(2)
    again = Buffer.from_plain(json.loads(json.dumps(buffer.plain())))
    assert again == buffer and again.of_round((2, 1)) == ([0], [1]) and again.of_round((2, 0)) == ([], [])
    assert again.submit((0, 3), 1, 5, (3, 0)).number == 3


@dataclass
class ScriptedWorkers:
    """Answers as a script says: task number -> (polls until it comes, versions of its tokens, or None for failure).
    What the script does not name comes at once, from the newest weights."""

    script: dict[int, tuple[int, list[int] | None]] = field(default_factory=dict)
    in_flight: dict[int, Task] = field(default_factory=dict)
    counts: PoolCounts = field(default_factory=PoolCounts)
    most: int = 0
    version: int = 0
    started: bool = False

    def start(self) -> None:
        self.started = True

    def publish(self, version: int, weights: object) -> None:
        self.version = version

    def submit(self, tasks) -> None:
        self.in_flight |= {task.number: task for task, _ in tasks}

    def poll(self, seconds: float) -> list[Finished]:
        finished = []
        for number in list(self.in_flight):
            wait, versions = self.script.get(number, (0, [self.version] * 2))
            self.script[number] = (wait - 1, versions)
            if wait <= 0:
                del self.in_flight[number]
                group = [sample(list(versions), float(n % 2)) for n in range(2)] if versions is not None else None
                finished.append(Finished(number, group, "" if group else "it broke"))
        return finished


class Model:
    def state_dict(self):
        return {}


def stream(workers: ScriptedWorkers, **options) -> AsyncRolloutStream:
    examples = Mixture([[Example(({"role": "user", "content": str(n)},)) for n in range(1000)]], [1.0])
    settings = RolloutSettings(2, 2, 1, "group_centred", "token", options.pop("dynamic", 1), {}, 0)
    return AsyncRolloutStream(
        examples=examples,
        settings=settings,
        selector=InTurn(examples),
        model=Model(),  # type: ignore[arg-type]
        options=AsyncOptions(**options),
        workers=workers,  # type: ignore[arg-type]
        weights=CopiedWeights(workers, World(torch.device("cpu"))),
    )


def test_no_more_is_asked_than_may_be_learned_from():
    workers = ScriptedWorkers()
    learning = stream(workers, staleness=2)
    for step in range(6):
        next(learning)
        assert learning.buffer.numbers == 2 * (3 + step)
        assert len(learning.buffer) == 4 and learning.notes["staleness_max"] <= 2
    assert learning.notes["staleness_max"] == 2 and learning.notes["staleness_mean"] == 2


def test_a_straggler_is_overtaken_and_its_old_tokens_are_masked():
    # Task 0 needs so long that four versions pass; it began with version 1 and went on under 5.
    workers = ScriptedWorkers({0: (5, [1, 4, 5])} | {n: (1, [max(1, n // 2)] * 2) for n in range(1, 40)})
    learning = stream(workers, staleness=1)
    masked = 0.0
    for _ in range(8):
        batch = next(learning)
        assert learning.notes["staleness_max"] <= 1
        masked += learning.notes["masked_tokens"]
        assert batch.count == sum(batch.targets_T != IGNORED)
    assert 0 not in learning.buffer.in_flight and 0 not in learning.buffer.ready
    assert masked == 2  # the first token of either answer


def test_a_group_of_old_weights_alone_is_dropped():
    workers = ScriptedWorkers({0: (4, [1, 1])})
    learning = stream(workers, staleness=1)
    dropped = 0.0
    for _ in range(8):
        next(learning)
        dropped += learning.notes["dropped"]
    assert dropped == 1 and not any(t.number == 0 for t in learning.buffer.in_flight.values())


@pytest.mark.parametrize("on_update", ["recompute", "finish"])
def test_a_failed_question_costs_only_itself(on_update):
    workers = ScriptedWorkers({1: (0, None), 4: (1, None), 5: (1, None)})
    learning = stream(workers, staleness=1, on_update=on_update)
    failed = sum(learning.notes["failed"] for _ in range(6) if next(learning))
    assert failed == 3 and learning.version >= 6
    # A set of which every question failed was asked again.
    assert learning.notes["groups"] == 2


def test_if_every_question_fails_the_run_does():
    workers = ScriptedWorkers({n: (0, None) for n in range(100)})
    for on_update in ("recompute", "finish"):
        with pytest.raises(UserError, match="it broke"):
            next(stream(ScriptedWorkers(dict(workers.script)), on_update=on_update))


@pytest.mark.parametrize("on_update", ["recompute", "finish"])
def test_a_position_holds_what_is_ready_and_what_is_asked(on_update):
    slow = {n: (n % 3, [1 + n // 2] * 2) for n in range(60)} if on_update == "recompute" else {}
    workers = ScriptedWorkers(slow)
    learning = stream(workers, staleness=1, on_update=on_update)
    for _ in range(3):
        next(learning)
    position = json.loads(json.dumps(learning.position))
    if on_update == "finish":
        assert position["buffer"]["asked"] == [] and len(position["buffer"]["ready"]) == 2
    again = ScriptedWorkers()
    resumed = stream(again, staleness=1, on_update=on_update).from_position(position)
    assert resumed.buffer == learning.buffer and resumed.selector.state() == learning.selector.state()
    waiting = set(resumed.buffer.in_flight)
    next(resumed)
    assert resumed.version == position["version"] + 1 and resumed.iteration == position["iteration"] + 1
    assert not waiting & set(again.in_flight)  # what was in flight was submitted again, and has come


def test_a_rewound_run_keeps_nothing_of_weights_that_are_no_more():
    workers = ScriptedWorkers()
    workers.abort_all = workers.in_flight.clear  # type: ignore[attr-defined]
    learning = stream(workers, staleness=1)
    next(learning)
    good = learning.position
    next(learning)
    past = learning.position
    rewound = learning.from_position(good).skip(past)
    assert not len(rewound.buffer) and rewound.version == past["version"]
    assert rewound.selector.state() == learning.selector.state()
    assert next(rewound).count and rewound.notes["staleness_max"] == 0
