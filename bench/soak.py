"""An hour's traffic in minutes, with clients that go away: does memory stay flat and latency steady?

    python -m bench.soak                           a minute against the engine; writes bench/results/soak_engine.json
    python -m bench.soak --minutes 10
    python -m bench.soak --server --minutes 5      against the real server, in a process of its own
    python -m bench.soak --deployment "tp=2" --minutes 10       against one on several processes (bench/wide_load.py)

Time runs six times as fast: clients that would come over an hour come in ten minutes. A third of them leave before
their answer has ended. Each tenth of the time is summed up by itself. Memory must not grow from the second to the last,
and when all are gone no page and no request may be left.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import torch

import moesaic
from bench.measure import record
from bench.processes import descendants, server_process
from bench.wide_load import DEPLOYMENTS
from moesaic.data.tokenizer_training import save_tokenizer, train_tokenizer
from moesaic.model.directory import save
from moesaic.model.families import read_config
from moesaic.model.transformer import Model
from moesaic.serve.bench.load import has_text, random_words
from moesaic.serve.bench.server_process import serving
from moesaic.serve.core.engine import Engine
from moesaic.serve.core.engine_loop import EngineLoop
from moesaic.serve.core.request import Sampling
from moesaic.serve.core.scheduling_policies.flow import FlowPrefill

PARTS = 10
LEAVING = 1 / 3
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "


SHAPE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "vocab_size": 300,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
}


def make_directory(path: Path) -> Path:
    save(Model(read_config(SHAPE, "bench")).initialize(), path)
    save_tokenizer(train_tokenizer([random_words(random.Random(n), 50) for n in range(50)], SHAPE["vocab_size"]), path)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


def resident(process: int | str = "self") -> float:
    """MiB of memory a process holds."""
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


class Traffic:
    """Clients that come by a Poisson process; each is asked to be served by `one(prompt, tokens, stays)`."""

    def __init__(self, rate: float, seconds: float, one: Any, memory: Any) -> None:
        self.rate, self.seconds, self.one, self.memory = rate, seconds, one, memory
        self.rng = random.Random(3)
        self.parts: list[dict[str, Any]] = []
        self.first: list[float] = []
        self.problems: list[str] = []
        self.came = self.left = 0

    async def run(self) -> None:
        began = time.perf_counter()
        tasks: set[asyncio.Task[None]] = set()
        due = 0.0
        for part in range(1, PARTS + 1):
            self.first = []
            while due < self.seconds * part / PARTS:
                await asyncio.sleep(max(0.0, began + due - time.perf_counter()))
                tasks.add(task := asyncio.create_task(self.client()))
                task.add_done_callback(tasks.discard)
                due += self.rng.expovariate(self.rate)
            self.parts.append(
                {
                    "memory_mib": self.memory(),
                    "first_token_p50": statistics.median(self.first) if self.first else None,
                    "first_token_p99": sorted(self.first)[int(len(self.first) * 0.99)] if self.first else None,
                    "open": len(tasks),
                }
            )
            print(f"{part}/{PARTS}: {self.parts[-1]}", flush=True)
        await asyncio.gather(*tasks)

    async def client(self) -> None:
        self.came += 1
        prompt = (
            random_words(random.Random(self.rng.randrange(40)), 20)
            + " "
            + random_words(self.rng, self.rng.randint(1, 40))
        )
        stays = float("inf")
        if self.rng.random() < LEAVING:
            self.left += 1
            stays = self.rng.expovariate(5.0)
        came = time.perf_counter()
        try:
            async with asyncio.timeout(stays if stays < 1e9 else None):
                async for _ in (stream := self.one(prompt, self.rng.randint(1, 24))):
                    if came:
                        self.first.append(time.perf_counter() - came)
                        came = 0.0
        except TimeoutError:
            pass
        except Exception as error:
            self.problems.append(f"{type(error).__name__}: {error}")
        finally:
            await stream.aclose()


async def soak_engine(directory: Path, rate: float, seconds: float) -> dict[str, Any]:
    engine = Engine(moesaic.load(directory), policy=FlowPrefill(), cache_bytes=1 << 20, seed=0)
    async with EngineLoop(engine) as loop:

        async def one(prompt: str, tokens: int) -> Any:
            answers = loop.submit([engine.request(prompt, Sampling(max_tokens=tokens, ignore_eos=True))])
            try:
                async for output in answers:
                    yield output
            finally:
                answers.close()

        traffic = Traffic(rate, seconds, one, resident)
        await traffic.run()
        await loop.until_idle()
        await loop.call(lambda: None)  # the last notes have been read
        left = {
            "pages": engine.page_pool.in_use,
            "requests": len(engine.scheduler.requests),
            "passes": len(engine.scheduler.stopped),
            "tasks": len(asyncio.all_tasks()) - 1,
        }
    return summary(traffic, left) | {"preemptions": engine.scheduler.preemptions, "finished": engine.counts.finished}


async def soak_server(directory: Path, rate: float, seconds: float, options: list[str]) -> dict[str, Any]:
    with serving(directory, ["--cache-gb", "0.001", "--threads", "1", *options]) as url:
        process = server_process()
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=32)
        async with httpx.AsyncClient(base_url=url, limits=limits, timeout=120) as client:

            async def one(prompt: str, tokens: int) -> Any:
                form = {"messages": [{"role": "user", "content": prompt}], "max_tokens": tokens, "stream": True}
                async with client.stream("POST", "/v1/chat/completions", json=form) as answer:
                    answer.raise_for_status()
                    async for line in answer.aiter_lines():
                        if line.startswith("data: {"):
                            choices = json.loads(line.removeprefix("data: "))["choices"]
                            if any(has_text(choice["delta"]) for choice in choices):
                                yield line

            traffic = Traffic(rate, seconds, one, lambda: sum(map(resident, (process, *descendants(process)))))
            await traffic.run()
            for _ in range(600):  # what was abandoned last is still being noticed, and leases of pages run out in time
                lines = (await client.get("/metrics")).text.splitlines()
                left = {
                    name: gauge(lines, f"moesaic:{name}") for name in ("num_requests_running", "num_requests_waiting")
                }
                left["kv_cache_usage_perc"] = gauge(lines, "moesaic:kv_cache_usage_perc")
                if not any(left.values()):
                    break
                await asyncio.sleep(0.1)
    return summary(traffic, left)


def gauge(lines: list[str], name: str) -> float:
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.split("{")[0].split(" ")[0] == name)


def summary(traffic: Traffic, left: dict[str, Any]) -> dict[str, Any]:
    parts = traffic.parts
    medians = [part["first_token_p50"] for part in parts if part["first_token_p50"] is not None]
    return {
        "came": traffic.came,
        "left_early": traffic.left,
        "problems": traffic.problems[:20],
        "memory_growth_mib": parts[-1]["memory_mib"] - parts[1]["memory_mib"],
        "latency_last_to_second": medians[-1] / medians[1] if len(medians) > 1 else None,
        "left_over": left,
        "parts": parts,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument(
        "--rate", type=float, default=12.0, help="clients a second; an hour of 2 a second in ten minutes"
    )
    parser.add_argument("--server", action="store_true", help="against the server, not the engine alone")
    parser.add_argument("--deployment", choices=list(DEPLOYMENTS), help="against a server on several processes")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as path:
        directory = make_directory(Path(path) / "tiny")
        seconds = options.minutes * 60
        if options.deployment or options.server:
            how = DEPLOYMENTS[options.deployment] if options.deployment else ["--policy", "flow"]
            found = asyncio.run(soak_server(directory, options.rate, seconds, how))
        else:
            found = asyncio.run(soak_engine(directory, options.rate, seconds))
    print({key: value for key, value in found.items() if key != "parts"})
    sound = not found["problems"] and not any(found["left_over"].values())
    flat = found["memory_growth_mib"] < 16
    print(f"{'sound' if sound else 'NOT SOUND'}, memory {'flat' if flat else 'NOT FLAT'}")
    parts = found.pop("parts")
    name = "soak_wide" if options.deployment else "soak_server" if options.server else "soak_engine"
    facts = {"deployment": options.deployment} if options.deployment else {}
    print(f"wrote {record(name, parts, minutes=options.minutes, rate=options.rate, **facts, **found)}")
    raise SystemExit(0 if sound and flat else 1)


if __name__ == "__main__":
    main()
