"""Writing token by token on a CPU, alone and sixteen at once, beside `transformers.generate` on the same weights.

    python -m bench.decode_cpu            about four minutes; writes bench/results/decode_cpu.json

The model is the 238M-parameter mixture of `bench.forward` (89M active), float32, random weights. Both sides read the
same prompts and choose greedily; the prompts are not timed. The peer runs with its faster experts (whichever of
grouped, batched and eager wins) and a cache. GB/s counts the weights a step must read once, so its share of what a
plain sum over a large tensor reads on this machine says how much is left to gain.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
import transformers
from transformers.generation.streamers import BaseStreamer

from bench.forward import batch, pair
from bench.measure import machine, record
from moesaic.kernels import hardware, native
from moesaic.model.layout import Layout
from moesaic.model.transformer import Model

MODEL = "qwen3_moe 238M"
PROMPT, PAGE = 64, 16


class Clock(BaseStreamer):
    """When each token came out of `generate`."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def bandwidth(size: int = 1 << 28) -> float:
    """Bytes a second of reading memory, the best of several."""
    numbers = torch.ones(size // 4)
    best = 0.0
    for _ in range(8):
        start = time.perf_counter()
        numbers.sum()
        best = max(best, size / (time.perf_counter() - start))
    return best


@torch.inference_mode()
def own_steps(model: Model, prompts: list[torch.Tensor], steps: int) -> tuple[float, list[list[int]]]:
    """Seconds a step takes, and the tokens each prompt was continued with."""
    count = -(-(PROMPT + steps + 1) // PAGE)
    cache = model.new_cache(len(prompts) * count, PAGE)
    pages = [list(range(number * count, (number + 1) * count)) for number in range(len(prompts))]
    layout = Layout([PROMPT] * len(prompts), cached=[0] * len(prompts), cache=cache, pages=pages)
    last = torch.tensor([span.stop - 1 for span in layout.spans])
    tokens_S = model.logits_at(model(torch.cat(prompts), layout), last).argmax(-1)
    written = [tokens_S.tolist()]
    start = time.perf_counter()
    for step in range(steps):
        layout = Layout([1] * len(prompts), cached=[PROMPT + step] * len(prompts), cache=cache, pages=pages)
        tokens_S = model.logits_at(model(tokens_S, layout)).argmax(-1)
        written.append(tokens_S.tolist())
    seconds = (time.perf_counter() - start) / steps
    return seconds, [list(tokens) for tokens in zip(*written)]


def peer_steps(theirs: Any, prompts: list[torch.Tensor], steps: int) -> tuple[float, list[list[int]]]:
    """The same by `generate`; a streamer takes one sequence only, so several are timed by two lengths."""
    inputs = torch.stack(prompts)

    def generate(count: int, **more: Any) -> torch.Tensor:
        return theirs.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
            **more,
        )

    if len(prompts) == 1:
        clock = Clock()
        out = generate(steps + 1, streamer=clock)
        seconds = (clock.times[-1] - clock.times[1]) / steps
    else:
        times = []
        for count in (1, steps + 1):
            start = time.perf_counter()
            out = generate(count)
            times.append(time.perf_counter() - start)
        seconds = (times[1] - times[0]) / steps
    return seconds, out[:, PROMPT:].tolist()


def bytes_a_step(model: Model, sequences: int) -> int:
    """What must be read once: all weights but the embedding's rows and the experts nobody was sent to. Of E experts,
    T tokens with K each leave E (1 - K/E)^T unread, if choices are spread evenly."""
    total = sum(parameter.numel() for parameter in model.parameters()) - model.embed.numel()
    for block in model.layers:
        experts = block.ffn.gate_up_EGD.numel() + block.ffn.down_EDF.numel()  # type: ignore[union-attr, operator]
        shape = block.ffn.router.shape  # type: ignore[union-attr]
        total -= round(experts * (1 - shape.per_token / shape.count) ** sequences)  # type: ignore[union-attr]
    return total * model.embed.element_size()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="turns of each side; the median counts")
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--sequences", type=int, nargs="*", default=[1, 16])
    parser.add_argument("--no-record", action="store_true", help="print only")
    arguments = parser.parse_args()
    torch.set_num_threads(hardware.threads())
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    assert native.kernels() is not None, "no C compiler: there is nothing to measure"
    theirs, ours = pair(MODEL)
    memory = bandwidth()
    here = machine()
    print(f"{MODEL}, float32, {here['cpu']} ({here['cores']} cores), torch {here['torch']}, {here['date']}")
    print(f"memory is read at {memory / 1e9:.1f} GB/s")
    rows = []
    for sequences in arguments.sequences:
        prompts = batch([PROMPT] * sequences, ours.config.vocab)
        times: dict[str, list[float]] = {"ours": [], "grouped_mm": [], "batched_mm": [], "eager": []}
        written: dict[str, list[list[int]]] = {}
        own_steps(ours, prompts, 2)
        for _ in range(arguments.rounds):
            for name, taken in times.items():
                if name == "ours":
                    seconds, written[name] = own_steps(ours, prompts, arguments.steps)
                else:
                    theirs.set_experts_implementation(name)
                    # A slow kind of experts is tried once and then left alone.
                    if taken and min(taken) > 1.5 * min(min(t) for kind, t in times.items() if kind != "ours" and t):
                        continue
                    seconds, written[name] = peer_steps(theirs, prompts, arguments.steps)
                taken.append(seconds)
        medians = {name: sorted(taken)[len(taken) // 2] for name, taken in times.items()}
        own = medians.pop("ours")
        kind, peer = min(medians.items(), key=lambda item: item[1])
        same = sum(a == b for mine, theirs_ in zip(written["ours"], written[kind]) for a, b in zip(mine, theirs_))
        rate = bytes_a_step(ours, sequences) / own
        rows.append(
            {
                "sequences": sequences,
                "peer": kind,
                "peer_ms": peer * 1e3,
                "ours_ms": own * 1e3,
                "tokens_per_second": sequences / own,
                "peer_tokens_per_second": sequences / peer,
                "ratio": peer / own,
                "gigabytes_per_second": rate / 1e9,
                "share_of_bandwidth": rate / memory,
                "same_tokens": same / (sequences * (arguments.steps + 1)),
            }
        )
        print(
            f"{sequences:2} sequences: generate ({kind}) {peer * 1e3:.1f} ms a step, ours {own * 1e3:.1f} ms = "
            f"{sequences / own:.0f} tokens/s: {peer / own:.2f}x; {rate / 1e9:.1f} GB/s = {rate / memory:.0%}; "
            f"{rows[-1]['same_tokens']:.0%} of the tokens are the same",
            flush=True,
        )
    if not arguments.no_record:
        print(record("decode_cpu", rows, transformers=transformers.__version__, bandwidth=memory))


if __name__ == "__main__":
    main()
