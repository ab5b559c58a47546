"""How the processes of one attempt find each other in a store that an attempt before has used.

`torchrun` gives restarted workers the store of the ones before (with its default, static rendezvous), and where those
wrote their addresses, the new ones would find the dead. Restart counts do not tell attempts apart, since each machine
has its own. So the first rank draws a name for the attempt, and every other takes it once the first has answered it:
one that is gone answers nobody.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable

import torch.distributed as dist

from moesaic.errors import UserError

PAUSE = 0.01  # seconds between two looks


def meet(store: dist.Store, rank: int, ranks: int, timeout: float) -> dist.Store:
    """The store of this attempt alone, on every one of its ranks."""
    until = time.monotonic() + timeout
    own = secrets.token_hex(8)
    if rank == 0:
        store.set("attempt", own)
        missing = set(range(1, ranks))

        def welcome() -> bool:
            for other in sorted(missing):
                if store.check([f"{own}/hello/{other}"]):
                    store.set(f"{own}/welcome/{other}", store.get(f"{own}/hello/{other}").decode())
                    missing.discard(other)
            return not missing

        if not _looked(welcome, until):
            names = ", ".join(map(str, sorted(missing)))
            raise UserError(f"rank{'s' if len(missing) > 1 else ''} {names}", f"did not come within {timeout:g} s")
        return dist.PrefixStore(own, store)
    attempt = ""

    def welcomed() -> bool:
        nonlocal attempt
        if not store.check(["attempt"]):
            return False
        attempt = store.get("attempt").decode()
        if not store.check([f"{attempt}/hello/{rank}"]) or store.get(f"{attempt}/hello/{rank}").decode() != own:
            store.set(f"{attempt}/hello/{rank}", own)
        answer = f"{attempt}/welcome/{rank}"
        return store.check([answer]) and store.get(answer).decode() == own

    if not _looked(welcomed, until):
        raise UserError("rank 0", f"did not answer rank {rank} within {timeout:g} s")
    return dist.PrefixStore(attempt, store)


def _looked(done: Callable[[], bool], until: float) -> bool:
    while not done():
        if time.monotonic() > until:
            return False
        time.sleep(PAUSE)
    return True
