"""A critic at inference (RAG-Gym): a process reward model says which of several sampled actions is worth most.

critic = Critic.open("out/stages/2-reward_model")       # what a reward_model stage made of pairs of steps
critic.choose(messages, ["Action: search ...", ...])     # the number of the best
BestOfN(writer, critic, n=8).write(...)                  # a Writer that says the best of eight
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from moesaic.know.answer.writer import Conversation, Form, Writer
from moesaic.model import directory
from moesaic.model.transformer import Model
from moesaic.model.value_head import require_head, values_at
from moesaic.worlds.completions import seed_of

Candidates = Sequence[tuple[Conversation, Sequence[str]]]  # of each state, what may be said next


class Judge(Protocol):
    """What tells how good it would be to say something next; only differences at the same state mean anything."""

    def scores(self, candidates: Candidates, tools: Sequence[Any] | None = None) -> list[list[float]]: ...


@dataclass(frozen=True)
class Critic:
    model: Model

    @classmethod
    def open(cls, path: str | Path, **options: Any) -> Critic:
        require_head(Path(path))
        return cls(directory.load(path, **options).requires_grad_(False))

    def scores(self, candidates: Candidates, tools: Sequence[Any] | None = None) -> list[list[float]]:
        """The value at the end of each turn, as pairs teach it. What is too long to be read is worth least."""
        tokens = [[self._tokens(said, text, tools) for text in texts] for said, texts in candidates]
        short = [one for own in tokens for one in own if len(one) <= self.model.config.context]
        found = iter(values_at(self.model, short, [[len(one) - 1] for one in short]))
        return [
            [float(next(found)[0]) if len(one) <= self.model.config.context else -float("inf") for one in own]
            for own in tokens
        ]

    def _tokens(self, said: Conversation, text: str, tools: Sequence[Any] | None) -> list[int]:
        tokenizer = self.model.tokenizer
        assert tokenizer is not None
        turns: list[Mapping[str, Any]] = [*said, {"role": "assistant", "content": text}]
        written = tokenizer.chat(
            [dict(turn) for turn in turns], reply=False, **({"tools": list(tools)} if tools else {})
        )
        return tokenizer.encode(written, special=False)


def best(scores: Sequence[float]) -> int:
    """The first of the highest."""
    return max(range(len(scores)), key=lambda number: (scores[number], -number))


@dataclass(frozen=True)
class BestOfN:
    """A Writer that samples `n` texts from another and says the one that the critic holds to be best."""

    writer: Writer
    critic: Judge
    n: int = 8
    temperature: float = 1.0

    def write(
        self,
        conversations: Sequence[Conversation],
        *,
        max_tokens: int,
        form: Form | None = None,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> list[str]:
        drawn = [
            self.writer.write(
                conversations,
                max_tokens=max_tokens,
                form=form,
                temperature=temperature or self.temperature,
                seed=seed_of(seed, number) % (1 << 31),
            )
            for number in range(self.n)
        ]
        candidates = [(said, [texts[k] for texts in drawn]) for k, said in enumerate(conversations)]
        return [
            texts[best(scores)] for (_, texts), scores in zip(candidates, self.critic.scores(candidates), strict=True)
        ]
