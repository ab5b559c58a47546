"""SFT on a teacher's trajectories in worlds, filtered by reward and mixed with general data (AgentTuning, Zeng et al.).

align:
  stages:
    - name: demonstrations
      environment: {name: several, worlds: [sql, cards, house]}
      teacher: {url: "http://127.0.0.1:8000/v1"}       # any OpenAI-compatible server, or a model directory
      episodes: 512
      data: [{path: chats.jsonl}]                        # general conversations
      share: 0.2                                         # of trajectories, one to four
      steps: 200

The teacher plays so many tasks of the environment's own; episodes with a reward of at least `right` are learned from,
and of them what the teacher said. Without the general data a model forgets what it could do, without the filter it
learns the teacher's failures too. `stage:N/demonstrations/kept.jsonl` is for the stages that follow.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from moesaic.align.accuracy import Accuracy
from moesaic.align.examples import FileExamples, Mixture, open_conversations
from moesaic.align.preference.reference import fingerprint
from moesaic.align.rollouts.demonstrations import collect_demonstrations
from moesaic.align.rollouts.multi_turn import open_environment
from moesaic.align.rollouts.rejection import key_of
from moesaic.align.stages import Data, Measure, Stage, sources, there
from moesaic.align.stages.rejection import NotedConversations
from moesaic.data.stream import Stream
from moesaic.errors import UserError
from moesaic.methods import Method, named
from moesaic.model.directory import load
from moesaic.model.formats.matching import match
from moesaic.model.formats.opening import open_checkpoint
from moesaic.model.transformer import Model
from moesaic.parallel.world import World
from moesaic.serve.core.engine import Engine
from moesaic.serve.core.request import Sampling
from moesaic.worlds.environments import Environment
from moesaic.worlds.playing import EnginePlayer, Player, ServerPlayer
from moesaic.worlds.stage_outputs import is_stage_output


@dataclass(frozen=True)
class Demonstrations(Stage):
    records: ClassVar[tuple[str, ...]] = ("teacher_reward", "episodes", "episodes_kept")

    environment: dict[str, Any] | str = ""
    teacher: dict[str, Any] | str = ""  # a model directory, or {url, model, key_variable, at_once}
    episodes: int = 256
    right: float = 1.0  # the reward from which on an episode is learned from
    data: Data = ()  # general conversations
    share: float = 0.2  # of what is learned from: trajectories; the rest is the general data
    max_tokens: int = 256  # of a turn of the teacher
    temperature: float = 0.7  # of the teacher
    batch_tokens: int = 4096
    max_length: int = 2048

    def __post_init__(self) -> None:
        if not self.environment or not self.teacher:
            raise ValueError("demonstrations needs an environment, and a teacher who plays in it")
        named((self.environment,))
        if self.data:
            sources(self.data)
        if not 0 < self.share <= 1 or (self.share < 1) != bool(self.data):
            raise ValueError("share is above 0 and below 1 with data to mix with, and 1 without")
        if min(self.episodes, self.max_tokens, self.batch_tokens, self.max_length) < 1:
            raise ValueError("episodes, max_tokens, batch_tokens and max_length are at least 1")
        if not isinstance(self.teacher, str):
            self._server(self.teacher)

    def _server(self, teacher: dict[str, Any]) -> ServerPlayer:
        if "url" not in teacher or set(teacher) - {"url", "model", "key_variable", "at_once"}:
            raise ValueError("teacher is a model directory, or {url, model, key_variable, at_once}")
        return ServerPlayer(**teacher, max_tokens=self.max_tokens, temperature=self.temperature)

    def check(self) -> None:
        if self.data:
            open_conversations(there(self.data), self.seed)
        Sampling(self.max_tokens, self.temperature)
        self._world().check()
        if isinstance(self.teacher, str) and not is_stage_output(self.teacher):
            match(open_checkpoint(self.teacher))

    def objective_method(self) -> Method:
        return Method("next_token")

    def open(self, model: Model, out: Path, world: World | None = None) -> Stream:
        assert model.tokenizer is not None
        folder = out / "demonstrations"
        player, who = self._player(model)
        what = {"environment": self.environment, "tokens": self.max_tokens, "temperature": self.temperature}
        key = key_of(what, self.seed, who)
        notes = collect_demonstrations(player, self._world(), self.episodes, self.right, self.seed, folder, key)
        kept = FileExamples(folder / "kept.jsonl", self.seed)
        mixture = Mixture([kept], [1.0])
        if self.data:
            general = open_conversations(self.data, self.seed)
            weights = [self.share, *((1 - self.share) * weight for weight in general.weights)]
            mixture = Mixture([kept, *general.sources], weights)
        max_length = min(self.max_length, model.config.context)
        return NotedConversations(model.tokenizer, mixture, self.batch_tokens, max_length, notes)

    def _player(self, model: Model) -> tuple[Player, Any]:
        """The teacher, and who it is."""
        if not isinstance(self.teacher, str):
            return self._server(self.teacher), self.teacher.get("model", "")
        teacher = load(self.teacher, device=model.device)
        sampling = {"max_tokens": self.max_tokens, "temperature": self.temperature}
        return EnginePlayer(Engine(teacher, seed=0), sampling, self.seed), fingerprint(teacher)

    def measure(self, model: Model) -> Measure | None:
        return Accuracy.of((), self.evaluate, self.max_tokens, self._world())

    def measures(self) -> tuple[str, ...]:
        return Accuracy.names((), self.evaluate, self._world())

    def _world(self) -> Environment:
        (method,) = named((self.environment,))
        world = open_environment(method)
        if not world.own_tasks:
            problem = f"{method.name} has no tasks of its own that a teacher could play"
            raise UserError("align.stages: demonstrations", problem, "Name a world, or several.")
        return world
