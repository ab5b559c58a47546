"""Every family against `transformers` on the same weights: logits, greedy continuations, and the way back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

import moesaic
from moesaic.model import directory
from moesaic.model.layout import Layout
from moesaic.model.transformer import Model
from tests.model import oracle


@pytest.fixture(scope="module", params=oracle.CASES)
def pair(request, tmp_path_factory) -> tuple[transformers.PreTrainedModel, Model, Path]:
    path = tmp_path_factory.mktemp(request.param)
    theirs = oracle.save(request.param, path)
    return theirs, moesaic.load(path), path


def ragged(vocab: int, lengths=(17, 1, 30, 9), seed: int = 5) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocab, (n,), generator=generator).tolist() for n in lengths]


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert torch.isfinite(ours).all()
    error = (ours - theirs).norm() / theirs.norm()
    assert error < 1e-4, f"relative error {error:.2e}"
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4 * float(theirs.abs().max()))


def test_logits_of_a_ragged_batch(pair):
    theirs, ours, _ = pair
    batch = ragged(ours.config.vocab)
    for tokens, logits in zip(batch, ours.logits(batch), strict=True):
        close(logits, oracle.logits(theirs, tokens))


def test_reference_kernels_agree(pair):
    _, ours, path = pair
    batch = ragged(ours.config.vocab, seed=6)
    plain = moesaic.load(path, mode="reference")
    for a, b in zip(ours.logits(batch), plain.logits(batch), strict=True):
        close(a, b)


def test_logprobs_are_those_of_the_logits(pair):
    theirs, ours, _ = pair
    batch = ragged(ours.config.vocab, seed=7)
    for tokens, logprobs in zip(batch, ours.logprobs(batch), strict=True):
        assert logprobs.shape == (len(tokens) - 1,)
        if len(tokens) > 1:
            expected = oracle.logits(theirs, tokens).log_softmax(-1)[range(len(tokens) - 1), tokens[1:]]
            torch.testing.assert_close(logprobs, expected, rtol=1e-3, atol=1e-3)


def test_greedy_continuation_token_for_token(pair):
    theirs, ours, _ = pair
    prompt = ragged(ours.config.vocab, lengths=(7,), seed=8)[0]
    oracle.restore_rope(theirs)
    expected = theirs.generate(
        torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
    )[0].tolist()
    assert greedy(ours, prompt, 12) == expected


def greedy(model: Model, prompt: list[int], count: int) -> list[int]:
    """A plain loop over the paged cache."""
    cache, tokens, done = model.new_cache(8, page_size=4), list(prompt), 0
    pages = [[5, 0, 1, 2, 7, 3, 6, 4]]  # in no order
    with torch.inference_mode():
        for _ in range(count):
            new = tokens[done:]
            layout = Layout([len(new)], cached=[done], cache=cache, pages=pages, states=[0])
            hidden = model(torch.tensor(new), layout)
            done = len(tokens)
            tokens.append(int(model.logits_at(hidden, slice(-1, None)).argmax()))
    return tokens


def test_export_reloads_with_the_same_logits(pair, tmp_path):
    theirs, ours, _ = pair
    directory.save(ours, tmp_path / "out")
    again, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", attn_implementation="eager", experts_implementation="eager", output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    tokens = ragged(ours.config.vocab, lengths=(23,))[0]
    torch.testing.assert_close(oracle.logits(again.eval(), tokens), oracle.logits(theirs, tokens), rtol=0, atol=0)
    reread = moesaic.load(tmp_path / "out")
    assert reread.config == ours.config
    for (name, a), (_, b) in zip(ours.state_dict().items(), reread.state_dict().items(), strict=True):
        assert torch.equal(a, b), name


def test_gradients_match(pair):
    theirs, ours, _ = pair
    tokens = ragged(ours.config.vocab, lengths=(14,), seed=9)[0]
    theirs.zero_grad()
    oracle.restore_rope(theirs)
    loss = theirs(torch.tensor([tokens]), labels=torch.tensor([tokens]), use_cache=False).loss
    loss.backward()
    ours.zero_grad()
    hidden = ours(torch.tensor(tokens), Layout([len(tokens)]))
    own = torch.nn.functional.cross_entropy(ours.logits_at(hidden, slice(0, -1)), torch.tensor(tokens[1:]))
    own.backward()
    torch.testing.assert_close(own, loss, rtol=1e-4, atol=1e-4)
    expected = theirs.model.embed_tokens.weight.grad
    error = (ours.embed.grad - expected).norm() / expected.norm()
    assert error < 1e-3, f"relative error {error:.2e}"
    for parameter in ours.parameters():
        parameter.grad = None
