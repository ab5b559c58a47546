"""A backend that samples several answers and gives the one that a critic holds to be best (RAG-Gym's inference)."""

from __future__ import annotations

from collections.abc import Sequence

from moesaic.evaluate.backends import Answer, Backend, Conversation, OnAnswer
from moesaic.model.transformer import Model
from moesaic.serve.core.engine import Engine
from moesaic.serve.core.request import Completion, Sampling
from moesaic.worlds.completions import prompt_tokens, seed_of
from moesaic.worlds.critic import Judge, best


class BestOfNBackend(Backend):
    def __init__(self, model: Model, critic: Judge, candidates: int, seed: int = 0, temperature: float = 1.0) -> None:
        self.engine = Engine(model, seed=0)
        self.critic, self.candidates, self.seed, self.temperature = critic, candidates, seed, temperature

    def answer(self, conversations: Sequence[Conversation], max_tokens: int, on_answer: OnAnswer) -> None:
        for (number, said), drawn in self._sampled(conversations, max_tokens):
            if not drawn:
                on_answer(number, Answer("", 0, out_of_context=True))
                continue
            (scores,) = self.critic.scores([(said, [one.text for one in drawn])])
            chosen = drawn[best(scores)]
            cut = chosen.finish_reason == "length" and len(chosen.tokens) < max_tokens
            on_answer(number, Answer(chosen.text, len(chosen.tokens), out_of_context=cut))

    def _sampled(
        self, conversations: Sequence[Conversation], max_tokens: int
    ) -> list[tuple[tuple[int, Conversation], list[Completion]]]:
        tokenizer = self.engine.tokenizer
        assert tokenizer is not None
        asked, requests = [], []
        for number, said in enumerate(conversations):
            prompt = prompt_tokens(tokenizer, said)
            if len(prompt) >= self.engine.max_length:
                asked.append((number, said, 0))
                continue
            # A conversation's own seed: what is drawn does not depend on which others go on beside it.
            own = seed_of(self.seed, *prompt)
            sampling = [
                Sampling(max_tokens=max_tokens, temperature=self.temperature, seed=seed_of(own, k))
                for k in range(self.candidates)
            ]
            requests += [self.engine.request(prompt, one) for one in sampling]
            asked.append((number, said, self.candidates))
        done = iter(self.engine.complete(requests))
        return [((number, said), [next(done) for _ in range(count)]) for number, said, count in asked]
