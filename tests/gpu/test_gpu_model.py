"""The whole model on a real GPU: equal to transformers, to its own reference kernels, and to itself in any batch.

pytest tests/gpu/test_gpu_model.py
"""

import itertools

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no CUDA device: these tests run on a GPU", allow_module_level=True)

import transformers

import moesaic
from moesaic import kernels
from moesaic.kernels.cuda import fast, invariant
from moesaic.kernels.cuda.fused_forward import outside
from moesaic.kernels.triton.linear import linear, tiled
from moesaic.kernels.triton.sample import sample
from moesaic.model.context import Routing
from moesaic.model.layout import Layout
from moesaic.serve.gpu.overlap import step_weights
from tests.gpu.models import CONFIGS, error, tokens_of

DEVICE = "cuda"
pytestmark = pytest.mark.usefixtures("exact_float32")


def peer(directory, dtype, device=DEVICE):
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).to(device).eval()


def test_cuda_models_get_the_gpu_kernels(directories):
    model = moesaic.load(directories["qwen3_moe"], device=DEVICE)
    assert model.ops is fast and outside(step_weights(model)) is None
    assert kernels.choose(DEVICE, "invariant") is invariant
    assert kernels.choose(DEVICE, "reference") is not fast


@pytest.mark.parametrize("name", CONFIGS)
@torch.inference_mode()
def test_logits_equal_transformers(directories, name):
    sequences = tokens_of(70, 1, 300, 33)
    # On the CPU: on a GPU it sends one of these tokens of gpt-oss to another expert than it does there, and than we do.
    wide = peer(directories[name], torch.float32, "cpu")
    wanted = [wide(torch.tensor([tokens])).logits[0].to(DEVICE) for tokens in sequences]
    exact = moesaic.load(directories[name], dtype=torch.float32, device=DEVICE)
    for given, one in zip(exact.logits(sequences), wanted, strict=True):
        assert error(given, one) < 1e-4
        assert torch.equal(given.argmax(-1), one.argmax(-1))
    half = peer(directories[name], torch.bfloat16)
    rounded = moesaic.load(directories[name], dtype=torch.bfloat16, device=DEVICE)
    for given, one, tokens in zip(rounded.logits(sequences), wanted, sequences, strict=True):
        theirs = error(half(torch.tensor([tokens], device=DEVICE)).logits[0], one)
        assert error(given, one) < max(1.5 * theirs, 0.02), theirs


@pytest.mark.parametrize("lengths", [(50, 130, 7), (256, 256)], ids=["uneven", "even"])
@pytest.mark.parametrize("name", CONFIGS)
def test_gradients_equal_the_reference(directories, name, lengths):
    sequences = tokens_of(*lengths)
    tokens_T = torch.tensor(list(itertools.chain(*sequences)), device=DEVICE)

    routing = Routing()

    def gradients(dtype, mode):
        model = moesaic.load(directories[name], dtype=dtype, device=DEVICE, mode=mode)
        layout = Layout([len(tokens) for tokens in sequences], device=DEVICE)
        hidden_TD = model(tokens_T, layout, routing)
        loss = torch.nn.functional.cross_entropy(model.logits_at(hidden_TD).float(), tokens_T.roll(-1))
        loss.backward()
        learning = [(key, each) for key, each in model.named_parameters() if ".indexer." not in key]  # it only chooses
        return loss.item(), {key: parameter.grad for key, parameter in learning}

    true_loss, true = gradients(torch.float32, "reference")
    routing.replay = True  # bf16 would move some tokens to other experts, now these and now those
    plain_loss, plain = gradients(torch.bfloat16, "reference")
    loss, given = gradients(torch.bfloat16, "fast")
    assert abs(loss - true_loss) < 0.02
    for key, gradient in given.items():
        assert gradient is not None, key
        assert error(gradient, true[key]) < max(1.5 * error(plain[key], true[key]), 0.02), key


