"""Make good answers likelier: clipped policy gradient over recorded log-probabilities (PPO, GRPO, DAPO).

The batch brings, for every token of an answer, what the engine recorded (`old`), how much better than expected the
answer was (`advantage`), how much the token counts (`weight`), and whether it was sampled from the present weights
(`fresh`). Those fresh tokens measure how far trainer and engine are apart: nothing, in exact arithmetic. Where a
correction weighs that difference, PPO's ratio is of the trainer alone: against what it held before the first update
(`began`), which in the first update is what it holds now.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from moesaic.data.packing import Batch
from moesaic.kernels.cross_entropy import IGNORED
from moesaic.model.context import Routing
from moesaic.model.transformer import LayerRunner, Model, run_plainly
from moesaic.train.objectives import Loss, Objective, layout_of


@dataclass(frozen=True)
class Policy(Objective):
    of_text: ClassVar[bool] = False

    clip_low: float = 0.2
    clip_high: float = 0.2  # DAPO's clip-higher gives rare tokens more room upwards, such as 0.28
    kl: float = 0.0  # weight of the distance from the reference
    kl_kind: Literal["k1", "k2", "k3"] = "k3"
    temperature: float = 1.0
    replay: bool = False  # follow the routes the engine took
    correction: Literal["none", "token", "sequence"] = "none"  # for engines that compute otherwise than the trainer
    correction_cap: float = 2.0
    correction_kind: Literal["truncate", "mask"] = "truncate"
    imitate: float = 0.0  # weight of the likelihood of right answers (VAPO, Seed1.5-Thinking), such as 0.1
    right: float = 1.0  # the reward from which on an answer is right

    def __post_init__(self) -> None:
        if not 0 <= self.clip_low < 1 or min(self.clip_high, self.kl, self.imitate) < 0 or self.correction_cap <= 1:
            raise ValueError("clips, kl and imitate are not negative, clip_low is below 1, and correction_cap above 1")

    def __call__(self, model: Model, batch: Batch, routing: Routing, runner: LayerRunner = run_plainly) -> Loss:
        columns = batch.columns
        recorded = {int(name[7:]): column for name, column in columns.items() if name.startswith("routes/")}
        if self.replay:
            assert recorded, "the rollouts recorded no routes"
            routing.choices, routing.replay = recorded, True
        hidden_TD = model(batch.tokens_T, layout_of(batch), routing, runner)
        targets_T, remember_T = batch.targets_T, columns.get("remember")  # conversations beside the answers
        if remember_T is not None:
            targets_T = targets_T.masked_fill(remember_T > 0, IGNORED)
        new_T, entropy_T = model.token_logprobs(
            hidden_TD,
            targets_T,
            temperature=self.temperature,
            kept_TK=columns.get("kept"),
        )
        spoken_T = (targets_T != IGNORED) & (columns["weight"] > 0)
        weight_T = columns["weight"] * spoken_T
        before_T = columns["old"] if self.correction == "none" else columns.get("began", new_T.detach())
        policy_T = clipped(new_T, before_T, columns["advantage"], self.clip_low, self.clip_high)
        policy_T = policy_T * self.corrected(before_T, columns, batch.lengths)
        total = (policy_T * weight_T).sum()
        parts = {"policy": total.detach()}
        if self.kl:
            apart = (distance(new_T, columns["reference"], self.kl_kind) * weight_T).sum()
            parts["kl"] = apart.detach()
            total = total + self.kl * apart
        if self.imitate:  # where all answers of a group are right, none has an advantage, and this alone teaches
            unlikely = -(new_T * columns["imitate"] * spoken_T).sum()
            parts["imitate"] = unlikely.detach()
            total = total + self.imitate * unlikely
        if remember_T is not None:  # nobody drew these: their loss is plain
            said_T = batch.targets_T.masked_fill(remember_T == 0, IGNORED)
            logprobs_T, _ = model.token_logprobs(hidden_TD, said_T)
            told = -(logprobs_T * remember_T).sum()
            parts["remember"] = told.detach()
            total = total + told
        with torch.no_grad():
            notes = self._notes(new_T, before_T, entropy_T, spoken_T, columns, batch.count)
            notes |= {} if self.replay else routers_differ(recorded, routing.choices, columns)
        return Loss(total, parts, routing, notes)

    def corrected(self, before_T: Tensor, columns: dict[str, Tensor], lengths: list[int]) -> Tensor:
        """How likely what was sampled was here over how likely it was there, held in bounds."""
        if self.correction == "none":
            return torch.ones_like(before_T)
        ratio_T = (before_T - columns["old"]) * (columns["weight"] > 0)
        if self.correction == "sequence":
            ratio_T = torch.cat([part.sum().expand(len(part)) for part in ratio_T.split(lengths)])
        ratio_T = ratio_T.exp()
        if self.correction_kind == "truncate":
            return ratio_T.clamp(max=self.correction_cap)
        return ratio_T * ((ratio_T <= self.correction_cap) & (ratio_T >= 1 / self.correction_cap))

    def _notes(
        self,
        new_T: Tensor,
        before_T: Tensor,
        entropy_T: Tensor,
        spoken_T: Tensor,
        columns: dict[str, Tensor],
        count: int,
    ) -> dict[str, Tensor]:
        """Of the whole batch once the parts are added up; the mismatch over fresh tokens only."""
        apart_T = new_T - columns["old"]
        fresh_T = columns["fresh"] * spoken_T
        ratio_T = (new_T - before_T).exp()
        outside_T = (ratio_T > 1 + self.clip_high) | (ratio_T < 1 - self.clip_low)
        return {
            "mismatch_max": (apart_T.abs() * fresh_T).max(),
            "mismatch_mean": (apart_T.abs() * fresh_T).sum() / count,
            "mismatch_kl": ((apart_T.exp() - 1 - apart_T) * fresh_T).sum() / count,
            "entropy": (entropy_T * spoken_T).sum() / count,
            "clipped": (outside_T & spoken_T).sum() / count,
        }


def clipped(new_T: Tensor, old_T: Tensor, advantage_T: Tensor, low: float, high: float) -> Tensor:
    """PPO's pessimistic objective, as a loss per token."""
    ratio_T = (new_T - old_T).exp()
    return -torch.minimum(ratio_T * advantage_T, ratio_T.clamp(1 - low, 1 + high) * advantage_T)


def distance(new_T: Tensor, reference_T: Tensor, kind: str) -> Tensor:
    """Schulman's estimators of KL(new, reference) from one sample: k1 unbiased, k2 small, k3 unbiased and positive."""
    apart_T = new_T - reference_T
    if kind == "k1":
        return apart_T
    if kind == "k2":
        return apart_T.square() / 2
    return torch.expm1(-apart_T) + apart_T


def routers_differ(
    recorded: dict[int, Tensor], taken: dict[int, Tensor], columns: dict[str, Tensor]
) -> dict[str, Tensor]:
    """The share of fresh tokens' routers that chose other experts here than in the engine."""
    layers = [layer for layer in recorded if layer in taken]
    if not layers:
        return {}
    fresh_T = columns["routed"].bool()
    differ = [(recorded[n].sort(-1).values != taken[n].sort(-1).values).any(-1) & fresh_T for n in layers]
    # A share of this part; parts are added up, so each counts by its tokens.
    return {"routers_differ": torch.stack(differ).float().sum() / (len(layers) * columns["routed_count"][0])}
