"""SFT on filtered trajectories in an environment, and pairs of steps for the stages that follow (RAG-Gym).

align:
  stages:
    - {name: trajectories, environment: {name: multihop}, prompts: 200, group: 8, steps: 50}
    - {name: reward_model, data: [{path: "stage:1/trajectories/pairs.jsonl"}]}        # the critic
    - {name: preference, data: [{path: "stage:1/trajectories/pairs.jsonl"}]}          # DPO on steps

At every state of an episode `group` actions are sampled from the initial model and scored by the environment (process
reward); the episode goes on with the best one. Episodes with a reward of at least `right` are trained on. A better and
a worse action at the same state are a pair.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from moesaic.align.accuracy import Accuracy
from moesaic.align.examples import FileExamples, Mixture, open_prompts
from moesaic.align.preference.reference import fingerprint
from moesaic.align.rollouts.branching import BranchRule, collect_steps
from moesaic.align.rollouts.multi_turn import open_environment
from moesaic.align.rollouts.rejection import key_of
from moesaic.align.stages import Data, Measure, Stage, sources, there
from moesaic.align.stages.rejection import NotedConversations
from moesaic.data.stream import Stream
from moesaic.errors import UserError
from moesaic.methods import Method, named
from moesaic.model.transformer import Model
from moesaic.parallel.world import World
from moesaic.serve.core.engine import Engine
from moesaic.serve.core.request import Sampling
from moesaic.worlds.environments import Environment
from moesaic.worlds.text_actions import WorldExamples


@dataclass(frozen=True)
class Trajectories(Stage):
    records: ClassVar[tuple[str, ...]] = ("sampled_reward", "step_score", "states", "episodes_kept", "pairs_made")

    environment: dict[str, Any] | str = ""
    data: Data = ()  # unless the environment has tasks of its own
    prompts: int = 256  # episodes
    group: int = 8  # actions sampled at each state
    right: float = 1.0  # the reward from which on an episode is trained on
    pairs: int = 2  # of a state, at most
    margin: float = 0.0  # the scores of a pair are more than this apart
    max_tokens: int = 64
    temperature: float = 1.0
    batch_tokens: int = 4096
    max_length: int = 1024

    def __post_init__(self) -> None:
        if not self.environment:
            raise ValueError("trajectories needs an environment")
        named((self.environment,))
        if self.data:
            sources(self.data)
        counts = (self.prompts, self.pairs, self.max_tokens, self.batch_tokens, self.max_length)
        if min(counts) < 1 or self.group < 2:
            raise ValueError("prompts, pairs, max_tokens, batch_tokens and max_length are at least 1, and group 2")

    def check(self) -> None:
        self._examples(there(self.data))
        Sampling(self.max_tokens, self.temperature)
        self._environment().check()

    def objective_method(self) -> Method:
        return Method("next_token")

    def open(self, model: Model, out: Path, world: World | None = None) -> Stream:
        assert model.tokenizer is not None
        folder = out / "trajectories"
        options = {name: value for name, value in asdict(self).items() if name not in ("steps", "lr", "save_every")}
        notes = collect_steps(
            Engine(model, max_requests=128, seed=self.seed),
            self._environment(),
            self._examples(self.data),
            self.prompts,
            self.group,
            {"max_tokens": self.max_tokens, "temperature": self.temperature},
            BranchRule(self.right, self.pairs, self.margin),
            self.seed,
            folder,
            key_of(options, fingerprint(model)),
        )
        kept = Mixture([FileExamples(folder / "kept.jsonl", self.seed)], [1.0])
        max_length = min(self.max_length, model.config.context)
        return NotedConversations(model.tokenizer, kept, self.batch_tokens, max_length, notes)

    def measure(self, model: Model) -> Measure | None:
        return Accuracy.of(self.data, self.evaluate, self.max_tokens, self._environment())

    def measures(self) -> tuple[str, ...]:
        return Accuracy.names(self.data, self.evaluate, self._environment())

    def _environment(self) -> Environment:
        (method,) = named((self.environment,))
        return open_environment(method)

    def _examples(self, data: Data) -> Mixture:
        environment = self._environment()
        if environment.own_tasks == bool(self.data):
            problem, remedy = "data names no source", "Name some, or an environment with tasks of its own."
            if self.data:
                problem = "the environment has tasks of its own, and data names others"
                remedy = "Leave data out."
            raise UserError("align.stages: trajectories", problem, remedy)
        if environment.own_tasks:
            return Mixture([WorldExamples(environment, self.seed)], [1.0])
        return open_prompts(data, self.seed)
