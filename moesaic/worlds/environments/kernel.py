"""Write a Triton kernel, and make it better: profile, propose, check, keep the best (MSKernelBench, CUDAMaster).

    moesaic evaluate http://127.0.0.1:8000/v1 --suite agents environments=kernel max_tokens=2048
    environment: {name: kernel, tasks: [softmax, rms_norm], turns: 3}

A turn is a whole program in a fenced block. It is checked and run in the sandbox (`worlds/kernels/trial.py`), and what
is seen is whether it is right, and a profile: what it moves, or on a GPU how long it takes. The best one counts, when
turns are over or the model says it is done: a half for a correct kernel, up to a half more for its speed.
"""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass
from typing import Any

from moesaic.serve.parsers import Message
from moesaic.worlds.environments import Episode, Step
from moesaic.worlds.example import Example
from moesaic.worlds.kernels.tasks import TASKS, KernelTask
from moesaic.worlds.kernels.trial import trial
from moesaic.worlds.text_actions import FENCED, MAX_CHARACTERS, World

RULES = """Write a Triton kernel. The function to write: {signature}
It returns a new tensor: {meaning}. Tensors are float32 (indices int32), contiguous, and of any shape.
Rules: one Python program, with import torch, import triton and import triton.language as tl; kernels under \
@triton.jit, and the function {name}, which may make empty tensors and launch kernels. Nothing else may compute.
Answer with the whole program in one block between ``` and ```. You are told whether it is right and what it costs, \
and may send a better one, {turns} programs in all; the best one counts. To stop before: Action: finish"""


@dataclass
class Tuning(Episode):
    """The loop: what is known of the last attempt goes to the model, the best one is kept."""

    task: KernelTask
    seed: int
    turns: int
    mistakes: int
    seconds: float
    best: float = 0.0
    best_source: str = ""
    turn: int = 0
    wrong: int = 0  # in a row

    def step(self, said: Message) -> Step:
        self.turn += 1
        last = self.turn >= self.turns
        text = said.content.rpartition("</think>")[2][:MAX_CHARACTERS]
        programs = FENCED.findall(text)
        if len(programs) != 1:
            if not programs and re.search(r"^\s*(?:Action:)?\s*finish\.?\s*$", text, re.I | re.M):
                return Step(_shown("Finished."), done=True, reward=self.best)
            problem = "no program" if not programs else f"{len(programs)} programs"
            return self._mistake(f"There was {problem} in that. Answer with one, between ``` and ```.", "format", last)
        tried = trial(self.task, programs[0], self.seed, self.seconds)
        if tried.refused:
            return self._mistake(tried.verdict, "action", last)
        self.wrong = 0
        if tried.score > self.best:
            self.best, self.best_source = tried.score, programs[0]
        lines = [tried.verdict, tried.profile, f"Score {tried.score:.3f}; the best so far is {self.best:.3f}."]
        seen = "\n".join(line for line in lines if line)
        if last or self.best >= 1.0:
            return Step(_shown(seen), done=True, reward=self.best)
        return Step(_shown(seen), score=tried.score)

    def _mistake(self, text: str, kind: Any, last: bool) -> Step:
        self.wrong += 1
        if last and self.best > 0:
            return Step(_shown(text), done=True, reward=self.best)
        return Step(_shown(text), done=last or self.wrong >= self.mistakes, reward=0.0, invalid=kind)


def _shown(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@dataclass(frozen=True)
class Kernel(World):
    turns: int = 4
    tasks: tuple[str, ...] = tuple(TASKS)
    seconds: float = 120.0  # for one trial, of which most goes to importing PyTorch

    def __post_init__(self) -> None:
        super().__post_init__()
        if unknown := [name for name in self.tasks if name not in TASKS]:
            raise ValueError(f"there is no task {', '.join(unknown)}; known: {', '.join(TASKS)}")
        if not self.tasks:
            raise ValueError("tasks names none")

    def begin(self, example: Example) -> Episode:
        seed, number = example.facts["world"]
        task = TASKS[self.tasks[number % len(self.tasks)]]
        text = RULES.format(signature=task.signature, meaning=task.meaning, name=task.name, turns=self.turns)
        drawn = zlib.crc32(f"{seed} {number}".encode())  # the same in every process
        return Tuning(_shown(text), [], task, drawn, self.turns, self.mistakes, self.seconds)
