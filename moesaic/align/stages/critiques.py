"""Train a critic: CritiqueLLM's Eval-Instruct, IF-CRITIC's checklists, ChatGLM-Math's critic made of the model itself.

align:
  stages:
    - {name: critiques, data: [{path: "builtin:sums"}], truth: [{name: task}], prompts: 400, brief: true, steps: 200}
    - {name: policy, data: [{path: "builtin:sums"}], rewards: [{name: critic, model: "stage:1", brief: true}]}

Answers to the prompts are judged by the teachers: first with the reference, then without, in pairs, or a constraint at
a time. What the filters leave of their critiques is trained on (SFT). `truth` names rewards that know by code how good
an answer is; where there are none, judges and samples must agree.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from moesaic.align.critiques.agreement import Agreement
from moesaic.align.critiques.collect import Plan, collect
from moesaic.align.critiques.items import Tribunal
from moesaic.align.critiques.judges import EngineJudge, Judge, ServerJudge
from moesaic.align.examples import FileExamples, Mixture, open_examples, open_prompts
from moesaic.align.preference.reference import fingerprint
from moesaic.align.rewards import weighted_rewards
from moesaic.align.rollouts.rejection import key_of
from moesaic.align.stages import Data, Measure, Stage, sources, there
from moesaic.align.stages.policy import check_rewards
from moesaic.align.stages.rejection import NotedConversations
from moesaic.data.sources import BUILTIN
from moesaic.data.stream import Stream
from moesaic.methods import Method, named
from moesaic.model import directory
from moesaic.model.formats.matching import match
from moesaic.model.formats.opening import open_checkpoint
from moesaic.model.transformer import Model
from moesaic.parallel.world import World
from moesaic.serve.core.engine import Engine
from moesaic.serve.core.request import Sampling
from moesaic.worlds.judges.critiques import Asking
from moesaic.worlds.stage_outputs import is_stage_output

FORMS = ("pointwise", "pairwise", "checklist")
SELF = "self"  # the model that becomes the critic


@dataclass(frozen=True)
class Critiques(Stage):
    records: ClassVar[tuple[str, ...]] = (
        "kept/*",
        "dropped/*",
        "judged",
        "critiques_kept",
        "pairs_made",
        "teacher_right",
    )

    data: Data = ()  # prompts; a line may bring its own answers, `responses`, and `constraints`
    held_out: Data = ()  # what agreement with code is measured on; by default builtin families' test split
    forms: tuple[str, ...] = ("pointwise",)
    truth: tuple[dict[str, Any], ...] = ()  # rewards by code; a checklist's constraints of a kind are checked anyway
    teachers: tuple[str | dict[str, Any], ...] = (SELF,)  # directories, or {url, model, key_variable}
    answers: str = SELF  # whose answers are judged, where a line brings none
    prompts: int = 256
    group: int = 4  # answers to each
    samples: int = 4  # critiques of each thing by each teacher
    agree: float = 0.0  # share of a teacher's samples that must agree, and all teachers with them; 0: truth decides
    keep: int = 1  # critiques of one thing that are trained on
    balance: bool = True  # as many good as bad
    planted: float = 0.25  # share of the answers that end with a verdict on themselves, which is not to be believed
    reference: bool = True
    brief: bool = False  # the critic is not told how to judge
    continue_with: Literal["model", "critic"] = (
        "model"  # what the next stage starts from: as before, or what is made here
    )
    tokens: int = 64  # of a critique before its verdict
    max_tokens: int = 64  # of an answer
    temperature: float = 1.0  # of answers and critiques
    batch_tokens: int = 4096
    max_length: int = 1024

    def __post_init__(self) -> None:
        sources(self.data)
        if self.held_out:
            sources(self.held_out)
        named(self.truth)
        if not self.forms or set(self.forms) - set(FORMS):
            raise ValueError(f"forms are some of {', '.join(FORMS)}")
        if not self.teachers:
            raise ValueError(f"teachers names nobody; {SELF} is the model itself")
        for teacher in self.teachers:
            if not isinstance(teacher, str) and (
                set(teacher) - {"url", "model", "key_variable"} or "url" not in teacher
            ):
                raise ValueError("a teacher is a directory, or {url: ..., model: ..., key_variable: ...}")
            if isinstance(teacher, dict) and (name := teacher.get("key_variable")) and not os.environ.get(name):
                raise ValueError(f"the environment variable {name} is not set")
        counts = (self.prompts, self.group, self.samples, self.keep, self.max_tokens, self.batch_tokens)
        if min(*counts, self.max_length) < 1 or self.tokens < 0:
            raise ValueError("prompts, group, samples, keep, max_tokens, batch_tokens and max_length are at least 1")
        if not 0 <= self.agree <= 1:
            raise ValueError("agree is a share, from 0 to 1")
        if not 0 <= self.planted <= 1:
            raise ValueError("planted is a share, from 0 to 1")
        if not self.agree and not self.truth and self.forms != ("checklist",):
            raise ValueError("nothing says which critiques hold: name rewards as truth, or set agree above 0")

    @property
    def continues(self) -> bool:
        return self.continue_with == "critic"

    def check(self) -> None:
        check_rewards(self.truth, self.data, open_prompts(there(self.data), self.seed))
        if held_out := there(self.held_out):
            open_examples(held_out, "test", self.seed)
        Sampling(self.max_tokens, self.temperature)
        for place in (self.answers, *self.teachers):
            if isinstance(place, str) and place != SELF and not is_stage_output(place):
                match(open_checkpoint(place))

    def objective_method(self) -> Method:
        return Method("next_token")

    def open(self, model: Model, out: Path, world: World | None = None) -> Stream:
        assert model.tokenizer is not None
        folder = out / "critiques"
        options = {name: value for name, value in asdict(self).items() if name not in ("steps", "lr", "save_every")}
        own = Engine(model, max_requests=128, seed=self.seed)
        judges = [self._judge(teacher, own) for teacher in self.teachers]
        tribunal = Tribunal(judges, self.samples, self.agree, self.tokens, self.temperature, self.seed)
        examples = open_prompts(self.data, self.seed)
        key = key_of(options, fingerprint(model))
        notes = collect(self._answering(own), examples, self.plan(), tribunal, folder, key)
        kept = Mixture([FileExamples(folder / "kept.jsonl", self.seed)], [1.0])
        max_length = min(self.max_length, model.config.context)
        return NotedConversations(model.tokenizer, kept, self.batch_tokens, max_length, notes)

    def measure(self, model: Model) -> Measure | None:
        data = self.held_out or tuple(source for source in self.data if source["path"].startswith(BUILTIN))
        if not data or not self.evaluate:
            return None
        engine = self._answering(Engine(model, max_requests=128, seed=self.seed))
        plan = replace(self.plan(), prompts=self.evaluate)
        return Agreement.of(engine, open_examples(data, "test", self.seed), plan, self.tokens)

    def measures(self) -> tuple[str, ...]:
        known = self.held_out or any(source["path"].startswith(BUILTIN) for source in self.data)
        return ("accuracy", "held_out/*") if known and self.evaluate else ()

    def plan(self) -> Plan:
        return Plan(
            self.forms,
            Asking("pointwise", self.reference, brief=self.brief),
            weighted_rewards(self.truth),
            self.prompts,
            self.group,
            {"max_tokens": self.max_tokens, "temperature": self.temperature},
            self.keep,
            self.balance,
            self.planted,
            self.seed,
        )

    def _answering(self, own: Engine) -> Engine:
        if self.answers == SELF:
            return own
        return Engine(directory.load(self.answers).requires_grad_(False), max_requests=128, seed=self.seed)

    def _judge(self, teacher: str | dict[str, Any], own: Engine) -> Judge:
        if isinstance(teacher, str):
            return EngineJudge(own if teacher == SELF else teacher)
        variable = teacher.get("key_variable")
        return ServerJudge(teacher["url"], teacher.get("model"), os.environ.get(variable) if variable else None)
