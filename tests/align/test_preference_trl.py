"""Losses of pairs beside those of trl's trainers, on the same weights and tokens: values and gradients."""

from __future__ import annotations

import pytest
import torch

import moesaic
from moesaic.align.preference.batch import pack_pairs
from moesaic.align.preference.pairs import read_source
from moesaic.align.preference.reference import answer_logprobs
from moesaic.model.context import Routing
from moesaic.train.objectives.preference import Preference
from tests.align.trl_rows import padded
from tests.serve.made import talking_model

FAMILY = "builtin:chain_sum:min_terms=2,max_terms=2,min_digits=1,max_digits=3"


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """The model that learns, and the one it is compared with."""
    return [talking_model(tmp_path_factory.mktemp(f"model{seed}"), seed) for seed in (0, 1)]


@pytest.fixture(scope="module")
def trainer(places, tmp_path_factory):
    """trl's, with its own losses in place of any of ours; the data set only satisfies its constructor."""
    import transformers
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    data = Dataset.from_list([{"prompt": "yes", "chosen": "no", "rejected": "name"}] * 2)
    tokenizer = transformers.AutoTokenizer.from_pretrained(places[0])
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model, reference = (transformers.AutoModelForCausalLM.from_pretrained(p, dtype=torch.float32) for p in places)
    folder = str(tmp_path_factory.mktemp("trl"))
    args = DPOConfig(folder, report_to="none", use_cpu=True, gradient_checkpointing=False, bf16=False)
    made = DPOTrainer(model, reference, args, train_dataset=data, processing_class=tokenizer)
    made.aux_loss_enabled = False  # it would add the routers' balance loss, which is not of the pairs
    return made


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (["sigmoid"], Preference(beta=0.2)),
        (["ipo"], Preference(kind="ipo", beta=0.2)),
        (["hinge"], Preference(kind="hinge", beta=0.2)),
        (["sigmoid_norm"], Preference(beta=0.2, normalised=True)),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_losses_and_gradients_are_those_of_trl(trainer, places, theirs, ours):
    model, reference = (moesaic.load(place) for place in places)
    pairs, _ = read_source(model.tokenizer, FAMILY, "train", 5, 500)
    trainer.loss_types, trainer.loss_weights, trainer.beta = theirs, [1.0], ours.beta
    trainer.model.zero_grad()
    expected = trainer._compute_loss(trainer.model, padded(pairs), return_outputs=False)
    expected.backward()

    known = answer_logprobs(reference, [side for pair in pairs for side in pair.sides]).reshape(-1, 2)
    found = ours(model, pack_pairs(pairs, {}, known), Routing())
    found.total.backward()
    torch.testing.assert_close(found.total.detach(), expected.detach(), rtol=1e-4, atol=1e-5)
    embed = trainer.model.get_input_embeddings().weight.grad
    head = trainer.model.get_output_embeddings().weight.grad
    torch.testing.assert_close(model.embed.grad, embed, rtol=2e-3, atol=1e-4 * float(embed.abs().max()))
    torch.testing.assert_close(model.output.grad, head, rtol=2e-3, atol=1e-4 * float(head.abs().max()))
