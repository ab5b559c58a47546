"""On a GPU too, the trainer's log-probabilities are to the bit those the engine recorded, whatever it went through.

pytest tests/gpu/test_gpu_align.py
"""

import json

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no CUDA device: these tests run on a GPU", allow_module_level=True)

import moesaic
from moesaic.kernels.logprobs import token_logprobs
from moesaic.model.context import Routing
from moesaic.model.layout import Layout
from moesaic.serve.core.drafters.suffix import Suffix
from moesaic.serve.core.request import Sampling
from moesaic.serve.core.scheduling_policies.chunked import Chunked
from tests.gpu.models import CONFIGS, tokens_of
from tests.serve.tiny import serve_all

DEVICE = "cuda"
REQUESTS, ANSWER = 40, 48


def rolled(model, drafter, **params):
    """Answers of an engine with little memory: prompts share a beginning, are read in parts and begun again."""
    lengths = [n % 23 for n in range(REQUESTS)]
    common = tokens_of(60)[0]
    prompts = [common + tail for tail in tokens_of(*lengths, seed=1)]
    page = sum(torch.Size(shape).numel() for layer in model.cache_shapes() for shape in layer.values()) * 16
    engine = moesaic.Engine(
        model,
        cache_bytes=50 * page * model.embed.element_size(),
        policy=Chunked(tokens=150),
        drafter=drafter,
        max_requests=12,
    )
    sampling = {"max_tokens": ANSWER, "ignore_eos": True, "record_draws": True, **params}
    requests = [engine.request(prompt, Sampling(**sampling, seed=n)) for n, prompt in enumerate(prompts)]
    serve_all(engine, requests)
    assert engine.scheduler.preemptions > 0 and engine.page_pool.hits > 0
    return requests


@pytest.mark.parametrize("drafter", [None, Suffix], ids=["graphs", "draft tokens"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("name", CONFIGS)
def test_recorded_log_probabilities_are_the_trainers_to_the_bit(directories, name, temperature, drafter):
    model = moesaic.load(directories[name], dtype=torch.bfloat16, device=DEVICE, mode="invariant")
    requests = rolled(model, drafter() if drafter else None, temperature=temperature)
    apart = []
    for some in (requests, requests[:1], requests[5:9]):  # however the trainer batches them
        tokens_T = torch.tensor([token for request in some for token in request.tokens], device=DEVICE)
        hidden_TD = model(tokens_T, Layout([len(one.tokens) for one in some], device=DEVICE), Routing())
        assert hidden_TD.requires_grad
        targets_T = torch.cat([torch.tensor([*one.tokens[1:], -100]) for one in some]).to(DEVICE)
        options = {"temperature": temperature, "linear": model.ops.linear}
        logprobs_T, _ = token_logprobs(hidden_TD, model.output, targets_T, **options)
        start = 0
        for request in some:
            row = start + len(request.prompt) - 1
            recorded = torch.tensor([entry.drawn for entry in request.logprobs], device=DEVICE)
            apart.append((logprobs_T[row : row + request.written] - recorded).detach().abs())
            start += len(request.tokens)
    apart = torch.cat(apart)
    assert len(apart) == (REQUESTS + 1 + 4) * ANSWER
    assert apart.max() == 0, f"{apart.max()} apart, {(apart > 0).sum()} of {len(apart)}"


@pytest.mark.parametrize("name", CONFIGS)
def test_gradients_are_those_of_the_reference(directories, name):
    lengths = [50, 3, 130]
    tokens_T = torch.cat([torch.tensor(tokens) for tokens in tokens_of(*lengths)]).to(DEVICE)
    routing = Routing()

    def gradients(dtype, mode):
        model = moesaic.load(directories[name], dtype=dtype, device=DEVICE, mode=mode)
        hidden_TD = model(tokens_T, Layout(lengths, device=DEVICE), routing)
        logprobs_T, _ = token_logprobs(hidden_TD, model.output, tokens_T.roll(-1), linear=model.ops.linear)
        (-logprobs_T.mean()).backward()
        learning = [(key, each) for key, each in model.named_parameters() if ".indexer." not in key]  # it only chooses
        return {key: parameter.grad for key, parameter in learning}

    def error(given, wanted):
        return ((given.float() - wanted.float()).norm() / wanted.float().norm()).item()

    true = gradients(torch.float32, "reference")
    routing.replay = True  # bf16 would move some tokens to other experts, now these and now those
    plain = gradients(torch.bfloat16, "reference")
    for key, gradient in gradients(torch.bfloat16, "invariant").items():
        assert gradient is not None, key
        assert error(gradient, true[key]) < max(1.5 * error(plain[key], true[key]), 0.02), key


def test_learning_by_trying_with_no_mismatch(tmp_path):
    """The whole command: a tiny model, some steps of GRPO, and what it says about trainer and engine."""
    from moesaic.align.align import align
    from moesaic.recipe import load_recipe
    from moesaic.train.pretrain import pretrain

    tiny = load_recipe("recipes/tiny.yaml", ["train.steps=20", "train.save_every=20"])
    pretrain(tiny, tmp_path / "base", quiet=True)
    stage = {"name": "policy", "steps": 4, "lr": 0.001, "data": [{"path": "builtin:sums"}], "prompts": 4, "group": 4}
    stage |= {"max_tokens": 24, "rewards": [{"name": "numeric"}], "evaluate_every": 0, "objective": {"kl": 0.01}}
    file = tmp_path / "recipe.yaml"
    file.write_text(json.dumps({"align": {"stages": [stage]}}))
    align(load_recipe(file), tmp_path / "base", tmp_path / "aligned", quiet=True)
    lines = [json.loads(line) for line in (tmp_path / "aligned" / "metrics.jsonl").read_text().splitlines()]
    apart = [line["mismatch_max"] for line in lines if "mismatch_max" in line]
    assert len(apart) == 4 and max(apart) == 0.0
