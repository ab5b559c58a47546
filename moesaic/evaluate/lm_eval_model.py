"""Our model as the package lm-eval wants one: log-likelihoods by flat forwards, answers by the engine.

lm_eval.simple_evaluate(model=LMEvalModel(moesaic.load("out/smollm2")), tasks=["hellaswag"])
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager

from moesaic.errors import UserError
from moesaic.evaluate.suites import Progress
from moesaic.model.transformer import Model
from moesaic.serve.core.engine import Engine
from moesaic.serve.core.request import Sampling

TOGETHER = 2048  # tokens of a forward
MOST = 256  # tokens of an answer, where a task does not say; at most half of the context
Piece = tuple[Sequence[int], Sequence[int]]  # what is given, what is to be judged


class Tasks(TaskManager):
    """The package's tasks. Most of them fetch data when they are loaded, which fails in as many ways as there are."""

    def load(self, task_list: Any) -> Any:
        try:
            return super().load(task_list)
        except Exception as error:
            problem = f"{', '.join(map(str, task_list))} cannot be loaded ({' '.join(str(error).split())[:300]})"
            remedy = "Most tasks fetch their data from the Hugging Face Hub; a task file (--data) may name local data."
            raise UserError("tasks", problem, remedy) from None


class LMEvalModel(TemplateLM):
    def __init__(self, model: Model, progress: Progress = lambda done, total: None) -> None:
        super().__init__()
        if model.tokenizer is None:
            raise UserError("model", "has no tokenizer", "Add tokenizer.json to its directory.")
        self.model, self.words, self.progress = model, model.tokenizer, progress

    @property
    def eot_token_id(self) -> int:
        return next(iter(self.words.stop_tokens), 0)

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text that nothing is given for."""
        begin = self.words.special("bos_token")
        found = self.words.fast.token_to_id(begin) if begin else None
        return self.eot_token_id if found is None else found

    @property
    def tokenizer_name(self) -> str:
        return str(self.words.place)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        begin = self.words.special("bos_token")
        if add_special_tokens is None and begin and string.startswith(begin):  # the chat template wrote it
            add_special_tokens = False
        return self.words.encode(string, special=add_special_tokens is not False)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return self.words.chat(chat_history, reply=add_generation_prompt)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        return self.words.chat_template if chat_template else None

    def _loglikelihood_tokens(self, requests: Any, disable_tqdm: bool = False, **_: Any) -> list[tuple[float, bool]]:
        return self._judged([(context, continuation) for _, context, continuation in requests])

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        """Whole texts, in windows of the context in which every token is predicted once."""
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

        pieces: list[Piece] = []
        owners: list[int] = []
        for number, request in enumerate(requests):
            windows = get_rolling_token_windows(
                self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.model.config.context,
                context_len=1,
            )
            for window in windows:
                pieces.append(make_disjoint_window(window))
                owners.append(number)
        sums = [0.0] * len(requests)
        for number, (value, _) in zip(owners, self._judged(pieces), strict=True):
            sums[number] += value
        return sums

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        engine = Engine(self.model, seed=0)
        context, queued = self.model.config.context, []
        for request in requests:
            text, options = request.args
            stop = options.get("until") or []
            most = int(options.get("max_gen_toks", min(MOST, context // 2)))
            if most >= context:
                problem = f"asks for answers of {most} tokens, and the model's context is {context}"
                raise UserError("tasks", problem, "Set max_gen_toks in a task file of your own.")
            sampling = Sampling(
                max_tokens=most,
                temperature=float(options.get("temperature") or 0.0) if options.get("do_sample") else 0.0,
                stop=tuple([stop] if isinstance(stop, str) else stop),
                seed=0,
            )
            tokens = self.tok_encode(text)[-(context - most) :]  # as others do: the end of a prompt counts
            queued.append(engine.request(tokens, sampling))
        texts = {request.number: "" for request in queued}
        for request in queued:
            engine.add(request)
        while engine.working:
            for output in engine.step():
                texts[output.request.number] += output.text
            self.progress(engine.counts.finished, len(queued))
        return [texts[request.number] for request in queued]

    def _judged(self, pieces: Sequence[Piece]) -> list[tuple[float, bool]]:
        """The log-probability of each continuation, and whether it is what a greedy model would say."""
        found: list[tuple[float, bool]] = []
        start, context = 0, self.model.config.context
        while start < len(pieces):
            batch: list[list[int]] = []
            while start + len(batch) < len(pieces):
                given, judged = pieces[start + len(batch)]
                tokens = [*given, *judged][-(context + 1) :]
                if batch and sum(map(len, batch)) + len(tokens) > TOGETHER:
                    break
                batch.append(tokens)
            logits = self.model.logits([tokens[:-1] for tokens in batch])
            for logits_TV, tokens, (_, judged) in zip(logits, batch, pieces[start : start + len(batch)], strict=True):
                last_TV = logits_TV[-len(judged) :].float()
                wanted = last_TV.new_tensor(tokens[-len(judged) :]).long()
                chosen = last_TV.log_softmax(-1).gather(1, wanted[:, None]).double().sum()
                found.append((float(chosen), bool((last_TV.argmax(-1) == wanted).all())))
            start += len(batch)
            self.progress(start, len(pieces))
        return found
