"""Learning from a teacher's whole distribution: on conversations as they are, or on the student's own answers.

align:
  stages:
    - {name: distill, teacher: out/large, data: [{path: chats.jsonl}], steps: 200}
    - {name: distill, teacher: out/large, data: [{path: questions.jsonl}], on: policy, prompts: 16, direction: reverse}
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from moesaic.align.accuracy import Accuracy
from moesaic.align.examples import Mixture, open_conversations, open_prompts
from moesaic.align.rollouts.on_policy_distill import OnPolicyStream, check_teacher
from moesaic.align.sft import ConversationStream
from moesaic.align.stages import Data, Measure, Stage, sources, there
from moesaic.data.stream import Stream
from moesaic.methods import Method
from moesaic.model.formats.matching import match
from moesaic.model.formats.opening import open_checkpoint
from moesaic.model.transformer import Model
from moesaic.serve.core.engine import Engine
from moesaic.serve.core.request import Sampling
from moesaic.worlds.stage_outputs import is_stage_output


@dataclass(frozen=True)
class Distill(Stage):
    teacher: str = ""
    data: Data = ()
    on: Literal["data", "policy"] = "data"
    weight: float = 1.0  # of the teacher; the rest is that of the tokens themselves (of data only)
    softness: float = 1.0  # the temperature at which teacher and student are compared
    direction: Literal["forward", "reverse"] = "forward"  # reverse: what the teacher would not say is not said
    batch_tokens: int = 4096  # on data
    longest: int = 1024
    prompts: int = 16  # on policy: questions of a step
    max_tokens: int = 64  # of an answer
    temperature: float = 1.0  # of the student's answers

    def __post_init__(self) -> None:
        sources(self.data)
        if not self.teacher:
            raise ValueError("distill needs a teacher, a model directory")
        if min(self.batch_tokens, self.longest, self.prompts, self.max_tokens) < 1:
            raise ValueError("batch_tokens, longest, prompts and max_tokens are at least 1")
        if self.on == "policy" and self.weight != 1.0:
            raise ValueError("on policy only the teacher teaches: weight is 1")

    def check(self) -> None:
        self._examples(there(self.data))
        Sampling(self.max_tokens, self.temperature)
        if not is_stage_output(self.teacher):
            match(open_checkpoint(self.teacher))

    def learned_by(self) -> Method:
        options = {"teacher": self.teacher, "weight": self.weight, "temperature": self.softness}
        return Method("distill", options | {"direction": self.direction})

    def stream(self, model: Model) -> Stream:
        assert model.tokenizer is not None
        check_teacher(Path(self.teacher), model.tokenizer)
        examples = self._examples(self.data)
        if self.on == "data":
            longest = min(self.longest, model.config.context)
            return ConversationStream(model.tokenizer, examples, self.batch_tokens, longest)
        sampling = {"max_tokens": self.max_tokens, "temperature": self.temperature}
        engine = Engine(model, max_requests=self.prompts, seed=self.seed)
        return OnPolicyStream(engine, examples, self.prompts, sampling, self.seed)

    def _examples(self, data: Data) -> Mixture:
        return open_conversations(data, self.seed) if self.on == "data" else open_prompts(data, self.seed)

    def measure(self, model: Model) -> Measure | None:
        return Accuracy.of(self.data, self.evaluate, self.max_tokens)
