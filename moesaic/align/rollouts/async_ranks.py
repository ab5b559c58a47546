"""Asynchronous RL on several ranks. The first has the workers, and all that is in flight; the others hear from it which
completions to learn from, and where the stream stands when a checkpoint is written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from moesaic.align.rollouts.async_stream import AsyncRolloutStream
from moesaic.align.rollouts.engine_work import EngineWork
from moesaic.align.rollouts.rollout import Rollouts, Sample
from moesaic.align.rollouts.stream import PolicyStream
from moesaic.errors import UserError
from moesaic.parallel.world import World

Result = TypeVar("Result")


@dataclass(kw_only=True)
class LeadingStream(AsyncRolloutStream):
    def collect_rollouts(self) -> tuple[list[list[Sample]], list[Rollouts]]:
        def plain(found: tuple[list[list[Sample]], list[Rollouts]]) -> Any:
            return [[sample.plain() for sample in group] for group in found[0]]

        return told(self.world, super().collect_rollouts, plain)

    @property
    def position(self) -> dict[str, Any]:
        return told(self.world, lambda: AsyncRolloutStream.position.fget(self), lambda found: found)  # type: ignore[attr-defined]


@dataclass(kw_only=True)
class FollowingStream(PolicyStream):
    def collect_rollouts(self) -> tuple[list[list[Sample]], list[Rollouts]]:
        groups = [[Sample.from_plain(sample) for sample in group] for group in heard(self.world)]
        return groups, [Rollouts(groups, EngineWork())]

    @property
    def position(self) -> dict[str, Any]:
        found: dict[str, Any] = heard(self.world)
        return found


def told(world: World, find: Callable[[], Result], plain: Callable[[Result], Any]) -> Result:
    """What is found here, the others hear of, or why nothing was."""
    with world.doing("generate", patient=True):  # workers take the time they take
        try:
            found = find()
        except UserError as error:
            world.collect({"problem": [error.place, error.problem, error.remedy]})
            raise
        world.collect({"found": plain(found)})
    return found


def heard(world: World) -> Any:
    with world.doing("generate", patient=True):
        said = world.collect(None)[0]
    if "problem" in said:
        raise UserError(*said["problem"])
    return said["found"]
