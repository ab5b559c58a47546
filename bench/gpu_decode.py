"""Generation on one GPU: prompts read, then whole steps replayed as graphs; beside transformers' static cache.

    python bench/gpu_decode.py                     1, 128 and 512 sequences of 512 in, 128 out
    python bench/gpu_decode.py --profile           where a step's time goes, kernel by kernel

Tokens per second count the output over the whole time, reading prompts included; each step's tokens are read by the
host while the next step runs, as a server would. Random weights, bfloat16, greedy.
"""

from __future__ import annotations

import argparse
import collections
import json
import pathlib
import sys
import time

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from bench.gpu_train import VOCAB, make_ours, make_peer
from bench.measure import record
from moesaic.kernels.triton.linear import linear
from moesaic.model.layout import Layout, PagedCache
from moesaic.serve.cuda_step import DecodeStep

READ = 16384  # tokens of prompts read in one forward


class Server:
    def __init__(self, model, sequences: int, prompt: int, out: int, page_size: int = 16) -> None:
        self.model, self.sequences, self.prompt, self.out = model, sequences, prompt, out
        per_sequence = -(-(prompt + out) // page_size)
        self.cache: PagedCache = model.new_cache(sequences * per_sequence, page_size)
        order = torch.randperm(sequences * per_sequence).tolist()
        self.pages = [order[i * per_sequence : (i + 1) * per_sequence] for i in range(sequences)]
        self.step = DecodeStep(model, self.cache, sequences, prompt + out)

    @torch.inference_mode()
    def read(self, prompts: torch.Tensor) -> list[int]:
        """The first token after each prompt."""
        first = []
        per_pass = max(1, READ // self.prompt)
        for at in range(0, self.sequences, per_pass):
            part = prompts[at : at + per_pass]
            layout = Layout(
                [self.prompt] * len(part), cache=self.cache, pages=self.pages[at : at + per_pass], device="cuda"
            )
            hidden_TD = self.step.forward(part.reshape(-1), layout)
            last_SD = hidden_TD.view(len(part), self.prompt, -1)[:, -1]
            first.append(linear(last_SD.contiguous(), self.model.output).argmax(-1))
        return torch.cat(first).tolist()

    def generate(self, prompts: torch.Tensor) -> tuple[list[list[int]], float, float]:
        """(texts, seconds to the first tokens, seconds after them)."""
        torch.cuda.synchronize()
        start = time.perf_counter()
        texts = [[token] for token in self.read(prompts)]
        begun = time.perf_counter()
        count = self.sequences
        self.step.begin(
            range(count), [text[0] for text in texts], [self.prompt] * count, self.pages, [0.0] * count, [0] * count
        )
        under_way = None
        for _ in range(self.out - 1):
            chosen = self.step.run(count)
            if under_way is not None:
                for text, token in zip(texts, under_way.wait()[0], strict=True):
                    text.append(token)
            under_way = chosen
        for text, token in zip(texts, under_way.wait()[0], strict=True):
            text.append(token)
        return texts, begun - start, time.perf_counter() - begun

    def profile(self, steps: int = 10) -> list[tuple[str, int, float]]:
        """(kernel, launches, microseconds) per step."""
        count = self.sequences
        self.step.begin(range(count), [1] * count, [self.prompt] * count, self.pages, [0.0] * count, [0] * count)
        self.step.run(count).wait()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
            for _ in range(steps):
                self.step.run(count)
            torch.cuda.synchronize()
        total: dict[str, list[float]] = collections.defaultdict(lambda: [0, 0.0])
        for event in found.key_averages():
            total[event.key[:90]][0] += event.count / steps
            total[event.key[:90]][1] += event.self_device_time_total / steps
        return sorted(((name, round(n, 1), us) for name, (n, us) in total.items()), key=lambda row: -row[2])[:24]


def peer_alone(peer, prompts: torch.Tensor, out: int) -> tuple[list[int], float]:
    """One sequence, static cache, the forward compiled as transformers advises: (text, seconds)."""
    peer.eval()
    peer.config.use_cache = True
    options = {"max_new_tokens": out, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    for _ in range(2):
        peer.generate(prompts[:1], cache_implementation="static", **options)
    torch.cuda.synchronize()
    start = time.perf_counter()
    text = peer.generate(prompts[:1], cache_implementation="static", **options)
    torch.cuda.synchronize()
    return text[0, prompts.shape[1] :].tolist(), time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--sequences", type=int, nargs="*", default=[1, 128, 512])
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--out", type=int, default=128)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--no-peer", action="store_true")
    options = parser.parse_args()
    model = make_ours(options.layers)
    prompts = torch.randint(VOCAB, (max(options.sequences), options.prompt), device="cuda")
    rows, texts = [], {}
    for sequences in options.sequences:
        server = Server(model, sequences, options.prompt, options.out)
        begun = time.perf_counter()
        server.generate(prompts[:sequences])
        first_seconds = time.perf_counter() - begun
        runs = [server.generate(prompts[:sequences]) for _ in range(2)]
        assert runs[0][0] == runs[1][0], "the same prompts gave another text"
        texts[sequences], read, write = min(runs, key=lambda run: run[1] + run[2])
        row = {
            "who": "moesaic",
            "sequences": sequences,
            "output_tokens_per_second": round(sequences * options.out / (read + write)),
            "decode_tokens_per_second": round(sequences * (options.out - 1) / write),
            "step_ms": round(write / (options.out - 1) * 1000, 3),
            "prompt_tokens_per_second": round(sequences * options.prompt / read),
            "first_use_seconds": round(first_seconds, 1),
        }
        rows.append(row)
        print(json.dumps(row), flush=True)
        if options.profile:
            for name, count, us in server.profile():
                print(f"{us:9.1f} us {count:7.1f}x  {name}", flush=True)
        del server
        torch.cuda.empty_cache()
    counts = options.sequences
    same = [all(texts[counts[0]][i] == texts[n][i] for i in range(counts[0])) for n in counts[1:]]
    facts = {
        "layers": options.layers,
        "prompt": options.prompt,
        "out": options.out,
        "same_text_in_batches_of": dict(zip(map(str, counts[1:]), same, strict=True)),
    }
    print(json.dumps(facts), flush=True)
    record("gpu_decode", rows, **facts)
    if options.no_peer:
        return
    text, seconds = peer_alone(make_peer(options.layers, model), prompts, options.out)
    own = texts[counts[0]][0]
    row = {
        "who": "transformers, static cache, compiled",
        "sequences": 1,
        "output_tokens_per_second": round(options.out / seconds),
        "same_text_until": next((i for i, (one, other) in enumerate(zip(text, own)) if one != other), len(own)),
    }
    print(json.dumps(row), flush=True)
    record("gpu_decode", [*rows, row], **facts)


if __name__ == "__main__":
    main()
