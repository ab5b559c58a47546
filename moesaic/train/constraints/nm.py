"""N:M sparsity by ADMM while a model is trained (NxMTransformer, Holmes et al. 2021; with bits NxMiFormer, 2022).

    train: {constraint: {name: nm, n: 2, m: 4, rho: 3.0}}
    train: {constraint: {name: nm, n: 2, m: 4, bits: 4}}            weights are rounded as they are trained, too
    train: {constraint: {name: nm, like: out/searched}}             each matrix as `compress --method nm_mixed` chose

Weights W follow the loss, a copy Z keeps to N:M, and a dual U counts how long they have disagreed. Every step pulls W
to Z - U; every `every` steps Z becomes the nearest to W + U that has N of every M, and U grows by W - Z. So what is to
go is led to zero while the rest learns to do without it. For the last `settle` of the steps the choice stands and W is
held to it, so the run ends with weights that are N:M exactly.

The pull is decoupled from the gradient as AdamW's weight decay is, and in units of a matrix's mean weight: with `rho` 1
a weight that is off by that much is pulled as far as Adam would move it. That is the penalty rho / 2 |W - Z + U|^2 in
the metric by which Adam divides gradients, and so the nearest Z is sought in that metric too: what counts is a weight's
size times the fourth root of Adam's second moment. Other optimizers have none, and sizes alone count.
`rho: 0, settle: 1` is pruning by magnitude first, then training what is left. `moesaic compress DIR --method nm
score=magnitude rounding=rtn bits=4` packs what comes out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.errors import UserError
from moesaic.kernels.fake_quantization import rounded_by
from moesaic.kernels.grid import Grid
from moesaic.model.formats.opening import open_checkpoint
from moesaic.model.formats.quantized import OwnLayout, Scheme
from moesaic.model.matrices import matrix_parameters, site_of
from moesaic.model.transformer import Model
from moesaic.train.constraints import Constraint, Unconstrained
from moesaic.train.constraints.quantized import fake_quantize
from moesaic.train.optimizers import Optimizer, Slot


@dataclass(frozen=True)
class NM(Constraint):
    n: int = 2
    m: int = 4
    rho: float = 3.0  # of the pull to Z
    every: int = 5  # steps between two updates of Z and U
    settle: float = 0.5  # share of the steps, the last, in which the choice stands
    bits: int = 0  # 0: float
    group: int = 64
    like: str = ""  # a compressed directory whose matrices say n, m, bits and group

    def __post_init__(self) -> None:
        if not 0 < self.n <= self.m:
            raise ValueError(f"n must be from 1 to m, not {self.n} of {self.m}")
        if self.rho < 0 or self.every < 1 or not 0 <= self.settle <= 1:
            raise ValueError("rho cannot be negative, every is at least 1, and settle from 0 to 1")
        if self.bits == 1:
            raise ValueError("one bit has no zero")
        if self.bits:
            Grid(self.bits, self.group)

    def check(self) -> None:
        if self.like:
            schemes_in(self.like)

    def build(self, model: Model, optimizer: Optimizer, steps: int) -> Unconstrained:
        slots = {slot.name: slot for slot in optimizer.slots}
        forms = {
            f"layers.{name}": Form(self.n, self.m, Grid(self.bits, self.group) if self.bits else None)
            for name in matrix_parameters(model.layers)
        }
        if self.like:
            forms = self._planned(forms)
        if rounded := {site_of(name): form.grid for name, form in forms.items() if form.grid is not None}:
            fake_quantize(model, rounded)
        return Alternating(self, {name: (slots[name], form) for name, form in forms.items() if name in slots}, steps)

    def _planned(self, forms: dict[str, Form]) -> dict[str, Form]:
        schemes = schemes_in(self.like)
        found = {}
        for name in forms:
            scheme = schemes.get(name) or schemes.get(f"{name}.0")  # experts of a layer are alike
            if scheme is None:
                raise UserError(self.like, f"has no {name}", "It must be of the same layers.")
            found[name] = Form(scheme.n or 1, scheme.m or 1, Grid(scheme.bits, scheme.group, not scheme.zeros))
        return found


@dataclass(frozen=True)
class Form:
    """What a parameter is to become."""

    n: int
    m: int
    grid: Grid | None

    def kept(self, weight: Tensor, metric: Tensor | None) -> Tensor:
        """True for the N of every M inputs that count most."""
        return largest(weight.abs() if metric is None else weight.abs() * metric.sqrt(), self.n, self.m)

    def projected(self, weight: Tensor, metric: Tensor | None) -> Tensor:
        """The nearest of this form, or nearly so: rounded after the choice."""
        weight = weight * self.kept(weight, metric)
        return weight if self.grid is None else rounded_by(self.grid, weight)


def metric_of(slot: Slot) -> Tensor | None:
    """How much a change of each weight counts, where the optimizer knows: Adam's size of its gradients."""
    squares = slot.state.get("exp_avg_sq")
    return None if squares is None or not bool(squares.any()) else squares.sqrt() + 1e-12