def paged(model, lengths, page_size=16, seed=0):
    """A cache, and pages in no order for sequences of these lengths."""
    counts = [-(-length // page_size) for length in lengths]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(seed)).tolist()
    return model.new_cache(sum(counts), page_size), [[order.pop() for _ in range(count)] for count in counts]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", CONFIGS)
@torch.inference_mode()
def test_cached_equals_whole(directories, name, dtype):
    """Prompts in uneven parts, then single tokens, against one forward without a cache."""
    model = moesaic.load(directories[name], dtype=dtype, device=DEVICE)
    sequences = tokens_of(700, 40, 301)
    whole = model.logits(sequences)
    cache, pages = paged(model, [700, 40, 301])
    done, pieces = [0, 0, 0], [[], [], []]
    for step in ([300, 39, 9], [5, 1, 1], [1, 0, 290], [393, 0, 0], [1, 0, 1]):
        layout = Layout(step, cached=done, cache=cache, pages=pages, device=DEVICE)
        new = [tokens[at : at + n] for tokens, at, n in zip(sequences, done, step, strict=True)]
        tokens_T = torch.tensor(list(itertools.chain(*new)), device=DEVICE)
        logits_TV = model.logits_at(model(tokens_T, layout)).float()
        for span in layout.spans:
            pieces[span.number].append(logits_TV[span.start : span.stop])
        done = [at + n for at, n in zip(done, step, strict=True)]
    exact = moesaic.load(directories[name], dtype=torch.float32, device=DEVICE).logits(sequences)
    for given, wanted, true in zip(pieces, whole, exact, strict=True):
        # bf16 moves a few tokens to other experts, now these and now those: what counts is the token in the middle.
        apart, usual = ((rows - true).norm(dim=-1) / true.norm(dim=-1) for rows in (torch.cat(given), wanted))
        assert apart.median() < max(1e-4, 1.6 * usual.median().item())
        if dtype == torch.float32:
            assert apart.max() < 1e-3


@pytest.mark.parametrize("name", CONFIGS)
@torch.inference_mode()
def test_same_bits_alone_and_in_a_batch(directories, name):
    """A token's logits: prompt read whole, in parts, among others; then decoded alone and among many."""
    model = moesaic.load(directories[name], dtype=torch.bfloat16, device=DEVICE)
    lengths = [601] + [17 + 13 * i for i in range(60)]
    sequences = tokens_of(*lengths)
    cache, pages = paged(model, lengths)

    def run(chosen, step, done):
        layout = Layout(step, cached=done, cache=cache, pages=[pages[i] for i in chosen], device=DEVICE)
        new = [sequences[i][at : at + n] for i, at, n in zip(chosen, done, step, strict=True)]
        hidden = model(torch.tensor(list(itertools.chain(*new)), device=DEVICE), layout)
        return model.logits_at(hidden)

    batch = list(range(61))
    prompts = [length - 2 for length in lengths]
    together = run(batch, prompts, [0] * 61)
    first = run(batch, [1] * 61, prompts)
    second = run(batch, [1] * 61, [length + 1 for length in prompts])
    alone = run([0], [prompts[0]], [0])
    assert torch.equal(alone, together[: prompts[0]])
    assert torch.equal(run([0], [1], [prompts[0]])[0], first[0])
    assert torch.equal(run([0], [1], [prompts[0] + 1])[0], second[0])
    run([0, 7], [200, 3], [0, 0]), run([0], [5], [200]), run([0, 3], [prompts[0] - 205, 1], [205, 0])
    assert torch.equal(run([0], [2], [prompts[0]])[:, :], torch.stack([first[0], second[0]]))


@torch.inference_mode()
def test_a_tree_of_draft_tokens_equals_each_branch(directories):
    model = moesaic.load(directories["qwen3_moe"], dtype=torch.bfloat16, device=DEVICE)
    prompt, (a, b, c) = tokens_of(290)[0], (11, 12, 13)
    cache, pages = paged(model, [300, 300])

    def run(tokens, done, pages, **tree):
        layout = Layout([len(tokens)], cached=[done], cache=cache, pages=[pages], device=DEVICE, **tree)
        return model.logits_at(model(torch.tensor(tokens, device=DEVICE), layout))

    run(prompt, 0, pages[0]), run(prompt, 0, pages[1])
    tree_TT = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool)
    given = run([a, b, c], 290, pages[0], trees=[tree_TT], positions=torch.tensor([290, 291, 291], device=DEVICE))
    assert error(given[:2], run([a, b], 290, pages[1])) < 1e-2
    assert error(given[2:], run([a, c], 290, pages[1])[1:]) < 1e-2


def test_draws_follow_the_distribution():
    logits = torch.tensor([1.0, 0.0, 2.0, -1.0], device=DEVICE).log_softmax(-1).repeat(20000, 1)
    n = len(logits)
    chosen, bits, _ = sample(
        logits,
        torch.full((n,), 1.0, device=DEVICE),
        torch.rand(n, device=DEVICE, dtype=torch.float64),
        torch.full((n,), -1, dtype=torch.int32, device=DEVICE),
        torch.zeros(1, dtype=torch.int32, device=DEVICE),
    )
    shares = torch.bincount(chosen.long(), minlength=4) / n
    assert (shares - logits[0].exp()).abs().max() < 0.015
    assert torch.allclose(bits.view(torch.float32), logits[0][chosen.long()], atol=1e-5)


@pytest.mark.parametrize(
    ("inputs", "outputs"), [(2048, 5120), (4096, 2048), (2048, 32000), (1536, 100), (768, 2048), (512, 640), (200, 72)]
)
@pytest.mark.parametrize("matmul", [linear, tiled], ids=["chosen", "tiled"])
def test_linear_has_the_same_bits_for_any_number_of_rows(matmul, inputs, outputs):
    torch.manual_seed(0)
    x = torch.randn(4096, inputs, device=DEVICE, dtype=torch.bfloat16)
    weight = (torch.randn(outputs, inputs, device=DEVICE) / inputs**0.5).to(torch.bfloat16)
    bias = torch.randn(outputs, device=DEVICE, dtype=torch.bfloat16) if outputs == 100 else None
    whole = matmul(x, weight, bias)
    assert error(whole, x.float() @ weight.float().T + (0 if bias is None else bias.float())) < 4e-3
    counts = (
        1,
        2,
        3,
        4,
        7,
        8,
        15,
        16,
        17,
        31,
        32,
        33,
        48,
        64,
        65,
        100,
        127,
        128,
        129,
        192,
        256,
        300,
        512,
        777,
        1024,
        2047,
    )
    for rows in counts:  # enough results each time that another order of sums would show
        parts = x[: max(rows, (1 << 18) // outputs // rows * rows)].split(rows)[:128]
        given = torch.cat([matmul(part, weight, bias) for part in parts if len(part) == rows])
        assert torch.equal(given, whole[: len(given)]), rows
