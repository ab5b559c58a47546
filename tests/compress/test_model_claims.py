"""What methods that look at a whole layer or model are for: on tiny models each beats itself without its idea."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from moesaic.compress import calibration
from moesaic.compress.distill import Distillation, reduced, train_student
from moesaic.compress.expert_reduction import Use
from moesaic.compress.job import Job
from moesaic.compress.layer_store import LayerStore
from moesaic.compress.methods import Compressor
from moesaic.compress.methods.merge_experts import MergeExperts
from moesaic.compress.methods.mixed import Mixed
from moesaic.compress.methods.prune_experts import PruneExperts
from moesaic.compress.methods.students import Students
from moesaic.compress.methods.xtc import XTC
from moesaic.compress.methods.zeroquant import ZeroQuant
from moesaic.data.plain_text import builtin_text
from moesaic.kernels.fake_quantization import rounded_by
from moesaic.kernels.grid import Grid
from moesaic.model.directory import Parts, load
from moesaic.model.experts import MixtureFeedForward
from moesaic.model.formats.opening import open_checkpoint
from moesaic.model.layout import Layout
from moesaic.model.tokenizer import Tokenizer
from moesaic.model.transformer import Model
from tests.compress.made import make

Opened = Callable[..., Job]


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Opened:
    """A job for a tiny model, some of whose parameters are scaled first."""

    def open_job(kind: str, scales: dict[str, Any] | None = None, samples: int = 4, **more: Any) -> Job:
        path = make(tmp_path_factory.mktemp("model") / "model", kind, **more)
        if scales:
            import transformers

            model = transformers.AutoModelForCausalLM.from_pretrained(path)
            for name, parameter in model.named_parameters():
                for part, scale in scales.items():
                    if part in name:
                        parameter.data.mul_(scale)
            model.save_pretrained(path)
        source = open_checkpoint(path)
        tokenizer = Tokenizer.from_files(source.files, source.place)
        assert tokenizer is not None
        pieces = calibration.sequences(builtin_text(), tokenizer, samples, 64, "test")
        return Job(Parts(source), path, LayerStore(path.parent / "out", {}), pieces, min_expert_tokens=16)

    return open_job


def layer_error(job: Job, method: Compressor, folder: Path) -> float:
    """Of the first layer, relative to its output."""
    job = replace(job, store=LayerStore(folder, {}))
    method.run(job)
    return float(job.store.about("layer-00000")["facts"]["layer_error"])


@torch.no_grad()
def distributions(job: Job, weights: dict[str, Tensor], config: Any = None) -> Tensor:
    with torch.device("meta"):
        model = Model(config or job.config)
    found = []
    for piece in job.sequences:
        hidden_TD = functional_call(model, weights, (torch.tensor(piece), Layout([len(piece)])))
        found.append(F.linear(hidden_TD, weights.get("head", weights["embed"])))
    return torch.cat(found).log_softmax(-1)


def apart(one_TV: Tensor, other_TV: Tensor) -> float:
    return float((one_TV.exp() * (one_TV - other_TV)).sum(-1).mean())


def plain_weights(job: Job) -> dict[str, Tensor]:
    return {name: tensor.detach() for name, tensor in load(job.source, dtype="float32").named_parameters()}


def test_zeroquant_distils_each_layer_from_its_float_self(opened: Opened, tmp_path: Path) -> None:
    job = opened("llama", num_hidden_layers=1)
    without = layer_error(job, ZeroQuant(bits=3, group=0, steps=0), tmp_path / "0")
    distilled = layer_error(job, ZeroQuant(bits=3, group=0, steps=16), tmp_path / "16")
    assert distilled < 0.9 * without


def test_mixed_bits_go_where_the_loss_is_sensitive(opened: Opened) -> None:
    """The second layer hardly adds to the stream; bits that are dealt at random cost more than those of the plan."""
    job = opened("llama", {"layers.1.self_attn.o_proj": 0.02, "layers.1.mlp.down_proj": 0.02})
    plan = {name: way.weights for name, way in Mixed(bits=4.0, group=32, rounding="rtn")._plan(job).items()}
    layers = [[bits for name, bits in plan.items() if name.startswith(f"layers.{number}")] for number in (0, 1)]
    assert min(layers[0]) >= max(layers[1]) + 1

    weights = plain_weights(job)
    before_TV = distributions(job, weights)

    def cost(bits_of: dict[str, int]) -> float:
        rounded = {
            name: Grid(bits_of[name], 32, symmetric=False).rounded(tensor) if name in bits_of else tensor
            for name, tensor in weights.items()
        }
        return apart(before_TV, distributions(job, rounded))

    plan = {name: bits for name, bits in plan.items() if name.startswith("layers")}
    names = list(plan)
    dealt = []
    for seed in range(4):
        order = torch.randperm(len(names), generator=torch.Generator().manual_seed(seed)).tolist()
        dealt.append(cost({name: plan[names[other]] for name, other in zip(names, order, strict=True)}))
    by_chance = torch.tensor(dealt)
    assert cost(plan) < min(0.5 * by_chance.mean(), by_chance.mean() - 2 * by_chance.std() / 2), (cost(plan), dealt)


def student_of(job: Job, folder: Path, method: Compressor) -> tuple[Any, dict[str, Tensor]]:
    job = replace(job, store=LayerStore(folder, {}), ends_bits=0)
    config = method.run(job)
    part = job.store.get("student")
    weights = dict(part.plain)
    experts: dict[str, list[Tensor]] = {}
    for name, matrix in part.matrices.items():
        stem, _, leaf = name.rpartition(".")
        if leaf.isdigit():
            experts.setdefault(stem, []).append(matrix.dense())
        else:
            weights[name] = matrix.dense()
    return config, weights | {name: torch.stack(parts) for name, parts in experts.items()}


def test_students_follow_their_teacher_and_then_the_text(opened: Opened, tmp_path: Path) -> None:
    job = opened("llama")
    teacher_TV = distributions(job, plain_weights(job))
    text_T = torch.tensor([token for piece in job.sequences for token in (*piece[1:], -100)])

    def student(steps: int, teaching: float) -> tuple[float, float]:
        method = Students(depth=0.5, steps=steps, rate=3e-3, teaching=teaching)
        config, weights = student_of(job, tmp_path / f"{steps}-{teaching}", method)
        said_TV = distributions(job, weights, config)
        return apart(teacher_TV, said_TV), float(F.nll_loss(said_TV, text_T, ignore_index=-100))

    untaught, followed, staged = student(0, 1.0), student(24, 1.0), student(24, 0.5)
    assert followed[0] < 0.7 * untaught[0]  # nearer to the teacher
    assert staged[1] < followed[1] - 0.1  # better on the text


def test_xtc_learns_with_the_bits_it_will_have(opened: Opened, tmp_path: Path) -> None:
    """Two bits that were there in every step of distillation are nearer to the teacher than two bits afterwards."""
    job = opened("llama")
    teacher_TV = distributions(job, plain_weights(job))
    config, weights = student_of(job, tmp_path / "xtc", XTC(bits=2, group=32, depth=0.5, steps=24, rate=3e-3))
    with_bits = apart(teacher_TV, distributions(job, weights, config))

    alone = replace(job, store=LayerStore(tmp_path / "plain", {}))
    learned = train_student(alone, config, reduced(alone, [0], config), Distillation(24, 3e-3))
    grid = Grid(2, 32, symmetric=False)
    afterwards = {
        name: rounded_by(grid, tensor) if name.startswith("layers") and tensor.dim() > 1 else tensor
        for name, tensor in learned.items()
    }
    assert with_bits < 0.8 * apart(teacher_TV, distributions(job, afterwards, config))


def test_experts_that_give_little_are_left_out_however_often_they_are_chosen(opened: Opened, tmp_path: Path) -> None:
    """Of the two experts that are chosen most one writes hardly anything: the layer changes less without it."""
    found: list[tuple[Use, list[int]]] = []

    class Looking(PruneExperts):
        by_choices = False

        def reduce(self, ffn: MixtureFeedForward, use: Use) -> tuple[Tensor, Tensor, Tensor]:
            gate_up_KGD, down_KDF, stay = super().reduce(
                ffn, Use(use.chosen_E, use.chosen_E) if self.by_choices else use
            )
            found.append((use, stay.tolist()))
            return gate_up_KGD, down_KDF, stay

    class Counting(Looking):
        by_choices = True

    scales_E = torch.tensor([0.1, 1.0, 0.1, 1.0])
    job = opened("qwen3_moe", {"experts.down_proj": scales_E[:, None, None]}, num_hidden_layers=1)
    by_gift = layer_error(job, Looking(keep=2), tmp_path / "gift")
    by_choices = layer_error(job, Counting(keep=2), tmp_path / "choices")
    assert found[0][1] == [1, 3] and found[1][1] == [2, 3]
    assert by_gift < 0.95 * by_choices


def test_merged_experts_are_the_mean_of_those_that_are_alike() -> None:
    """Two networks, three noisy copies of each. What is merged is nearer to the network than the copy that stays alone,
    and the copies that are chosen more often count for more."""
    draw = torch.Generator().manual_seed(0)
    gate_up_NGD, down_NDF = torch.randn(2, 24, 16, generator=draw), torch.randn(2, 16, 12, generator=draw)
    noise = 0.3
    home = [0, 1, 1, 0, 1, 0]
    gate_up_EGD = gate_up_NGD[home] + noise * torch.randn(6, 24, 16, generator=draw)
    down_EDF = down_NDF[home] + noise * torch.randn(6, 16, 12, generator=draw)
    router = type("Router", (), {"shape": type("Shape", (), {"groups": 1})})
    ffn = cast(Any, type("Mixture", (), {"gate_up_EGD": gate_up_EGD, "down_EDF": down_EDF, "router": router}))
    even = Use(torch.tensor([9.0, 9, 1, 1, 1, 1]), torch.ones(6))
    merged_KGD, merged_KDF, stay = MergeExperts(keep=2).reduce(ffn, even)
    assert stay.tolist() == [0, 1]
    for merged, stays, wanted in ((merged_KGD, gate_up_EGD[:2], gate_up_NGD), (merged_KDF, down_EDF[:2], down_NDF)):
        assert (merged - wanted).norm() < 0.7 * (stays - wanted).norm()
    busy = Use(even.given_E, torch.tensor([1.0, 1, 1, 98, 1, 1]))
    merged_KGD, _, _ = MergeExperts(keep=2).reduce(ffn, busy)
    assert (merged_KGD[0] - gate_up_EGD[3]).norm() < 0.1 * (gate_up_EGD[0] - gate_up_EGD[3]).norm()
