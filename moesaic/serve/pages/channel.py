"""Two processes that send each other messages and tensors, made when they are first needed and remade after a death.

    door = Door(host)                          door.address is told to others
    channel = door.next()                      whoever knocks next
    channel = knock(address, seconds)          in the other process

Each pair has a process group of its own (torch.distributed: gloo, and NCCL for tensors on a GPU), so that a death, or a
timeout, after which a group is of no use any more, is a matter between two. Messages are JSON.
"""

from __future__ import annotations

import json
import socket
import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moesaic.errors import UserError

DAY = 86_400.0
PATIENCE = 30.0  # seconds to become a pair, and for what the other end is known to be sending
KNOCKS = 0.01  # seconds between two looks whether somebody has knocked
KNOCKED = "pairs"  # how many have, at a door
MAX_MESSAGE = 64 << 20


class ChannelBroken(Exception):
    """The other end is gone, or did not answer in time; the channel is of no more use."""


class Channel:
    def __init__(self, store: Any, rank: int, seconds: float) -> None:
        self.rank, self.store = rank, store
        self.sent = 0  # bytes of tensors
        self.received = 0
        try:
            self._group = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, 2, timedelta(seconds=seconds))
        except RuntimeError as error:
            raise ChannelBroken(str(error)) from None
        self._on_gpu: Any = None

    def send(self, tensor: Tensor, seconds: float = PATIENCE) -> None:
        self._run("send", tensor, seconds)
        self.sent += tensor.nbytes

    def receive(self, tensor: Tensor, seconds: float = PATIENCE) -> None:
        self._run("recv", tensor, seconds)
        self.received += tensor.nbytes

    def say(self, message: dict[str, Any], seconds: float = PATIENCE) -> None:
        content = torch.frombuffer(bytearray(json.dumps(message).encode()), dtype=torch.uint8)
        self._run("send", torch.tensor([len(content)]), seconds)
        self._run("send", content, seconds)

    def hear(self, seconds: float = PATIENCE) -> dict[str, Any]:
        size = torch.zeros(1, dtype=torch.int64)
        self._run("recv", size, seconds)
        if not 0 < int(size) <= MAX_MESSAGE:
            raise ChannelBroken(f"a message of {int(size)} bytes")
        content = torch.empty(int(size), dtype=torch.uint8)
        self._run("recv", content, PATIENCE)
        try:
            found = json.loads(content.numpy().tobytes())
        except ValueError as error:
            raise ChannelBroken(f"no message ({error})") from None
        if not isinstance(found, dict):
            raise ChannelBroken("no message")
        return found

    def _run(self, kind: str, tensor: Tensor, seconds: float) -> None:
        group = self._nccl() if tensor.device.type == "cuda" else self._group
        try:
            work = getattr(group, kind)([tensor], 1 - self.rank, 0)
            work.wait(timedelta(seconds=max(seconds, 0.001)))
        except RuntimeError as error:
            raise ChannelBroken(str(error)) from None

    def _nccl(self) -> Any:
        if self._on_gpu is None:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timedelta(seconds=PATIENCE)
            store = dist.PrefixStore("nccl", self.store)
            self._on_gpu = dist.ProcessGroupNCCL(store, self.rank, 2, options)
        return self._on_gpu


class Door:
    """Where others knock: a TCPStore, at which each pair takes a number."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        try:
            self._master = dist.TCPStore(host, port, is_master=True, wait_for_workers=False)
        except RuntimeError as error:
            raise UserError("--page-host", f"nothing can listen at {host}:{port} ({error})") from None
        self.host, self.port = host, self._master.port
        self._count = 0
        self._ended = threading.Event()

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    def next(self) -> Any:
        """What `Channel` needs for whoever knocks next: making it is the business of another thread. None when the door
        is closed."""
        self._count += 1
        # A thread that waits inside a store when its process ends would abort it.
        while not self._ended.wait(KNOCKS):
            if self._master.add(KNOCKED, 0) >= self._count:
                return _pair(self.host, self.port, self._count, PATIENCE)
        return None

    def close(self) -> None:
        self._ended.set()


def knock(address: str, seconds: float) -> Channel:
    """The other end is there, or it is not: a store would try again and again."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=max(seconds, 0.001)).close()
        store = dist.TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=max(seconds, 0.001)))
        number = store.add(KNOCKED, 1)  # all there is to a knock: whoever dies next leaves nothing half done
        return Channel(_pair(host, int(port), number, seconds), 1, seconds)
    except (OSError, RuntimeError, ValueError) as error:
        raise ChannelBroken(str(error)) from None


def _pair(host: str, port: int, number: int, seconds: float) -> Any:
    store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=max(seconds, 0.001)))
    return dist.PrefixStore(f"pair{number}/", store)
