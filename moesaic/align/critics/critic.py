"""A critic for PPO: a second model with a value head, which estimates the return at every token.

critic: {lr: 0.0005, pretrain: 20, adaptive: 0.05, kl: 0.02}

VAPO's pieces (Seed): the critic is pretrained first, while the policy is frozen; its own targets are not shortened
(`value_decay` 1) while the policy's advantages are (`decay`), for long completions less (`adaptive`). ChatGLM-RLHF's:
the reward may be taken against the prompt's other completions (`baseline`), without the prompts' own variance.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from moesaic.align.advantages import generalised_advantages
from moesaic.data.packing import Batch
from moesaic.errors import UserError
from moesaic.kernels.cross_entropy import IGNORED
from moesaic.model import directory
from moesaic.model.transformer import Model
from moesaic.model.value_head import give_head, require_head
from moesaic.train.objectives import layout_of
from moesaic.train.optimizers.adamw import AdamW

TINY = 1e-8


@dataclass(frozen=True)
class CriticOptions:
    model: str | None = None  # a reward model's directory to begin with; by default the policy, and a fresh head
    lr: float = 1e-3
    updates: int = 1  # steps of the critic for each of the policy
    pretrain: int = 0  # first steps of the stage in which only the critic learns
    clip: float = 0.2  # how far a value may go from what it was before; 0: any distance
    discount: float = 1.0
    decay: float = 0.95  # GAE's lambda of the policy's advantages
    adaptive: float = 0.0  # above 0, lambda is 1 - 1 / (adaptive * length), for each completion (VAPO)
    value_decay: float = 1.0  # lambda of what the critic learns
    kl: float = 0.0  # weight of the distance from the reference, taken off every token's reward
    baseline: bool = False  # the reward is the stage's advantage: the prompt's mean is taken off
    whiten: bool = True  # advantages of a batch to mean 0 and spread 1

    def __post_init__(self) -> None:
        if not self.lr > 0 or self.updates < 1 or self.pretrain < 0 or min(self.clip, self.kl, self.adaptive) < 0:
            raise ValueError("critic: lr is above 0, updates at least 1, pretrain, clip, kl and adaptive not negative")
        if not all(0 <= value <= 1 for value in (self.discount, self.decay, self.value_decay)):
            raise ValueError("critic: discount, decay and value_decay are from 0 to 1")

    def decay_of(self, tokens: int) -> float:
        """Long completions look further ahead: with a fixed lambda the end's reward would never reach their start."""
        return min(max(1 - 1 / (self.adaptive * tokens), 0.0), 1.0) if self.adaptive else self.decay


class Critic:
    """Judges batches of a policy, and learns from them. All that the next step depends on is in `state()`."""

    def __init__(self, policy: Model, options: CriticOptions) -> None:
        self.options = options
        if options.model is None:
            # Beside an adapter: one of its own, over the same weights.
            self.model = copy.deepcopy(policy) if policy.lora is None else policy.beside(copy.deepcopy(policy.lora))
        else:
            require_head(Path(options.model))
            self.model = directory.load(options.model, dtype=policy.dtype, device=policy.device)
            if self.model.config.vocab != policy.config.vocab:
                problem = f"has a vocabulary of {self.model.config.vocab}, the policy one of {policy.config.vocab}"
                raise UserError(options.model, problem, "A critic must read the policy's tokens.")
        self.model.mode = "fast"
        give_head(self.model)
        self.optimizer = AdamW(lr=options.lr, weight_decay=0.0).build(self.model.named_parameters())

    def values(self, batch: Batch) -> Tensor:
        """Before every token of a completion, at the row that predicts it: what the critic expects from there on."""
        assert self.model.value is not None
        batch = batch.to(self.model.device)
        values_T: Tensor = self.model.value(self.model(batch.tokens_T, layout_of(batch)))
        return values_T

    @torch.no_grad()
    def assess(self, batch: Batch) -> dict[str, float]:
        """Puts advantages of its own in the place of the batch's, and beside them what each value should have been."""
        options, columns = self.options, batch.columns
        values_T = self.values(batch).cpu()
        ends_T = columns["advantage" if options.baseline else "reward"]
        columns["value"], columns["return"] = values_T, values_T.clone()
        advantage_T = torch.zeros_like(values_T)
        start = 0
        for length in batch.lengths:
            # Tokens that a tool returned are nobody's doing: the completion's own follow each other.
            rows_N = start + (batch.targets_T[start : start + length] != IGNORED).nonzero().squeeze(1)
            start += length
            if not len(rows_N):
                continue
            rewards_N = torch.zeros(len(rows_N))
            if options.kl:
                rewards_N -= options.kl * (columns["old"] - columns["reference"])[rows_N]
            rewards_N[-1] += ends_T[rows_N[-1]]
            ours_N = values_T[rows_N]
            decay = options.decay_of(len(rows_N))
            advantage_T[rows_N] = generalised_advantages(rewards_N, ours_N, options.discount, decay)[0]
            columns["return"][rows_N] = generalised_advantages(
                rewards_N, ours_N, options.discount, options.value_decay
            )[1]
        spoken_T = batch.targets_T != IGNORED
        returns_N, values_N, raw_N = columns["return"][spoken_T], values_T[spoken_T], advantage_T[spoken_T]
        if options.whiten and len(raw_N) > 1:
            advantage_T[spoken_T] = (raw_N - raw_N.mean()) / (raw_N.std(correction=0) + TINY)
        columns["advantage"] = advantage_T
        spread = float(returns_N.var(correction=0))
        return {
            "value": float(values_N.mean()),
            "return": float(returns_N.mean()),
            # explained variance: 1 if the critic predicted every return, 0 if no better than their mean
            "value_explained": 1 - float((returns_N - values_N).var(correction=0)) / spread if spread > TINY else 0.0,
        }

    def learn(self, batch: Batch) -> dict[str, float]:
        """Towards the returns, not further from the values of before than `clip` (PPO)."""
        old_T, return_T = (batch.columns[name].to(self.model.device) for name in ("value", "return"))
        spoken_T = (batch.targets_T != IGNORED).to(self.model.device)
        first = 0.0
        for update in range(self.options.updates):
            self.optimizer.zero_grad()
            with torch.enable_grad():
                loss = value_loss(self.values(batch), old_T, return_T, self.options.clip)[spoken_T].mean()
                loss.backward()
            self.optimizer.step(1.0, clip=1.0)
            first = float(loss.detach()) if not update else first
        self.optimizer.zero_grad()
        return {"value_loss": first}

    def state(self) -> dict[str, dict[str, Tensor]]:
        weights = self.model.state_dict()
        if self.model.lora is not None:  # the others are frozen, and the policy's
            weights = {name: weights[name] for name, p in self.model.named_parameters() if p.requires_grad}
        return {"critic": weights, "critic_optimizer": self.optimizer.state_dict()}

    def restore(self, weights: dict[str, Tensor], optimizer: dict[str, Tensor]) -> None:
        self.model.load_state_dict(weights, strict=self.model.lora is None)
        self.optimizer.load_state_dict(optimizer)


def value_loss(value_T: Tensor, old_T: Tensor, return_T: Tensor, clip: float) -> Tensor:
    """Half the squared error, and of the value and the clipped value the worse one."""
    plain_T = (value_T - return_T).square()
    if not clip:
        return plain_T / 2
    near_T = old_T + (value_T - old_T).clamp(-clip, clip)
    return torch.maximum(plain_T, (near_T - return_T).square()) / 2
