"""How the bytes of pages get from one process to another: beside a `Channel`, on which both say what is coming.

    distributed     torch.distributed sends them through the channel itself
    nixl            the receiver reads them out of the sender's memory (UCX: RDMA, shared memory, TCP; NVLink)

Both ends must have the same one; it is told when a channel is made.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import threading
import time
import weakref
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from moesaic.errors import UserError
from moesaic.serve.pages.channel import Channel, ChannelBroken

SMALLEST = 4 << 20  # bytes of memory that a channel registers
POLL = 0.0002  # seconds between two looks at a transfer


class PageTransport(Protocol):
    name: str

    def send(self, channel: Channel, data: Tensor) -> None: ...

    def receive(self, channel: Channel, data: Tensor, seconds: float) -> None:
        """Fill `data` with what the other end sends; ChannelBroken where it does not come in time."""


class Distributed:
    name = "distributed"

    def send(self, channel: Channel, data: Tensor) -> None:
        channel.send(data)

    def receive(self, channel: Channel, data: Tensor, seconds: float) -> None:
        channel.receive(data, seconds)


class Nixl:
    """One agent for all channels of a process: each has a thread of its own that polls. Memory that is read or written
    belongs to a channel and stays registered, so that the two agents meet once."""

    name = "nixl"

    def __init__(self) -> None:
        if (package := nixl_package()) is None:
            raise UserError("--page-transport", "nixl is not installed", "Install moesaic[nixl], or take distributed.")
        nixl = importlib.import_module(f"{package}._api")
        config = nixl.nixl_agent_config(backends=["UCX"])
        self.agent: Any = nixl.nixl_agent(f"pages-{os.urandom(8).hex()}", config)
        self._lock = threading.Lock()
        self._rooms: weakref.WeakKeyDictionary[Channel, Room] = weakref.WeakKeyDictionary()
        self._known: dict[str, str] = {}  # by what others say of themselves, their names

    def send(self, channel: Channel, data: Tensor) -> None:
        """Offered until the other end says that it has it."""
        with self._lock:
            room = self._room(channel, data)
            room.memory[: data.numel()].copy_(data.view(-1))
            part = self.agent.get_xfer_descs([room.memory[: data.numel()]])
            offer = {
                "agent": self.agent.get_agent_metadata().hex(),
                "memory": self.agent.get_serialized_descs(part).hex(),
            }
        channel.say(offer)
        channel.hear()
        channel.sent += data.nbytes

    def receive(self, channel: Channel, data: Tensor, seconds: float) -> None:
        until = time.monotonic() + seconds
        offer = channel.hear(seconds)
        handle = None
        try:
            with self._lock:
                room = self._room(channel, data)
                here = room.memory[: data.numel()]
                if offer["agent"] not in self._known:
                    self._known[offer["agent"]] = self.agent.add_remote_agent(bytes.fromhex(offer["agent"]))
                there = self.agent.deserialize_descs(bytes.fromhex(offer["memory"]))
                other = self._known[offer["agent"]]
                handle = self.agent.initialize_xfer("READ", self.agent.get_xfer_descs([here]), there, other)
                state = self.agent.transfer(handle)
            while state == "PROC":
                if time.monotonic() > until:
                    raise ChannelBroken("the transfer takes too long")
                time.sleep(POLL)
                with self._lock:
                    state = self.agent.check_xfer_state(handle)
            if state != "DONE":
                raise ChannelBroken(f"the transfer ended with {state}")
            data.view(-1).copy_(here)
            channel.say({"done": True})
            channel.received += data.nbytes
        except ChannelBroken:
            raise
        except Exception as error:  # nixl has exceptions of its own for a dead peer
            raise ChannelBroken(f"{type(error).__name__}: {error}") from None
        finally:
            if handle is not None:
                with self._lock:
                    self.agent.release_xfer_handle(handle)

    def _room(self, channel: Channel, data: Tensor) -> Room:
        room = self._rooms.get(channel)
        if room is None or room.memory.numel() < data.numel():
            memory = torch.empty(max(data.numel(), SMALLEST), dtype=torch.uint8)
            room = self._rooms[channel] = Room(memory, self.agent.register_memory([memory]))
            weakref.finalize(room, self._forget, room.registered)
        return room

    def _forget(self, registered: Any) -> None:
        """On whatever thread the channel ended."""
        with contextlib.suppress(Exception):
            self.agent.deregister_memory(registered)


@dataclass(eq=False)
class Room:
    """Memory that other agents may read or write, as long as this object lives."""

    memory: Tensor
    registered: Any


def nixl_package() -> str | None:
    """Under whichever name it is installed: one for each version of CUDA, none of which it needs to start."""
    names = ("nixl", "nixl_cu13", "nixl_cu12")
    return next((name for name in names if importlib.util.find_spec(name) is not None), None)


def transport(name: str) -> PageTransport:
    """A new one, for all channels of one process."""
    if name == "nixl":
        return Nixl()
    if name != "distributed":
        raise UserError("--page-transport", f'there is no "{name}"', "Take distributed or nixl.")
    return Distributed()


def empty(shape: tuple[int, ...], pinned: bool) -> Tensor:
    return torch.empty(shape, dtype=torch.uint8, pin_memory=pinned)
