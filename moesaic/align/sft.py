"""Supervised fine-tuning: conversations packed without padding, the loss on what the assistant said.

AgentTuning's mix of trajectories (with tools and their results) and general instructions is two weighted sources.
Beside a GPU conversations are read by other processes: one core writes templates and finds tokens for a few hundred
thousand tokens a second, and a small model learns from more than that.
"""

from __future__ import annotations

import os
import signal
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from moesaic.align.conversation import Said, Written, read_written, write_conversation
from moesaic.align.examples import Mixture, Place
from moesaic.align.forks import child_token, conversations, only_the_branch
from moesaic.data.packing import IGNORED, Batch
from moesaic.errors import UserError
from moesaic.model.tokenizer import Tokenizer
from moesaic.worlds.example import Example

AHEAD = 64  # conversations that are read together


class ConversationStream:
    """Batches of whole conversations of about `batch_tokens`; those longer than `max_length` are left out, and counted.
    `readers` is the number of other processes that read. With `forks` structured answers are taken apart (APAR)."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        examples: Mixture,
        batch_tokens: int,
        max_length: int,
        readers: int = 0,
        forks: bool = False,
    ) -> None:
        self.tokenizer, self.examples, self.forks = tokenizer, examples, forks
        self.batch_tokens, self.max_length, self.readers = batch_tokens, max_length, readers
        self.left_out = 0
        self.taken = list(examples.taken)  # with the latest conversation in a batch; the examples are ahead of that
        self._ahead: deque[tuple[list[Said], list[int]]] = deque()
        self._read: Iterator[Read | UserError] | None = None

    @property
    def position(self) -> dict[str, Any]:
        return {"taken": list(self.taken), "left_out": self.left_out}

    def from_position(self, position: Mapping[str, Any] | None) -> ConversationStream:
        taken = position["taken"] if position else [0] * len(self.examples.sources)
        examples = self.examples.at(taken)
        stream = ConversationStream(
            self.tokenizer, examples, self.batch_tokens, self.max_length, self.readers, self.forks
        )
        stream.left_out = position["left_out"] if position else 0
        return stream

    def skip(self, past: int | Mapping[str, Any]) -> ConversationStream:
        """A bad batch is behind the position it was reached with."""
        assert isinstance(past, Mapping)
        return self.from_position(past)

    def __next__(self) -> Batch:
        said: list[Said] = []
        tokens = missed = 0
        while tokens < self.batch_tokens:
            if not self._ahead:
                self._ahead.extend(self._next_read())
            parts, self.taken = self._ahead.popleft()
            for part in parts:
                if not 0 < len(part.tokens) <= self.max_length:
                    self.left_out += 1
                    missed += 1
                    if missed > 1000:
                        problem = f"no conversation has between 1 and {self.max_length} tokens"
                        raise UserError("align.stages", problem, "Raise the stage's max_length, or mend the template.")
                    continue
                said.append(part)
                tokens += len(part.tokens)
        return pack_said(said, self.position)

    def close(self) -> None:
        self._read = None  # ends the processes

    def _next_read(self) -> Read:
        if self._read is None:
            loader: DataLoader[Read | UserError] = DataLoader(
                _Reader(self.tokenizer, self.examples, self.forks),
                batch_size=None,  # what it is asked for is a batch already
                sampler=_places(self.examples),
                num_workers=self.readers,
                collate_fn=_as_it_is,
                prefetch_factor=4 if self.readers else None,
                worker_init_fn=_leave_stopping_to_the_run,
                generator=torch.Generator(),  # its own: the run's random numbers are not touched
            )
            with _one_thread_each():
                self._read = iter(loader)
        read = next(self._read)
        if isinstance(read, UserError):
            raise read
        return read


# Conversations, each with what has been taken of every source once it is.
Read = list[tuple[list[Said], list[int]]]
Asked = list[tuple[Place, list[int]]]


@dataclass(frozen=True)
class _Reader(Dataset[Any]):
    tokenizer: Tokenizer
    examples: Mixture
    forks: bool

    def __getitem__(self, asked: Asked) -> Read | UserError:
        try:
            written = [self._write(self.examples[place]) for place, _ in asked]
            said = iter(self._read([one for parts in written for one in parts]))
        except UserError as error:  # raised in another process it would lose its parts
            return error
        return [([next(said) for _ in parts], taken) for parts, (_, taken) in zip(written, asked, strict=True)]

    def _read(self, written: list[Written]) -> list[Said]:
        said = read_written(self.tokenizer, written)
        if self.forks:
            child = child_token(self.tokenizer)
            said = [only_the_branch(one, child) for one in said]
        return said

    def _write(self, example: Example) -> list[Written]:
        whole, tools = example.conversation(), example.facts.get("tools")
        with example.at_its_place():
            every = conversations([dict(message) for message in whole]) if self.forks else [whole]
            return [one for messages in every for one in write_conversation(self.tokenizer, messages, tools)]


def _places(examples: Mixture) -> Iterator[Asked]:
    while True:
        yield [(examples.turn(), list(examples.taken)) for _ in range(AHEAD)]


def _as_it_is(read: Read | UserError) -> Read | UserError:
    return read


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """Processes that begin here find tokens in their one thread; the threads of this one are not theirs to use."""
    before = os.environ.get(name := "TOKENIZERS_PARALLELISM")
    os.environ[name] = "false"
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before


def _leave_stopping_to_the_run(worker: int) -> None:
    """Ctrl-C reaches every process of a terminal; the run still takes its last step."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def pack_said(said: Sequence[Said], position: dict[str, Any]) -> Batch:
    """Conversations laid end to end; targets only where the next token was the assistant's."""
    lengths = [len(part.tokens) for part in said]
    tokens_T = np.concatenate([np.array(part.tokens, np.int64) for part in said])
    learn_T = np.concatenate([np.array(part.learn, bool) for part in said])
    learn_T[np.cumsum([0, *lengths[:-1]])] = False  # nothing is before a conversation's first token
    targets_T = np.full_like(tokens_T, IGNORED)
    targets_T[:-1][learn_T[1:]] = tokens_T[1:][learn_T[1:]]
    count = max(1, int(learn_T.sum()))
    return Batch(torch.from_numpy(tokens_T), torch.from_numpy(targets_T), lengths, [0] * len(said), count, position)
