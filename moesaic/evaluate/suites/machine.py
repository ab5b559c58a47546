"""How much a machine does for a mixture-of-experts model, as one number (after AIPerf, Ren et al.). Needs no model.

    moesaic evaluate --suite machine
    moesaic evaluate --suite machine seconds=60 --device cuda --json

The workload is the same everywhere: a mixture of 12.7 million parameters (6 layers, 2 of 8 experts) is trained,
prefills prompts, decodes one sequence, and decodes a batch of 16, a quarter of the time each. As in AIPerf FLOPs are
counted from the model's shape (`model/flops.py`), batches of training and prefill grow with the machine, and the
score is regulated by what was learned: the geometric mean of the four throughputs in GFLOP/s, times -ln(error), the
error being that of predictions after a fixed number of training steps, at least one in a hundred. Those steps are the
same everywhere and not timed, so that arithmetic that is quick and wrong gains nothing, and other machines compare by
their throughput.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moesaic.data.packing import Batch
from moesaic.errors import UserError
from moesaic.evaluate.suites import Suite, SuiteContext
from moesaic.kernels import hardware
from moesaic.model.config import Experts, GroupedQuery, Layer, ModelConfig, Rope
from moesaic.model.directory import chosen_threads
from moesaic.model.flops import Chunk, forward_flops, training_flops
from moesaic.model.layout import Layout
from moesaic.model.transformer import Model
from moesaic.recipe_sections import BalanceSection
from moesaic.serve.core.engine import Engine
from moesaic.serve.core.request import Sampling
from moesaic.train.balance import Balance
from moesaic.train.objectives.next_token import NextToken
from moesaic.train.optimizers.adamw import AdamW

VERSION = 1  # of the workload: scores of different ones cannot be compared
WORKLOAD = ModelConfig(
    family="qwen3_moe",
    vocab=4096,
    hidden=256,
    attention=GroupedQuery(heads=8, kv_heads=4, head_size=32, qk_norm=True),
    rope=Rope(size=32),
    layers=(Layer(Experts(count=8, per_token=2, hidden=256)),) * 6,
    context=1024,
)
LENGTH = 256  # of a sequence that is trained on
PROMPT, OPENING, ANSWER = 512, 64, 64  # tokens: of a prompt that is prefilled, before decoding, and of what is decoded
STREAMS = 16
LONG_ENOUGH = 0.1  # seconds that a batch takes when it is large enough
MAX_SEQUENCES = 256  # sequences of a batch
PAGE = 16  # tokens

SYMBOLS, LEARNING_STEPS, RATE = 64, 40, 1e-3
MIN_ERROR = 0.01


@dataclass(frozen=True)
class Throughput:
    flops: int
    tokens: int
    seconds: float


Part = Callable[[], Throughput]  # does some work, and returns how much and how long it took


@dataclass(frozen=True)
class Machine(Suite):
    seconds: float = 20.0  # of measuring, in all; getting ready comes on top

    takes_model = False

    def __post_init__(self) -> None:
        if not 0.0 < self.seconds <= 3600.0:
            raise ValueError("seconds must be above 0 and at most 3600")

    def run(self, model: Model | None, context: SuiteContext) -> dict[str, Any]:
        model = build_model(context)
        trainer = Trainer(model)
        error = trainer.learn()
        parts: dict[str, Callable[[], Part]] = {
            "read": lambda: grown(lambda count: prefill(model, count)),
            "write": lambda: decode(model, 1),
            "write_16": lambda: decode(model, STREAMS),
            "train": lambda: grown(trainer.steps),  # last: the others run with the same weights everywhere
        }
        metrics: dict[str, Any] = {"score": 0.0}
        for number, (name, part) in enumerate(parts.items()):
            context.progress(number, len(parts))
            throughput = measured(part(), self.seconds / len(parts))
            metrics[f"{name}_operations_per_second"] = throughput.flops / throughput.seconds
            metrics[f"{name}_tokens_per_second"] = throughput.tokens / throughput.seconds
        context.progress(len(parts), len(parts))
        regulator = -math.log(max(error, MIN_ERROR))
        throughputs = [metrics[f"{name}_operations_per_second"] / 1e9 for name in parts]
        metrics["score"] = math.prod(throughputs) ** (1 / len(throughputs)) * regulator
        metrics |= {"error": error, "regulator": regulator, "seconds": self.seconds, "workload": VERSION}
        metrics |= {"device": described(model.device), "dtype": str(model.dtype).removeprefix("torch.")}
        return metrics | {"threads": torch.get_num_threads(), "torch": torch.__version__}


def build_model(context: SuiteContext) -> Model:
    weights = context.weights
    try:
        device = torch.device(weights.device) if weights.device else hardware.device()
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError):
        raise UserError("--device", f"there is no {weights.device!r} here", "Take cpu, or leave it out.") from None
    if weights.dtype not in (None, "float32", "bfloat16", "float16"):
        raise UserError("--dtype", f"{weights.dtype} is not a format of weights", "Take float32 or bfloat16.")
    torch.set_num_threads(chosen_threads(weights.threads))
    usual = torch.bfloat16 if device.type == "cuda" else torch.float32
    dtype = getattr(torch, weights.dtype) if weights.dtype else usual
    return Model(WORKLOAD).initialize(0).to(device=device, dtype=dtype)


class Trainer:
    """Steps of the trainer's own kind: objective, gradients, clipping, AdamW, balance of the experts."""

    def __init__(self, model: Model) -> None:
        self.model, self.objective = model, NextToken()
        self.optimizer = AdamW(lr=RATE).build(model.named_parameters())
        self.balance = Balance(model, BalanceSection())
        self.draw = torch.Generator().manual_seed(0)
        self.successor = torch.randperm(SYMBOLS, generator=self.draw)  # what follows a symbol, always the same

    def batch(self, sequences: int, length: int) -> Batch:
        rows = [torch.randint(SYMBOLS, (sequences,), generator=self.draw)]
        for _ in range(length):
            rows.append(self.successor[rows[-1]])
        tokens_ST = torch.stack(rows, 1)
        flat = [part.reshape(-1).to(self.model.device) for part in (tokens_ST[:, :-1], tokens_ST[:, 1:])]
        return Batch(flat[0], flat[1], [length] * sequences, [0] * sequences, sequences * length)

    def step(self, batch: Batch) -> float:
        self.optimizer.zero_grad()
        routing = self.balance.routing()
        loss = self.objective(self.model, batch, routing)
        loss.total.backward()
        self.balance.count(routing)
        self.optimizer.step(1.0, clip=1.0)
        self.balance.update()
        return float(loss.total.detach())  # waits until the device is done

    def learn(self) -> float:
        """The share of wrong predictions on sequences not seen before, after a fixed number of steps."""
        for _ in range(LEARNING_STEPS):
            self.step(self.batch(8, 32))
        batch = self.batch(32, 32)
        with torch.inference_mode():
            hidden_TD = self.model(batch.tokens_T, Layout(batch.lengths, device=self.model.device))
            predicted_T: Tensor = self.model.logits_at(hidden_TD).argmax(-1)
        return float((predicted_T != batch.targets_T).float().mean())

    def steps(self, sequences: int) -> Part:
        batch = self.batch(sequences, LENGTH)
        flops = training_flops(self.model.config, [LENGTH] * sequences)

        def part() -> Throughput:
            start = time.perf_counter()
            self.step(batch)
            return Throughput(flops, sequences * LENGTH, time.perf_counter() - start)

        return part


