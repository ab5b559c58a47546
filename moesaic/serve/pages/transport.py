"""How the bytes of pages get from one process to another: beside a `Channel`, on which both say what is coming.

    distributed     torch.distributed sends them through the channel itself
    nixl            the receiver reads them out of the sender's memory (UCX: RDMA, shared memory, TCP; NVLink)

Both ends must have the same one; it is told when a channel is made.
"""

from __future__ import annotations

import importlib.util
import os
import time
from typing import Any, Protocol

import torch
from torch import Tensor

from moesaic.errors import UserError
from moesaic.serve.pages.channel import Channel, ChannelBroken

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
    """One agent for each end of a channel: what dies with it is forgotten with it."""

    name = "nixl"

    def __init__(self) -> None:
        if not has_nixl():
            raise UserError("--page-transport", "nixl is not installed", "Install nixl, or take distributed.")
        from nixl._api import nixl_agent, nixl_agent_config

        self.agent: Any = nixl_agent(f"pages-{os.urandom(8).hex()}", nixl_agent_config(backends=["UCX"]))

    def send(self, channel: Channel, data: Tensor) -> None:
        """Offered until the other end says that it has it."""
        registered = self.agent.register_memory([data])
        try:
            descriptors = self.agent.get_serialized_descs(self.agent.get_xfer_descs([data]))
            metadata = self.agent.get_agent_metadata()
            channel.say({"agent": metadata.hex(), "memory": descriptors.hex()})
            channel.hear()
            channel.sent += data.nbytes
        finally:
            self.agent.deregister_memory(registered)

    def receive(self, channel: Channel, data: Tensor, seconds: float) -> None:
        until = time.monotonic() + seconds
        offer = channel.hear(seconds)
        registered = self.agent.register_memory([data])
        handle = other = None
        try:
            other = self.agent.add_remote_agent(bytes.fromhex(offer["agent"]))
            there = self.agent.deserialize_descs(bytes.fromhex(offer["memory"]))
            handle = self.agent.initialize_xfer("READ", self.agent.get_xfer_descs([data]), there, other)
            state = self.agent.transfer(handle)
            while state == "PROC":
                if time.monotonic() > until:
                    raise ChannelBroken("the transfer takes too long")
                time.sleep(POLL)
                state = self.agent.check_xfer_state(handle)
            if state != "DONE":
                raise ChannelBroken(f"the transfer ended with {state}")
            channel.say({"done": True})
            channel.received += data.nbytes
        except ChannelBroken:
            raise
        except Exception as error:  # nixl has exceptions of its own for a dead peer
            raise ChannelBroken(f"{type(error).__name__}: {error}") from None
        finally:
            if handle is not None:
                self.agent.release_xfer_handle(handle)
            if other is not None:
                self.agent.remove_remote_agent(other)
            self.agent.deregister_memory(registered)


def has_nixl() -> bool:
    return importlib.util.find_spec("nixl") is not None


def transport(name: str) -> PageTransport:
    """A new one, for one channel."""
    if name == "nixl":
        return Nixl()
    if name != "distributed":
        raise UserError("--page-transport", f'there is no "{name}"', "Take distributed or nixl.")
    return Distributed()


def empty(shape: tuple[int, ...], pinned: bool) -> Tensor:
    return torch.empty(shape, dtype=torch.uint8, pin_memory=pinned)
