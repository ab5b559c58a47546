"""What a reward model says: a directory that a `reward_model` stage made, run in this process, many answers at a time.

rewards: [{name: model, path: out/stages/1-reward_model}]
rewards: [{name: model, path: "stage:1", by: min, separator: "\\n"}]      # process rewards: the worst step
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from moesaic.align.preference.reward_model import step_rows
from moesaic.align.rewards import Reward
from moesaic.model import directory
from moesaic.model.transformer import Model
from moesaic.model.value_head import require_head, values_at
from moesaic.worlds.judges import Answer


@dataclass(frozen=True)
class ModelReward(Reward):
    """`whole` is the number at the answer's end, as pairs teach it: any size, only differences mean something. The
    others are of the steps between separators, each from 0 to 1, as `steps` teach it."""

    path: str
    by: Literal["whole", "last", "min", "mean", "product"] = "whole"
    separator: str = "\n\n"
    _loaded: list[Model] = field(default_factory=list, init=False, repr=False, compare=False)
    _loading: Any = field(default_factory=threading.Lock, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.separator:
            raise ValueError("separator cannot be empty")
        require_head(Path(self.path))

    def each(self, answers: Sequence[Answer]) -> list[float | Exception]:
        model = self._model()
        results: list[float | Exception] = [ValueError("not judged")] * len(answers)
        read: list[tuple[int, list[int], list[int]]] = []
        for number, answer in enumerate(answers):
            try:
                tokens, rows = self._rows(model, answer)
                if len(tokens) > model.config.context:
                    raise ValueError(f"{len(tokens)} tokens are more than the reward model reads")
                read.append((number, tokens, rows))
            except Exception as error:  # costs this answer its reward, and no other
                results[number] = error
        values = values_at(model, [tokens for _, tokens, _ in read], [rows for _, _, rows in read])
        for (number, _, _), found_N in zip(read, values, strict=True):
            results[number] = self._fold(found_N)
        return results

    def _rows(self, model: Model, answer: Answer) -> tuple[list[int], list[int]]:
        """Which tokens are judged: the end mark, or the last of each step."""
        assert model.tokenizer is not None
        tools = answer.facts.get("tools")
        if self.by == "whole":
            options = {"tools": list(tools)} if tools else {}
            said = [*answer.asked, {"role": "assistant", "content": answer.text}]
            tokens = model.tokenizer.encode(model.tokenizer.chat(said, reply=False, **options), special=False)
            return tokens, [len(tokens) - 1]
        steps = [step for step in answer.text.split(self.separator) if step.strip()]
        if not steps:
            raise ValueError("the answer has no steps")
        return step_rows(
            model.tokenizer, answer.asked, [f"{s}{self.separator}" for s in steps[:-1]] + steps[-1:], tools
        )

    def _fold(self, values_N: torch.Tensor) -> float:
        if self.by == "whole":
            return float(values_N[-1])
        right_N = values_N.sigmoid()
        folded = {"last": right_N[-1], "min": right_N.min(), "mean": right_N.mean(), "product": right_N.prod()}
        return float(folded[self.by])

    def _model(self) -> Model:
        with self._loading:  # groups are judged side by side
            if not self._loaded:  # when the first answers come: whoever only names a reward need not hold its model
                loaded = directory.load(self.path, threads=torch.get_num_threads())
                self._loaded.append(loaded.requires_grad_(False))
        return self._loaded[0]
