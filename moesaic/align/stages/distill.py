"""Distillation from a teacher's whole distribution: on conversations as they are, or on the student's own completions.

align:
  stages:
    - {name: distill, teacher: out/large, data: [{path: chats.jsonl}], steps: 200}
    - {name: distill, teacher: out/large, data: [{path: prompts.jsonl}], on: policy, prompts: 16, direction: reverse}
    - {name: distill, on: policy, data: [{path: "builtin:sums", teacher: "stage:1"},     # against forgetting (GLM-5):
                                         {environment: cards, teacher: "stage:2"}]}       # a domain, a teacher
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from moesaic.align.accuracy import Accuracy
from moesaic.align.examples import Examples, Mixture, open_conversations, open_prompts
from moesaic.align.rollouts.multi_turn import multi_turn_rollouts, open_environment
from moesaic.align.rollouts.on_policy_distill import OnPolicyStream, Taught, check_teacher
from moesaic.align.sft import ConversationStream
from moesaic.align.stages import Data, Measure, Stage, sources
from moesaic.data.stream import Stream
from moesaic.errors import UserError
from moesaic.methods import Method, named
from moesaic.model.formats.matching import match
from moesaic.model.formats.opening import open_checkpoint
from moesaic.model.transformer import Model
from moesaic.serve.core.engine import Engine
from moesaic.serve.core.request import Sampling
from moesaic.worlds.environments import Environment
from moesaic.worlds.stage_outputs import is_stage_output
from moesaic.worlds.text_actions import World, WorldExamples

OF_SOURCE = {"teacher", "environment"}  # what a source may have of its own


@dataclass(frozen=True)
class Distill(Stage):
    records: ClassVar[tuple[str, ...]] = ("answer_tokens",)

    teacher: str = ""  # of the sources that name none
    data: Data = ()
    on: Literal["data", "policy"] = "data"
    weight: float = 1.0  # of the teacher; the rest is that of the tokens themselves (of data only)
    kl_temperature: float = 1.0  # of both softmaxes in the KL
    direction: Literal["forward", "reverse"] = "forward"  # KL(teacher, student), or reverse: mode-seeking
    batch_tokens: int = 4096  # on data
    max_length: int = 1024
    prompts: int = 16  # on policy: prompts of a step
    max_tokens: int = 64  # of a completion
    temperature: float = 1.0  # of the student's sampling

    def __post_init__(self) -> None:
        if not self.data:
            raise ValueError("data names no source")
        for source in self.data:
            placed = {"path": "", **_plain(source)} if source.get("environment") else _plain(source)
            sources((placed,))
            named([source.get("environment", "none")])
        if not all(isinstance(teacher, str) and teacher for teacher in self._teacher_of_each()):
            raise ValueError("distill needs a teacher, a model directory: of the stage, or of every source")
        if min(self.batch_tokens, self.max_length, self.prompts, self.max_tokens) < 1:
            raise ValueError("batch_tokens, max_length, prompts and max_tokens are at least 1")
        if self.on == "policy" and self.weight != 1.0:
            raise ValueError("on policy there is only the teacher's KL: weight is 1")
        if self.on == "data" and any(OF_SOURCE & set(source) for source in self.data):
            raise ValueError("a source has a teacher or an environment of its own only with on: policy")

    def check(self) -> None:
        for source in self.data:
            if not is_stage_output(source.get("path")):
                self._opened(source)
            if (world := _world(source)) is not None:
                world.check()
        Sampling(self.max_tokens, self.temperature)
        for teacher in self.teachers:
            if not is_stage_output(teacher):
                match(open_checkpoint(teacher))

    @property
    def teachers(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self._teacher_of_each()))

    def _teacher_of_each(self) -> list[str]:
        return [source.get("teacher", self.teacher) for source in self.data]

    def objective_method(self) -> Method:
        first, *further = self.teachers
        options = {"teacher": first, "weight": self.weight, "temperature": self.kl_temperature}
        return Method("distill", options | {"direction": self.direction} | ({"further": further} if further else {}))

    def stream(self, model: Model) -> Stream:
        assert model.tokenizer is not None
        for teacher in self.teachers:
            check_teacher(Path(teacher), model.tokenizer)
        weights = [float(source.get("weight", 1.0)) for source in self.data]
        examples = Mixture([self._opened(source) for source in self.data], weights)
        if self.on == "data":
            max_length = min(self.max_length, model.config.context)
            return ConversationStream(model.tokenizer, examples, self.batch_tokens, max_length)
        sampling = {"max_tokens": self.max_tokens, "temperature": self.temperature}
        taught = []
        for source, teacher in zip(self.data, self._teacher_of_each(), strict=True):
            world = _world(source)
            start = multi_turn_rollouts(world, 1, sampling) if world is not None else None
            taught.append(Taught(self.teachers.index(teacher), start))
        engine = Engine(model, max_requests=self.prompts, seed=self.seed)
        return OnPolicyStream(engine, examples, taught, self.prompts, sampling, self.seed)

    def _opened(self, source: dict[str, Any]) -> Examples:
        world = _world(source)
        if isinstance(world, World):
            if "path" in source:
                problem = "the environment has tasks of its own, and path names others"
                raise UserError("align.stages: data", problem, "Leave path out.")
            return WorldExamples(world, self.seed)
        if not source.get("path"):
            raise UserError("align.stages: data", "this environment has no tasks of its own", "Name a path.")
        opened = open_conversations if self.on == "data" else open_prompts
        return opened((_plain(source),), self.seed).sources[0]

    def measure(self, model: Model) -> Measure | None:
        """Of the families the accuracy, of each environment its own beside it."""
        found = {"": Accuracy.of([s for s in self.data if "environment" not in s], self.evaluate, self.max_tokens)}
        for source in self.data:
            if (world := _world(source)) is not None:
                (method,) = named([source["environment"]])
                of_tasks = [source] if "path" in source else []
                found[f"/{method.name}"] = Accuracy.of(of_tasks, self.evaluate, self.max_tokens, world)
        known = {suffix: accuracy for suffix, accuracy in found.items() if accuracy is not None}
        if not known:
            return None
        return lambda now: {f"accuracy{suffix}": one(now)["accuracy"] for suffix, one in known.items()}

    def measures(self) -> tuple[str, ...]:
        families = Accuracy.names([source for source in self.data if "environment" not in source], self.evaluate)
        return (*families, "accuracy/*") if any("environment" in source for source in self.data) else families


def _plain(source: dict[str, Any]) -> dict[str, Any]:
    """What any source of prompts has."""
    return {key: value for key, value in source.items() if key not in OF_SOURCE}


def _world(source: dict[str, Any]) -> Environment | None:
    if source.get("environment") is None:
        return None
    (method,) = named([source["environment"]])
    return open_environment(method)
