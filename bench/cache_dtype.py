"""What a cache in fewer bits costs: perplexity of a text, read through the engine, for every dtype of the cache.

    python -m bench.cache_dtype --model out/smollm2 --text wikitext2.txt          a minute or two on two cores

A prompt's tokens look at what was rounded, as answers do, so its log-probabilities show what answers lose.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from bench.measure import record
from moesaic.model.directory import load
from moesaic.serve.core.engine import Engine
from moesaic.serve.core.memory import DTYPES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--pieces", type=int, default=8)
    options = parser.parse_args()
    model = load(options.model)
    assert model.tokenizer is not None
    tokens = model.tokenizer.encode(options.text.read_text()[: options.length * options.pieces * 8])
    pieces = [tokens[i * options.length : (i + 1) * options.length] for i in range(options.pieces)]
    rows = []
    for name in DTYPES:
        engine = Engine(model, cache_bytes=1 << 28, cache_dtype=name, reuse_prefixes=False)
        answers = engine.generate(pieces, max_tokens=1, temperature=0.0, prompt_logprobs=0)
        found = [entry.logprob for answer in answers for entry in answer.prompt_logprobs or () if entry is not None]
        loss = -sum(found) / len(found)
        room = engine.cache.pages * engine.cache.page_size
        row = {"cache": name, "tokens": len(found), "loss": round(loss, 5), "perplexity": round(math.exp(loss), 4)}
        rows.append({**row, "tokens_in_256_mib": room})
        print(rows[-1], flush=True)
    record("cache_dtype", rows, model=options.model.name, length=options.length)


if __name__ == "__main__":
    main()
