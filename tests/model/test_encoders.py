"""Encoders against `transformers` on the same weights: hidden states, logits of their heads, and the way back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import moesaic
from moesaic.errors import UserError
from moesaic.kernels import native
from moesaic.model import directory
from moesaic.model.layout import Layout
from moesaic.model.rounded import round_matrices
from moesaic.model.transformer import Model
from tests.model import oracle
from tests.model.test_parity import ragged


@pytest.fixture(scope="module", params=oracle.ENCODER_CASES)
def pair(request, tmp_path_factory) -> tuple[transformers.PreTrainedModel, Model, Path]:
    path = tmp_path_factory.mktemp(request.param)
    theirs = oracle.make_encoder(request.param)
    theirs.save_pretrained(path)
    return theirs, moesaic.load(path), path


@torch.inference_mode()
def hidden(model: Model, batch: list[list[int]], **layout) -> list[torch.Tensor]:
    lengths = [len(tokens) for tokens in batch]
    return list(
        model(torch.tensor([token for tokens in batch for token in tokens]), Layout(lengths, **layout)).split(lengths)
    )


@torch.inference_mode()
def test_hidden_states_of_a_ragged_batch(pair):
    theirs, ours, path = pair
    batch = ragged(ours.config.vocab, lengths=(17, 1, 64, 30))
    plain = moesaic.load(path, mode="reference")
    for tokens, found, slow in zip(batch, hidden(ours, batch), hidden(plain, batch), strict=True):
        expected = theirs.base_model(torch.tensor([tokens])).last_hidden_state[0]
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
        torch.testing.assert_close(slow, expected, rtol=0, atol=1e-5)


def test_a_text_is_the_same_to_the_bit_in_any_batch(pair):
    ours = pair[1]
    batch = ragged(ours.config.vocab, lengths=(17, 1, 64, 30))
    for tokens, found in zip(batch, hidden(ours, batch), strict=True):
        assert torch.equal(hidden(ours, [tokens])[0], found)


@torch.inference_mode()
def test_matrices_of_8_bits_are_those_of_the_operations_one_by_one(pair):
    if native.kernels() is None:
        pytest.skip("needs native kernels")
    _, ours, path = pair
    together, apart, plain = models = [moesaic.load(path) for _ in range(3)]
    for model in models:
        model.layers = model.layers[:1]  # further on, a number that lay between two steps has changed all
    assert round_matrices(together) and round_matrices(apart) and not round_matrices(apart)
    apart.layers[0].register_forward_hook(lambda *_: None)  # so that it does not go as one call
    batch = ragged(ours.config.vocab, lengths=(17, 1, 64, 30, 3))
    found = hidden(together, batch)
    for tokens, rows, expected, unrounded in zip(batch, found, hidden(apart, batch), hidden(plain, batch), strict=True):
        assert (rows - expected).abs().median() < 1e-5 < 1e-3 < (rows - unrounded).abs().median()
        assert torch.equal(hidden(together, [tokens])[0], rows)


@torch.inference_mode()
def test_token_types_and_logits(pair):
    theirs, ours, _ = pair
    encoder = ours.config.encoder
    batch = ragged(ours.config.vocab, lengths=(20, 9))
    types = (
        [[int(at > len(tokens) // 2) for at in range(len(tokens))] for tokens in batch] if encoder.token_types else None
    )
    flat = None if types is None else torch.tensor([kind for kinds in types for kind in kinds])
    for number, found in enumerate(hidden(ours, batch, token_types=flat)):
        given = {"input_ids": torch.tensor([batch[number]])}
        if types is not None:
            given["token_type_ids"] = torch.tensor([types[number]])
        expected = theirs.base_model(**given).last_hidden_state[0]
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
        if encoder.classifier is None or not encoder.classifier.labels:
            continue
        pooled_D = found[0] if encoder.classifier.pooling == "cls" else found.mean(0)
        logits = ours.classifier(pooled_D[None], ours.ops)
        torch.testing.assert_close(logits, theirs(**given).logits, rtol=0, atol=1e-5)


def test_it_is_written_as_it_was_read(pair, tmp_path):
    theirs, ours, _ = pair
    directory.save(ours, tmp_path / "again")
    again = type(theirs).from_pretrained(tmp_path / "again")
    assert {name: tensor.shape for name, tensor in again.state_dict().items()}.keys() == theirs.state_dict().keys()
    assert all(torch.equal(tensor, theirs.state_dict()[name]) for name, tensor in again.state_dict().items())
    assert directory.load(tmp_path / "again").config == ours.config


def test_heads_that_guess_words_are_left_out(tmp_path):
    config = transformers.BertConfig(**oracle.SMALL, **oracle.BERT)
    theirs = transformers.BertForMaskedLM(config).eval()
    theirs.save_pretrained(tmp_path)
    ours = moesaic.load(tmp_path)
    assert ours.classifier is None
    tokens = ragged(97, lengths=(12,))
    expected = theirs.bert(torch.tensor(tokens)).last_hidden_state[0]
    torch.testing.assert_close(hidden(ours, tokens)[0], expected, rtol=0, atol=1e-5)


def test_names_of_the_first_checkpoints_are_read(tmp_path):
    theirs = oracle.make_encoder("bert")
    theirs.save_pretrained(tmp_path)
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in load_file(tmp_path / "model.safetensors").items()
    }
    old["embeddings.position_ids"] = torch.arange(64)[None]
    save_file(old, tmp_path / "model.safetensors")
    tokens = ragged(97, lengths=(12,))
    with torch.inference_mode():
        expected = theirs(torch.tensor(tokens)).last_hidden_state[0]
    torch.testing.assert_close(hidden(moesaic.load(tmp_path), tokens)[0], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("position_embedding_type", "relative_key", "position_embedding_type"),
        ("is_decoder", True, "is_decoder"),
        ("hidden_act", "mish", "hidden_act"),
    ],
)
def test_what_it_cannot_be_is_refused(key, value, said, tmp_path):
    oracle.make_encoder("bert").save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    with pytest.raises(UserError, match=said):
        moesaic.load(tmp_path)


def test_operations_one_by_one_and_all_layers_at_once_agree(pair):
    ours = pair[1]
    batch = ragged(ours.config.vocab, lengths=(50, 3))
    at_once = hidden(ours, batch)
    handles = [block.register_forward_hook(lambda *_: None) for block in ours.layers]
    one_by_one = hidden(ours, batch)
    for handle in handles:
        handle.remove()
    for a, b in zip(at_once, one_by_one, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


def test_changed_weights_are_seen(tmp_path):
    oracle.make_encoder("bert").save_pretrained(tmp_path)
    ours = moesaic.load(tmp_path)
    tokens = ragged(97, lengths=(12,))
    before = hidden(ours, tokens)[0]
    with torch.no_grad():
        ours.layers[1].ffn.up.weight.mul_(1.5)
    after = hidden(ours, tokens)[0]
    assert not torch.allclose(before, after, atol=1e-3)
    ours.mode = "reference"
    torch.testing.assert_close(hidden(ours, tokens)[0], after, rtol=0, atol=1e-5)


def test_it_learns(pair):
    """Gradients go through the operations one by one."""
    ours = pair[1]
    tokens = ragged(ours.config.vocab, lengths=(9,))[0]
    loss = ours(torch.tensor(tokens), Layout([9])).square().mean()
    (grad,) = torch.autograd.grad(loss, [ours.layers[1].attention.qkv.weight])
    ours.mode = "reference"
    loss = ours(torch.tensor(tokens), Layout([9])).square().mean()
    (expected,) = torch.autograd.grad(loss, [ours.layers[1].attention.qkv.weight])
    ours.mode = "fast"
    torch.testing.assert_close(grad, expected, rtol=1e-4, atol=1e-7)


def test_it_has_no_logits(pair):
    with pytest.raises(UserError, match="is an encoder"):
        pair[1].logits([[1, 2, 3]])
