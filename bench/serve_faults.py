"""Processes are killed and stopped under steady load: is any token wrong, is any client stuck, is all well again?

    python -m bench.serve_faults                          every deployment, 50 faults in all; writes a table
    python -m bench.serve_faults --only "tp=2" --faults 6

Clients stream seeded completions in turn, whose right answers one undisturbed process has given before; a stream that
breaks off, differs from it or says a token twice counts. Every few seconds one process, of another kind each time, gets
SIGKILL or SIGSTOP. Of each fault: how long until a request that came after it was answered, how long until all
processes were there again, and the longest silence any client met.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import signal
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from bench.measure import record
from bench.processes import descendants, server_process
from bench.wide_load import DEPLOYMENTS, make_directory
from moesaic.serve.bench.load import random_words
from moesaic.serve.bench.server_process import serving

CLIENTS = 6
QUESTIONS = 24
STALL = 6  # seconds of silence after which a process counts as dead
BOUND = 120.0  # seconds a client may wait: silence, restart of processes on two busy cores, and what it asked for
FAULTY = [name for name in DEPLOYMENTS if name != "one process"]


def questions(model: str) -> list[dict[str, Any]]:
    chosen = random.Random(1)
    return [
        {
            "model": model,
            "prompt": random_words(chosen, chosen.randint(5, 60)),
            "max_tokens": chosen.randint(20, 80),
            "temperature": 0.0 if number % 2 else 0.9,
            "seed": number,
            "ignore_eos": True,
            "logprobs": 1,
            "stream": True,
        }
        for number in range(QUESTIONS)
    ]


@dataclass
class Load:
    """What clients saw."""

    url: str
    asked: list[dict[str, Any]]
    expected: list[Any] = field(default_factory=list)
    done: int = 0
    wrong: list[str] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)
    silence: float = 0.0  # the longest, since last looked at
    last_started: float = 0.0  # when the latest of those that were answered had begun
    ended: bool = False

    async def stream(self, client: httpx.AsyncClient, body: dict[str, Any]) -> list[Any]:
        """Text and log-probabilities of one answer."""
        text, logprobs, heard = "", list[float](), time.monotonic()
        async with client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                await response.aread()
                raise httpx.HTTPStatusError(response.text[:200], request=response.request, response=response)
            async for line in response.aiter_lines():
                self.silence, heard = max(self.silence, time.monotonic() - heard), time.monotonic()
                if not line.startswith("data: {"):
                    continue
                data = json.loads(line.removeprefix("data: "))
                if "error" in data:
                    raise RuntimeError(str(data["error"])[:200])
                for choice in data["choices"]:
                    text += choice["text"]
                    logprobs += (choice.get("logprobs") or {}).get("token_logprobs") or []
        return [text, logprobs]

    async def client(self, client: httpx.AsyncClient, seed: int) -> None:
        chosen = random.Random(seed)
        while not self.ended:
            number, began = chosen.randrange(len(self.asked)), time.monotonic()
            try:
                found = await asyncio.wait_for(self.stream(client, self.asked[number]), BOUND)
            except TimeoutError:
                self.wrong.append(f"question {number}: no end within {BOUND:g} s")
            except httpx.HTTPStatusError as error:
                self.refused[f"HTTP {error.response.status_code}"] += 1
                await asyncio.sleep(0.2)
            except (httpx.HTTPError, RuntimeError) as error:
                self.wrong.append(f"question {number}: {type(error).__name__}: {error}")
            else:
                self.done += 1
                self.last_started = max(self.last_started, began)
                if found != self.expected[number]:
                    self.wrong.append(f"question {number}: {found} instead of {self.expected[number]}"[:600])


def named(server: int) -> dict[str, int]:
    """The server's engine processes by the names they show in `ps`."""
    found = {}
    for process in descendants(server):
        with suppress(OSError):
            name = Path(f"/proc/{process}/comm").read_text().strip()
            state = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0]
            if name.startswith("moe:") and state not in "ZXT":
                found[name] = process
    return found


def replaced(server: int, kinds: list[str], gone: int) -> bool:
    """Whether all are there, and none of them is the one that was disturbed."""
    now = named(server)
    return set(now) >= set(kinds) and gone not in now.values()


