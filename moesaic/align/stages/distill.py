"""Distillation from a teacher's whole distribution: on conversations as they are, or on the student's own completions.

align:
  stages:
    - {name: distill, teacher: out/large, data: [{path: chats.jsonl}], steps: 200}
    - {name: distill, teacher: out/large, data: [{path: prompts.jsonl}], on: policy, prompts: 16, direction: reverse}
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
    kl_temperature: float = 1.0  # of both softmaxes in the KL
    direction: Literal["forward", "reverse"] = "forward"  # KL(teacher, student), or reverse: mode-seeking
    batch_tokens: int = 4096  # on data
    max_length: int = 1024
    prompts: int = 16  # on policy: prompts of a step
    max_tokens: int = 64  # of a completion
    temperature: float = 1.0  # of the student's sampling

    def __post_init__(self) -> None:
        sources(self.data)
        if not self.teacher:
            raise ValueError("distill needs a teacher, a model directory")
        if min(self.batch_tokens, self.max_length, self.prompts, self.max_tokens) < 1:
            raise ValueError("batch_tokens, max_length, prompts and max_tokens are at least 1")
        if self.on == "policy" and self.weight != 1.0:
            raise ValueError("on policy there is only the teacher's KL: weight is 1")

    def check(self) -> None:
        self._examples(there(self.data))
        Sampling(self.max_tokens, self.temperature)
        if not is_stage_output(self.teacher):
            match(open_checkpoint(self.teacher))

    def objective_method(self) -> Method:
        options = {"teacher": self.teacher, "weight": self.weight, "temperature": self.kl_temperature}
        return Method("distill", options | {"direction": self.direction})

    def stream(self, model: Model) -> Stream:
        assert model.tokenizer is not None
        check_teacher(Path(self.teacher), model.tokenizer)
        examples = self._examples(self.data)
        if self.on == "data":
            max_length = min(self.max_length, model.config.context)
            return ConversationStream(model.tokenizer, examples, self.batch_tokens, max_length)
        sampling = {"max_tokens": self.max_tokens, "temperature": self.temperature}
        engine = Engine(model, max_requests=self.prompts, seed=self.seed)
        return OnPolicyStream(engine, examples, self.prompts, sampling, self.seed)

    def _examples(self, data: Data) -> Mixture:
        return open_conversations(data, self.seed) if self.on == "data" else open_prompts(data, self.seed)

    def measure(self, model: Model) -> Measure | None:
        return Accuracy.of(self.data, self.evaluate, self.max_tokens)
