"""LoRA adapters in graphed steps, in Triton's interpreter: requests with different ones, and with none, in one step.

pytest tests/kernels/test_triton_adapters.py
"""

import pytest
import torch

pytest.importorskip("triton")

from moesaic.kernels.triton.low_rank import LowRank, add_low_rank
from moesaic.serve.core.engine import Engine
from moesaic.serve.core.request import Sampling
from moesaic.serve.gpu.overlap import OverlapLoop
from tests.kernels import interpreter
from tests.serve.random_adapters import random_adapter
from tests.serve.tiny import VOCABULARY, serve_all, tiny_latent_model, tiny_model

interpreter.require()


def matrices_of(adapters, inputs, outputs, rank):
    generator = torch.Generator().manual_seed(0)
    drawn = [
        (torch.randn(rank, inputs, generator=generator), torch.randn(outputs, rank, generator=generator))
        for _ in range(adapters)
    ]
    made = LowRank.empty(adapters, rank, *drawn[0])
    for number, pair in enumerate(drawn, start=1):
        made.write(number, pair)
    return made, drawn


@pytest.mark.parametrize("inputs, outputs, rank", [(48, 40, 3), (600, 136, 16), (40, 24, 20)])
def test_rows_get_their_own_adapters_correction_and_others_none(inputs, outputs, rank):
    made, drawn = matrices_of(3, inputs, outputs, rank)
    assert made.rank in (16, 32)
    adapters_T = torch.tensor([0, 2, 2, 1, 0, 3] * 4, dtype=torch.int32)
    x_TI, out_TO = torch.randn(24, inputs), torch.randn(24, outputs)
    found = add_low_rank(out_TO.clone(), x_TI, made, adapters_T)
    for row, number in enumerate(adapters_T.tolist()):
        if number == 0:
            assert torch.equal(found[row], out_TO[row]), "left as it was, to the bit"
        else:
            down_RI, up_OR = drawn[number - 1]
            wanted = out_TO[row].double() + up_OR.double() @ (down_RI.double() @ x_TI[row].double())
            torch.testing.assert_close(found[row].double(), wanted, rtol=1e-4, atol=1e-3)
        alone = add_low_rank(out_TO[row : row + 1].clone(), x_TI[row : row + 1], made, adapters_T[row : row + 1])
        assert torch.equal(alone[0], found[row]), "a row's bits do not depend on those beside it"


def prompts(*lengths):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]


def serving(model, adapters, queued):
    engine = Engine(model, page_size=4)
    engine.adapters = {adapter.name: adapter for adapter in adapters}
    if queued:
        engine.runner = OverlapLoop(engine)
    return engine


MODELS = {"grouped-query": (tiny_model, ("qkv", "out")), "latent": (tiny_latent_model, ("q_up", "kv_down", "down"))}


@pytest.mark.parametrize("kind", MODELS)
def test_requests_with_adapters_are_graphed_steps_like_others(kind):
    make, ends = MODELS[kind]
    model = make(layers=2)
    adapters = [random_adapter(model, f"a{rank}", rank, rank, 1.0, ends) for rank in (2, 5)]
    queued, plain = (serving(model, adapters, queued) for queued in (True, False))
    asked = list(zip(prompts(5, 9, 3, 7), (None, "a2", "a5", "a2"), strict=True))

    def answers(engine):
        sampling = Sampling(max_tokens=6, temperature=0.0)
        requests = [engine.request(prompt, sampling, adapter=name) for prompt, name in asked]
        serve_all(engine, requests)
        return [request.tokens[len(request.prompt) :] for request in requests]

    def no_blocks(*_):
        raise AssertionError("ran block by block")

    queued.runner._run_layers = no_blocks
    found, wanted = answers(queued), answers(plain)
    assert found == wanted
    without = plain.generate([prompt for prompt, _ in asked], max_tokens=6, temperature=0.0)
    assert [one != other.tokens for one, other in zip(wanted, without, strict=True)] == [False, True, True, True]
    shapes = list(queued.runner.steps.graphs)
    assert any(shape.adapted for shape in shapes)
    queued.generate(prompts(5), max_tokens=3, temperature=0.0)
    assert any(not shape.adapted for shape in queued.runner.steps.graphs), "without one, a step pays for none"


def test_an_adapter_that_needs_more_room_moves_the_tables_and_a_number_is_used_again():
    model = tiny_model(layers=1)
    made = [random_adapter(model, f"a{seed}", rank, seed, 1.0, ("qkv",)) for seed, rank in enumerate((2, 2, 2, 2, 20))]
    queued, plain = (serving(model, made, queued) for queued in (True, False))
    table = queued.runner.steps.adapters
    for adapter in made:
        for engine in (queued, plain):
            engine.adapters = {adapter.name: adapter}
        found, wanted = (
            engine.generate(prompts(4), adapter=adapter.name, max_tokens=4, temperature=0.0)
            for engine in (queued, plain)
        )
        assert found[0].tokens == wanted[0].tokens
    assert table.capacity == 4 and table.moves == 2, "once for the first, and once for the rank of the last"


def test_an_adapter_of_what_expands_latents_runs_block_by_block():
    model = tiny_latent_model(layers=2)
    adapter = random_adapter(model, "up", 2, 0, 1.0, ("kv_up",))
    queued, plain = (serving(model, [adapter], queued) for queued in (True, False))
    assert not queued.runner.steps.adapters.takes(adapter)
    found, wanted = (
        engine.generate(prompts(4), adapter="up", max_tokens=4, temperature=0.0) for engine in (queued, plain)
    )
    assert found[0].tokens == wanted[0].tokens and not queued.runner.steps.graphs