async def expected_answers(directory: Path, asked: list[dict[str, Any]]) -> list[Any]:
    with serving(directory, ["--threads", "1", "--cache-gb", "0.05"]) as url:
        load = Load(url, asked)
        async with httpx.AsyncClient(base_url=url, timeout=BOUND) as client:
            return [await load.stream(client, body) for body in asked]


async def until(condition: Any, seconds: float) -> float | None:
    """How long it took; None if it did not come about."""
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        if condition():
            return time.monotonic() - began
        await asyncio.sleep(0.05)
    return None


def gauges(text: str) -> dict[str, float]:
    """What must be zero when nobody asks for anything."""
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    lines = text.splitlines()
    return {
        name: sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"moesaic:{name}"))
        for name in names
    }


async def disturb(name: str, directory: Path, asked: Any, expected: Any, faults: int, seed: int) -> dict[str, Any]:
    options = [*DEPLOYMENTS[name], "--threads", "1", "--cache-gb", "0.05", "--stall-seconds", str(STALL)]
    rows: list[dict[str, Any]] = []
    with serving(directory, options) as url:
        server = server_process()
        load = Load(url, asked, expected)
        whole = named(server)
        assert whole, "no engine processes were found"
        kinds = sorted(whole)
        turns = itertools.cycle(
            random.Random(seed).sample([(k, s) for k in kinds for s in ("KILL", "STOP")], 2 * len(kinds))
        )
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, timeout=None, limits=limits) as client:
            tasks = [asyncio.create_task(load.client(client, number)) for number in range(CLIENTS)]
            await until(lambda: load.done >= CLIENTS, BOUND)
            for kind, how in itertools.islice(turns, faults):
                await asyncio.sleep(random.Random(len(rows)).uniform(0.2, 1.5))  # somewhere in the middle
                load.silence, hit = 0.0, time.monotonic()
                victim = named(server).get(kind)
                if victim is None:
                    await until(lambda: kind in named(server), BOUND)
                    victim = named(server)[kind]
                os.kill(victim, getattr(signal, f"SIG{how}"))
                gone = victim
                answered, again = await asyncio.gather(
                    until(lambda: load.last_started > hit, BOUND), until(lambda: replaced(server, kinds, gone), BOUND)
                )
                served = await until(lambda n=load.done: load.done >= n + 2, BOUND)
                rows.append(
                    {
                        "process": kind,
                        "signal": how,
                        "whole_s": again and round(again, 1),
                        "answered_s": answered and round(answered, 1),
                        "serves_on": served is not None,
                        "longest_silence_s": round(load.silence, 1),
                    }
                )
                print(f"  {name}: {rows[-1]}", flush=True)
            load.ended = True
            await asyncio.wait(tasks, timeout=BOUND)
            for _ in range(100):  # what the processes have is read every second
                left = gauges((await client.get("/metrics")).text)
                if not any(left.values()):
                    break
                await asyncio.sleep(0.1)
        engines = list(named(server).values())
    await asyncio.sleep(1.0)
    alive = [process for process in engines if Path(f"/proc/{process}").exists()]
    return {"deployment": name, "faults": rows, "answers": load.done, "wrong": load.wrong[:20], "refused": load.refused,
            "left_over": left | {"processes": len(alive)}}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=FAULTY, action="append", help="default: all")
    parser.add_argument("--faults", type=int, default=10, help="of each deployment")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-record", action="store_true", help="print only")
    options = parser.parse_args()
    found = []
    with tempfile.TemporaryDirectory() as folder:
        directory = make_directory(Path(folder) / "tiny")
        asked = questions(directory.name)
        expected = asyncio.run(expected_answers(directory, asked))
        for name in options.only or FAULTY:
            found.append(asyncio.run(disturb(name, directory, asked, expected, options.faults, options.seed)))
            summary = {key: value for key, value in found[-1].items() if key != "faults"}
            print(summary, flush=True)
    sound = all(
        not one["wrong"]
        and not any(one["left_over"].values())
        and all(fault["serves_on"] and fault["whole_s"] is not None for fault in one["faults"])
        for one in found
    )
    print("sound" if sound else "NOT SOUND")
    if not options.no_record:
        print(f"wrote {record('serve_faults', found, stall_seconds=STALL, clients=CLIENTS)}")
    raise SystemExit(0 if sound else 1)


if __name__ == "__main__":
    main()
