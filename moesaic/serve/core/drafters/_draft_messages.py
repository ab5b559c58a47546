"""What an engine and the process of its draft model tell each other, and the pair of sockets that carries it.

Neither side waits for the other unless it says so: what a socket does not take yet is kept and sent later, so that a
draft process which was stopped holds up nobody.
"""

from __future__ import annotations

import pickle
import select
import socket
import struct
from typing import Any, NamedTuple

from moesaic.errors import UserError
from moesaic.serve.core.request import Sampling

HEADER = struct.Struct("<Q")  # the bytes of a message
READ = 1 << 20


# To the draft process


class Setup(NamedTuple):
    """First of all."""

    path: str
    dtype: Any
    device: str
    threads: int
    rows: int  # of its KV cache
    cache_bytes: int | None  # or as many as fit into so much
    vocab: int  # the tokens that the model knows
    stop_tokens: frozenset[int]
    width: int
    nodes: int


class Open(NamedTuple):
    number: int
    prompt: list[int]
    tokens: list[int]  # those of the prompt, and those it has generated
    sampling: Sampling
    seed: int
    salt: str


class Extend(NamedTuple):
    """The verdict on a tree: the tokens that a request has gained."""

    number: int
    tokens: list[int]


class Close(NamedTuple):
    number: int


# From it


class Ready(NamedTuple):
    vocab: int
    vocabulary: bytes  # hash of its tokenizer's; empty: it has none


class Failed(NamedTuple):
    problem: UserError


class Update(NamedTuple):
    """A request's tree has its root after `length` tokens, and new nodes: number, parent, token, confidence."""

    number: int
    length: int
    root: int
    nodes: list[tuple[int, int, int, float]]


class Trees(NamedTuple):
    seen: int  # messages so far
    idle: bool  # nothing is left to compute
    updates: list[Update]


class Wire:
    """One end. `receive` raises EOFError when the other one has gone."""

    def __init__(self, end: socket.socket) -> None:
        self.socket = end
        self.socket.setblocking(False)
        self._out, self._in = bytearray(), bytearray()

    def send(self, message: NamedTuple, wait: bool = False) -> None:
        data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        self._out += HEADER.pack(len(data)) + data
        self.flush(wait)

    def flush(self, wait: bool = False) -> None:
        while self._out:
            try:
                del self._out[: self.socket.send(self._out)]
            except BlockingIOError:
                if not wait:
                    return
                self._poll(select.POLLOUT, None)
            except OSError as error:
                raise EOFError from error

    def receive(self, seconds: float | None = 0.0) -> list[Any]:
        """All messages that are there; the first is waited for so long (None: as long as it takes)."""
        self.flush()
        if not (messages := self._read()) and (seconds is None or seconds > 0) and self._poll(select.POLLIN, seconds):
            messages = self._read()
        return messages

    def _read(self) -> list[Any]:
        try:
            while data := self.socket.recv(READ):
                self._in += data
            raise EOFError
        except BlockingIOError:
            pass
        except OSError as error:
            raise EOFError from error
        messages, start = [], 0
        while len(self._in) >= start + HEADER.size:
            (size,) = HEADER.unpack_from(self._in, start)
            if len(self._in) < start + HEADER.size + size:
                break
            messages.append(pickle.loads(self._in[start + HEADER.size : start + HEADER.size + size]))
            start += HEADER.size + size
        del self._in[:start]
        return messages

    def _poll(self, event: int, seconds: float | None) -> bool:
        poll = select.poll()
        poll.register(self.socket, event)
        return bool(poll.poll(None if seconds is None else max(1, round(seconds * 1000))))
