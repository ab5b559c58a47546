"""Keys and values rounded to fewer bits: more tokens in the same memory, answers that still do not depend on others.

pytest tests/serve/test_cache_dtype.py
"""

import pytest
import torch

from moesaic.errors import UserError
from moesaic.model.layout import rounded
from moesaic.serve.core.drafters.router import DraftRouter
from moesaic.serve.core.drafters.suffix import Suffix
from moesaic.serve.core.engine import Engine
from moesaic.serve.core.kv_policies.quantized import Quantized
from moesaic.serve.core.scheduling_policies.chunked import Chunked
from tests.serve.tiny import VOCABULARY, page_bytes, tiny_latent_model, tiny_model


@pytest.fixture(scope="module", params=["keys and values", "latents"])
def model(request):
    return tiny_model() if request.param == "keys and values" else tiny_latent_model()


def prompts(*lengths):
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]


def said(answers):
    return [answer.tokens for answer in answers]


def numbers(answers):
    return torch.tensor([entry.logprob for answer in answers for entry in answer.logprobs])


@pytest.mark.parametrize(("name", "times"), [("float32", 1), ("bfloat16", 2), ("float8", 4)])
def test_so_many_more_tokens_fit(model, name, times):
    size = 10 * page_bytes(model, 16)
    assert Engine(model, cache_bytes=size, cache_dtype=name).cache.pages == 10 * times


@pytest.mark.parametrize("name", ["bfloat16", "float8"])
def test_answers_do_not_depend_on_how_a_prompt_was_read(model, name):
    asked = prompts(40, 9, 70)
    together = Engine(model, cache_dtype=name).generate(asked, max_tokens=20, temperature=0.0)
    in_parts = Engine(model, cache_dtype=name, policy=Chunked(tokens=16), page_size=4)
    assert said(in_parts.generate(asked, max_tokens=20, temperature=0.0)) == said(together)
    alone = [Engine(model, cache_dtype=name).generate([one], max_tokens=20, temperature=0.0)[0] for one in asked]
    assert said(alone) == said(together)
    assert (numbers(alone) - numbers(together)).abs().max() < 1e-3


def test_what_is_lost_is_little_and_less_with_more_bits(model):
    asked = [prompt + prompt for prompt in prompts(60, 90)]
    exact = Engine(model).generate(asked, max_tokens=1, temperature=0.0, prompt_logprobs=0)

    def lost(name):
        given = Engine(model, cache_dtype=name).generate(asked, max_tokens=1, temperature=0.0, prompt_logprobs=0)
        pairs = zip(exact, given, strict=True)
        apart = [
            abs(one.logprob - other.logprob)
            for before, after in pairs
            for one, other in zip(before.prompt_logprobs[1:], after.prompt_logprobs[1:], strict=True)
        ]
        return sum(apart) / len(apart)

    bfloat16, float8 = lost("bfloat16"), lost("float8")
    assert lost("float32") < 1e-5 < bfloat16 < float8 / 4
    assert float8 < 0.5


def test_shared_pages_and_guesses(model):
    """Pages are copied where answers part, and rows of wrong guesses are taken back."""
    asked = prompts(30)
    plain = Engine(model, cache_dtype="float8", page_size=8)
    drafted = Engine(model, cache_dtype="float8", page_size=8, drafter=DraftRouter.over(Suffix(), always=True))
    options = {"max_tokens": 20, "n": 3, "temperature": 0.9, "seed": 5}
    wanted = said(plain.generate(asked, **options))
    assert len({tuple(text) for text in wanted}) == 3
    for _ in range(2):
        assert said(drafted.generate(asked, **options)) == wanted
    assert drafted.counts.accepted_tokens > 0


def test_numbers_too_large_for_eight_bits_stay_numbers():
    given = torch.tensor([1e4, -1e30, 448.0, 0.3, float("nan")])
    assert rounded(given, torch.float8_e4m3fn).float()[:4].tolist() == [448.0, -448.0, 448.0, 0.3125]
    assert rounded(given, torch.bfloat16)[0] == torch.tensor(1e4, dtype=torch.bfloat16)


def test_what_cannot_be():
    model = tiny_model(layers=1)
    with pytest.raises(UserError, match='there is no "int3"'):
        Engine(model, cache_dtype="int3")
    with pytest.raises(UserError, match="float8"):
        Engine(model, cache_dtype="float8", kv_policy=Quantized())
