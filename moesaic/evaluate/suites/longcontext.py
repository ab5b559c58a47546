"""What a model finds in long texts, with a whole cache or a pruned one (the kinds of questions of RULER).

    moesaic evaluate out/smollm2 --suite longcontext length=1024 examples=20
    moesaic evaluate out/smollm2 --suite longcontext length=1024,2048 kinds=needle,fewshot \
        --kv-policy snapkv --kv share=0.25 --json

Questions are made up (`long_context_tasks.py`), the same for every model and policy; answers are greedy and come from
the engine. The interval is Wilson's, at 95 %, over all questions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from moesaic.errors import UserError
from moesaic.evaluate.interval import wilson
from moesaic.evaluate.long_context_tasks import KINDS, question, score
from moesaic.evaluate.questions import means
from moesaic.evaluate.suites import Suite, SuiteContext
from moesaic.model.transformer import Model
from moesaic.serve.core.engine import Engine
from moesaic.serve.core.request import Sampling

SHOWN = 5  # questions that are told with their answers


@dataclass(frozen=True)
class LongContext(Suite):
    length: int | str = 1024  # tokens; several with commas between them
    kinds: str = ",".join(KINDS)
    examples: int = 10  # of every kind and length
    max_tokens: int = 24
    seed: int = 0
    together: int = 4  # questions in the engine at the same time

    takes_kv_policy = True

    def __post_init__(self) -> None:
        if self.examples < 1 or self.max_tokens < 1 or self.together < 1:
            raise ValueError("examples, max_tokens and together must be at least 1")
        for kind in self.kinds.split(","):
            if kind not in KINDS:
                raise ValueError(f'kinds: there is no "{kind}"; known: {", ".join(KINDS)}')
        if not all(part.isdecimal() and int(part) >= 64 for part in str(self.length).split(",")):
            raise ValueError("length must be numbers of at least 64, with commas between them")

    def run(self, model: Model | None, context: SuiteContext) -> dict[str, Any]:
        assert model is not None
        tokenizer = model.tokenizer
        if tokenizer is None:
            raise UserError("model", "has no tokenizer", "Add tokenizer.json to its directory.")
        lengths = [int(part) for part in str(self.length).split(",")]
        if max(lengths) + self.max_tokens > model.config.context:
            problem = f"{max(lengths)} tokens and an answer do not fit in the model's context of {model.config.context}"
            raise UserError("length", problem, "Take fewer.")
        engine = Engine(model, max_requests=self.together, kv_policy=context.kv_policy, reuse_prefixes=False, seed=0)
        cases = [
            (length, *question(kind, length, tokenizer, self.seed, number))
            for length in lengths
            for kind in self.kinds.split(",")
            for number in range(self.examples)
        ]
        sampling = Sampling(max_tokens=self.max_tokens, temperature=0.0)
        requests = [engine.request(tokens, sampling) for _, _, tokens in cases]
        texts = {request.number: "" for request in requests}
        for request in requests:
            engine.add(request)
        after: dict[int, int] = {}  # pages of a request when its first token was chosen
        most = 0
        while engine.working:
            outputs = engine.step()
            most = max(most, engine.page_pool.in_use)
            for output in outputs:
                texts[output.request.number] += output.text
                after.setdefault(output.request.number, len(output.request.pages))
            context.progress(engine.counts.finished, len(requests))
        scores = [score(made, texts[request.number]) for (_, made, _), request in zip(cases, requests, strict=True)]
        page_bytes = sum(tensor[0].nbytes for layer in engine.cache.layers for tensor in layer.values())
        low, high = wilson(sum(scores), len(scores))
        tokens = sum(len(tokens) for _, _, tokens in cases)
        return {
            "score": sum(scores) / len(scores),
            "score_low": low,
            "score_high": high,
            "by_kind": means((made.kind for _, made, _ in cases), scores),
            "by_length": means((str(length) for length, _, _ in cases), scores),
            "examples": len(scores),
            "prompt_tokens": tokens / len(cases),
            # Measured: pages that requests held, and how much the cache of the same tokens would be whole.
            "cache_bytes_per_token": page_bytes * sum(after.values()) / tokens,
            "cache_share": sum(after.values())
            / sum(-(-len(tokens) // engine.page_pool.size) for _, _, tokens in cases),
            "peak_cache_bytes": page_bytes * most,
            "samples": [
                {"kind": made.kind, "asked": made.asked, "expected": list(made.answers), "said": texts[request.number]}
                for (_, made, _), request in list(zip(cases, requests, strict=True))[:: max(1, len(cases) // SHOWN)]
            ],
        }
