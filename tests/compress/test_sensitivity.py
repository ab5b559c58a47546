"""Predicted sensitivity of the loss, beside what happens: matrices are disturbed, and the divergence is measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from moesaic.compress import calibration
from moesaic.compress.job import Job
from moesaic.compress.layer_store import LayerStore
from moesaic.compress.layerwise import end_matrix, ends
from moesaic.compress.methods.gptq import GPTQ
from moesaic.compress.methods.mixed import Mixed
from moesaic.compress.sensitivity import Sensitivities
from moesaic.data.plain_text import builtin_text
from moesaic.model.directory import Parts, load
from moesaic.model.formats.opening import open_checkpoint
from moesaic.model.layout import Layout
from moesaic.model.tokenizer import Tokenizer
from moesaic.model.transformer import Model
from tests.compress.made import make
from tests.model import oracle

DRAWS = 6


@pytest.fixture(scope="module", params=["llama", "qwen3_moe"])
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Job:
    # Every token goes to all experts: the prediction does not follow tokens that change their way.
    more = {"tie_word_embeddings": True} if request.param == "llama" else {"num_experts_per_tok": 4}
    path = make(tmp_path_factory.mktemp("model") / "model", request.param, **more)
    source = open_checkpoint(path)
    tokenizer = Tokenizer.from_files(source.files, source.place)
    assert tokenizer is not None
    pieces = calibration.sequences(builtin_text(), tokenizer, 16, 128, "test")
    return Job(Parts(source), path, LayerStore(path.parent / "out", {}), pieces)


@torch.no_grad()
def distributions(model: Model, job: Job) -> Tensor:
    found = [model.logits_at(model(torch.tensor(piece), Layout([len(piece)]))) for piece in job.sequences]
    return torch.cat(found).log_softmax(-1)


@pytest.fixture(scope="module")
def sensitivities(job: Job) -> Sensitivities:
    return Sensitivities(job)


def divergence(job: Job, name: str, expert: int | None, change: Tensor) -> float:
    model = load(job.source, dtype="float32")
    before = distributions(model, job)
    parameter = dict(model.named_parameters())[name]
    (parameter.data if expert is None else parameter.data[expert]).add_(change)
    after = distributions(model, job)
    return float((before.exp() * (before - after)).sum(-1).mean())


def test_disturbances_cost_what_was_predicted(job: Job, sensitivities: Sensitivities) -> None:
    generator = torch.Generator().manual_seed(3)
    checked = 0
    for name, weight_OI, parts in sensitivities.matrices():
        stem, _, leaf = name.rpartition(".")
        expert = int(leaf) if leaf.isdigit() else None
        if not name.startswith("layers.0") or expert not in (None, 1):
            continue
        real = predicted = 0.0
        for _ in range(DRAWS):
            change_OI = torch.randn(weight_OI.shape, generator=generator) * weight_OI.std() * 0.02
            real += divergence(job, stem if expert is not None else name, expert, change_OI)
            predicted += sum(part.cost(change_OI[part.rows]) for part in parts)
        # Tokens and outputs are weighed apart, which is an approximation; matrices differ by far more than this.
        assert real / 2 < predicted < real * 2, name
        checked += 1
    assert checked == 4


def test_the_ends_cost_what_was_predicted(job: Job, sensitivities: Sensitivities) -> None:
    generator = torch.Generator().manual_seed(4)
    for name in ["embed"] if job.config.tied else ["embed", "head"]:
        whole_VD = job.parts.tensor(name).float()
        change_VD = torch.randn(whole_VD.shape, generator=generator) * whole_VD.std() * 0.02
        real = divergence(job, name, None, change_VD)
        predicted = sum(part.cost(change_VD) for part in sensitivities.end(name))
        predicted += sensitivities.looked_up(change_VD) if name == "embed" else 0.0
        assert real / 2 < predicted < real * 2, name


def test_bits_go_where_they_are_felt_and_no_more_than_there_are(job: Job) -> None:
    plan = {name: way.weights for name, way in Mixed(bits=4.0, group=32)._plan(job).items()}
    sizes = {name: weight_OI.numel() for name, weight_OI, _ in Sensitivities(job).matrices()}
    sizes |= {name: job.parts.tensor(name).numel() for name in (["embed"] if job.config.tied else ["embed", "head"])}
    assert plan.keys() == sizes.keys() and len(set(plan.values())) > 1
    budget = sum(size * (8.0 if name in ("embed", "head") else 4.0) for name, size in sizes.items())
    assert 0.97 * budget < sum(bits * sizes[name] for name, bits in plan.items()) <= budget


def test_the_output_matrix_is_rounded_for_what_flows_into_it(job: Job) -> None:
    job = replace(job, ends_bits=4)
    generator = torch.Generator().manual_seed(5)
    mixing_DD = torch.randn(64, 64, generator=generator) * torch.logspace(-1, 1, 64)
    last_TD = torch.randn(2000, 64, generator=generator) @ mixing_DD
    *others, name = ends(job.config)
    wanted_TV = last_TD @ job.parts.tensor(name).float().T
    near, fitted = (last_TD @ end_matrix(job, GPTQ(), name, statistics).dense().T for statistics in (None, last_TD))
    assert (fitted - wanted_TV).norm() < 0.7 * (near - wanted_TV).norm()
    for other in others:  # is only looked up
        matrices = [end_matrix(job, GPTQ(), other, statistics).dense() for statistics in (None, last_TD)]
        assert torch.equal(matrices[0], matrices[1])


def test_matrices_of_latent_attention_are_felt_beside_an_indexer(tmp_path: Path) -> None:
    oracle.save("glm_moe_dsa", tmp_path / "model")
    pieces = [[n * 7 % 50 + 1 for n in range(64)]]
    job = Job(Parts(open_checkpoint(tmp_path / "model")), tmp_path / "model", LayerStore(tmp_path / "out", {}), pieces)
    parts = {name: parts for name, _, parts in Sensitivities(job).matrices()}
    assert all(parts[f"layers.{n}.attention.out.weight"] for n in range(len(job.config.layers)))
