"""The likeliest words of a language model's output matrix, by FGD's graph or a scan of codes, beside the matmul.

    python -m bench.nearest_output --model out/smollm2 --text wikitext2_valid.txt
    python -m bench.nearest_output --model out/smollm2 --text README.md --vocabulary 151936 --method scan

On the model's own hidden states over a text; processor time of one thread, the best of several. A vocabulary larger
than the model's is filled up with its own rows, their numbers in other orders and with other signs: rows of the same
lengths, which are hardly ever the likeliest, but have to be looked at.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import moesaic
from bench.measure import record
from moesaic.nearest import exact
from moesaic.nearest.inner_product import InnerProducts
from moesaic.nearest.scan import Scan

K = 10
LENGTH = 256  # tokens of a sequence


def hidden_states(model: Any, tokens: list[int]) -> np.ndarray:
    seen: list[torch.Tensor] = []
    plain = model.logits_at

    def spy(hidden_TD: torch.Tensor, *more: Any, **options: Any) -> torch.Tensor:
        seen.append(hidden_TD.clone())
        logits_RV: torch.Tensor = plain(hidden_TD, *more, **options)
        return logits_RV

    model.logits_at = spy
    model.logits([tokens[first : first + LENGTH] for first in range(0, len(tokens), LENGTH)])
    model.logits_at = plain
    return torch.cat(seen).float().numpy()


def enlarged(output_VD: np.ndarray, rows: int | None) -> np.ndarray:
    """More rows of the same lengths, if there are to be."""
    draws = np.random.default_rng(0)
    more = max(0, (rows or 0) - len(output_VD))
    added_AD = output_VD[draws.integers(len(output_VD), size=more)]
    added_AD = draws.permuted(added_AD, axis=1) * draws.choice([-1.0, 1.0], size=added_AD.shape)
    return np.concatenate([output_VD, added_AD.astype(np.float32)])


def microseconds(run: Callable[[np.ndarray], object], states_TD: np.ndarray, passes: int = 3) -> float:
    best = np.inf
    for _ in range(passes):
        start = time.process_time()
        for state_D in states_TD:
            run(state_D[None])
        best = min(best, (time.process_time() - start) / len(states_TD))
    return round(best * 1e6, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, help="rows of the output matrix; default: the model's")
    parser.add_argument("--method", choices=["graph", "scan"], action="append", help="default: both")
    parser.add_argument("--no-record", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    model = moesaic.load(args.model)
    assert model.tokenizer is not None
    tokens = list(model.tokenizer.encode(args.text.read_text()[: 10 * args.tokens]))[: args.tokens]
    states_TD = np.ascontiguousarray(hidden_states(model, tokens))
    output_VD = enlarged(np.ascontiguousarray(model.output.float().numpy()), args.vocabulary)
    true_TK, _ = exact.search(output_VD, states_TD, K)
    timed_TD = states_TD[:: max(1, len(states_TD) // 50)]
    matrix_VD = torch.from_numpy(output_VD)
    whole = microseconds(lambda x_1D: torch.from_numpy(x_1D) @ matrix_VD.T, timed_TD)
    print(f"{output_VD.shape[0]} x {output_VD.shape[1]}: the whole matmul takes {whole:.0f} us")
    methods: dict[str, Callable[[np.ndarray, int], np.ndarray]] = {}
    built = time.process_time()
    if "graph" in (args.method or ["graph"]):
        graph = InnerProducts(output_VD, threads=1)
        methods["graph"] = lambda x_TD, pool: graph.search(x_TD, K, pool, threads=1)[0]
    built = time.process_time() - built
    for bits in (8, 4) if "scan" in (args.method or ["scan"]) else ():
        scan = Scan(output_VD, bits=bits)
        methods[f"scan {bits} bits"] = lambda x_TD, pool, scan=scan: scan.search(x_TD, K, pool, threads=1)[0]  # type: ignore[misc]
    rows = []
    for name, search in methods.items():
        for pool in (16, 64, 256, 1024):
            found_TK = search(states_TD, pool)
            first = float((found_TK[:, 0] == true_TK[:, 0]).mean())
            hits = sum(len(set(a) & set(b)) for a, b in zip(found_TK.tolist(), true_TK.tolist(), strict=True))
            took = microseconds(lambda x_1D: search(x_1D, pool), timed_TD)
            rows.append({"method": name, "pool": pool, "first": first, "top10": hits / true_TK.size, "us": took})
            print(
                f"{name:>12} pool {pool:4}: first {first:.4f}, ten {hits / true_TK.size:.4f}, {took:.0f} us", flush=True
            )
    if not args.no_record:
        facts = {"states": len(states_TD), "matrix": list(output_VD.shape), "graph_built_seconds": round(built, 1)}
        print(record(f"nearest_output_{len(output_VD)}", rows, matmul_us=whole, **facts))


if __name__ == "__main__":
    main()