class Alternating(Unconstrained):
    """Copies Z and duals U while they are sought, then which weights are kept."""

    def __init__(self, options: NM, held: dict[str, tuple[Slot, Form]], steps: int) -> None:
        self.options, self.held = options, held
        self.settles = steps - round(steps * options.settle)  # after this step
        self.kept: dict[str, Tensor] = {}
        self.copies: dict[str, Tensor] = {}
        self.duals: dict[str, Tensor] = {}
        for name, (slot, form) in held.items():
            self.copies[name] = form.projected(slot.weight.detach(), None)
            self.duals[name] = torch.zeros_like(self.copies[name])
        self._gap = next(iter(self.copies.values())).new_zeros(())
        if self.settles == 0:
            self._settle()

    @torch.no_grad()
    def after_step(self, step: int, lr: float) -> bool:
        settles = not self.kept and step >= self.settles
        if not self.kept:
            self._pull(lr)
            if step % self.options.every == 0:
                self._update()
        if settles:
            self._settle()
        for name, kept in self.kept.items():
            slot = self.held[name][0]
            slot.write(slot.weight * kept)
        return settles

    def _pull(self, lr: float) -> None:
        for name, (slot, _) in self.held.items():
            share = (lr * self.options.rho / slot.weight.abs().mean().clamp(min=1e-12)).clamp(max=0.5)
            slot.write(slot.weight.lerp(self.copies[name] - self.duals[name], share))

    def _update(self) -> None:
        apart, size = [], []
        for name, (slot, form) in self.held.items():
            self.copies[name] = form.projected(slot.weight + self.duals[name], metric_of(slot))
            off = slot.weight - self.copies[name]
            self.duals[name] += off
            apart.append(off.square().sum())
            size.append(slot.weight.square().sum())
        self._gap = (torch.stack(apart).sum() / torch.stack(size).sum()).sqrt()

    @torch.no_grad()
    def _settle(self) -> None:
        for name, (slot, form) in self.held.items():
            self.kept[name] = form.kept(slot.weight + self.duals[name], metric_of(slot))
            slot.write(slot.weight * self.kept[name])
        self.copies, self.duals = {}, {}

    def notes(self) -> dict[str, Tensor]:
        """How far the weights are from N:M, as a share of their size; zero once the choice stands."""
        return {"constraint/gap": torch.zeros_like(self._gap) if self.kept else self._gap}

    def state(self) -> dict[str, Tensor]:
        groups = {"copy": self.copies, "dual": self.duals, "kept": {n: k.to(torch.uint8) for n, k in self.kept.items()}}
        tensors = {f"{name}/{kind}": tensor for kind, of in groups.items() for name, tensor in of.items()}
        return {**tensors, "gap": self._gap}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        def of(kind: str) -> dict[str, Tensor]:
            found = {key.removesuffix(f"/{kind}"): t for key, t in tensors.items() if key.endswith(f"/{kind}")}
            return {name: tensor.to(self.held[name][0].weight.device) for name, tensor in found.items()}

        self.copies, self.duals = of("copy"), of("dual")
        self.kept = {name: kept.bool() for name, kept in of("kept").items()}
        self._gap = tensors["gap"].to(self._gap.device)


def schemes_in(directory: str) -> dict[str, Scheme]:
    """How each matrix of a compressed directory is kept."""
    source = open_checkpoint(directory)
    if not isinstance(source, OwnLayout):
        raise UserError(directory, "is not quantized in our own layout", "Name what nm_mixed made.")
    return dict(source.schemes())


def largest(scores: Tensor, n: int, m: int) -> Tensor:
    """True for the N largest of every M neighbours along the last dimension."""
    inputs = scores.shape[-1]
    scores_XM = F.pad(scores, (0, -inputs % m), value=-1).unflatten(-1, (-1, m))
    best_XN = scores_XM.topk(n, dim=-1).indices
    kept_XM = torch.zeros_like(scores_XM, dtype=torch.bool).scatter_(-1, best_XN, True)
    return kept_XM.flatten(-2)[..., :inputs]