def engine_for(model: Model, requests: int, tokens: int) -> Engine:
    """With a cache for so many requests of so many tokens, and no more."""
    row = sum(math.prod(shape) for layer in model.cache_shapes() for shape in layer.values()) * model.dtype.itemsize
    pages = requests * (tokens // PAGE + 2) + 2
    return Engine(
        model, cache_bytes=pages * PAGE * row, page_size=PAGE, max_requests=requests, reuse_prefixes=False, seed=0
    )


def text(number: int, length: int) -> list[int]:
    return [(7 * number + 5 * place) % SYMBOLS for place in range(length)]


def prefill(model: Model, count: int) -> Part:
    """Prompts, up to the first token of each completion."""
    engine = engine_for(model, count, PROMPT + 1)
    prompts = [text(number, PROMPT) for number in range(count)]
    flops = forward_flops(model.config, [Chunk(PROMPT)] * count, logits=count)

    def part() -> Throughput:
        start = time.perf_counter()
        engine.generate(prompts, max_tokens=1, temperature=0.0)
        return Throughput(flops, count * PROMPT, time.perf_counter() - start)

    return part


def decode(model: Model, streams: int) -> Part:
    """A batch of completions, from when all have started until all are done."""
    engine = engine_for(model, streams, OPENING + ANSWER)
    sampling = Sampling(max_tokens=ANSWER, temperature=0.0, ignore_eos=True)

    def part() -> Throughput:
        requests = [engine.request(text(number, OPENING), sampling) for number in range(streams)]
        for request in requests:
            engine.add(request)
        while not all(request.written for request in requests):
            engine.step()
        started = [request.written for request in requests]
        start = time.perf_counter()
        while engine.working:
            engine.step()
        seconds = time.perf_counter() - start
        # A token is computed to find the next; the last one never is.
        chunks = [Chunk(1, OPENING + place - 1) for written in started for place in range(written, ANSWER)]
        return Throughput(forward_flops(model.config, chunks), len(chunks), seconds)

    return part


def grown(make: Callable[[int], Part]) -> Part:
    """With as many sequences as keep the machine busy for a while."""
    count = 4
    while True:
        part = make(count)
        part()  # the first time other things are made ready too
        if part().seconds >= LONG_ENOUGH or count >= MAX_SEQUENCES:
            return part
        count *= 2


def measured(part: Part, seconds: float) -> Throughput:
    part()
    done = [part()]
    while sum(throughput.seconds for throughput in done) < seconds:
        done.append(part())
    return Throughput(sum(s.flops for s in done), sum(s.tokens for s in done), sum(s.seconds for s in done))


def described(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu, {torch.get_num_threads()} threads"
