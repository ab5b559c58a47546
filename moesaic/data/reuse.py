"""What repeated data is worth ("Larger Datasets Can Be Repeated More": the effective reuse rate).

    data: {reuse: out/reuse.json}                    # a law of one's own, from moesaic law reuse
    law = load_reuse("out/reuse.json")
    law.effective(8, tokens=10**8), law.useful(10**8)

E(K, N) is how many times larger a data set of N tokens would have to be for one pass over it to do what K passes over
N do. The paper proves, for SGD in linear regression, that E is close to K for few epochs and levels off at a value that
grows with N: like log N where the problem is strongly convex, otherwise by its spectrum. So the law here is

    E(K, N) = 1 + R(N) s((K - 1) / R(N))        R = a + b ln N,  or  e^a N^b        (E = K for K at most 1)

with s(x) = x / (1 + x), as in the paper's problem, where what repetition saves of the first kind of error adds to a
floor that it does not touch (1/E is then a sum); or s(x) = 1 - exp(-x), the curve that Muennighoff et al. (2023) fitted
to language models. `moesaic law reuse` chooses by what fits a user's pilots.

Without a law the borrowed curve holds: theirs, with their constant of 15.4 repetitions put at 10 billion tokens, the
middle of the sizes they trained on. It is a heuristic: good for a warning that a mixture repeats too often, not for a
prediction.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from moesaic.errors import UserError
from moesaic.json_files import read_json

WORTH = 0.5  # an epoch that adds less than half of what fresh data would add is one too many
LEAST = 1e-3  # of R, so that a law may say that repetition adds nothing


@dataclass(frozen=True)
class ReuseLaw:
    a: float
    b: float
    growth: Literal["log", "power"] = "log"
    shape: Literal["sum", "exponential"] = "exponential"

    def __post_init__(self) -> None:
        if self.growth not in ("log", "power") or self.shape not in ("sum", "exponential"):
            raise ValueError("growth is log or power, and shape sum or exponential")
        if not math.isfinite(self.a) or not math.isfinite(self.b):
            raise ValueError("a and b are finite numbers")

    def plateau(self, tokens: float) -> float:
        """R: how many epochs' worth repetition can add at most."""
        size = math.log(max(tokens, 2))
        found = self.a + self.b * size
        return max(math.exp(min(found, 50.0)) if self.growth == "power" else found, LEAST)

    def effective(self, epochs: float, tokens: float) -> float:
        """E(K, N)."""
        if epochs <= 1:
            return epochs
        limit = self.plateau(tokens)
        more = (epochs - 1) / limit
        return 1 + limit * (more / (1 + more) if self.shape == "sum" else -math.expm1(-more))

    def marginal(self, epochs: float, tokens: float) -> float:
        """What the last repetition adds, against as much fresh data: the slope of E in K."""
        more = max(epochs - 1, 0) / self.plateau(tokens)
        return (1 + more) ** -2 if self.shape == "sum" else math.exp(-more)

    def useful(self, tokens: float) -> float:
        """Epochs after which another one is worth less than half of fresh data."""
        return 1 + self.plateau(tokens) * (math.sqrt(1 / WORTH) - 1 if self.shape == "sum" else math.log(1 / WORTH))

    def content(self, **facts: Any) -> dict[str, Any]:
        """What a law's file holds, with whatever else is known of how it came about."""
        return {"format": 1, "reuse": asdict(self), **facts}


BORROWED = ReuseLaw(a=0.0, b=15.4 / math.log(1e10))


def load_reuse(path: str | Path | None) -> ReuseLaw:
    """The law of a file; the borrowed one, if none is named."""
    if path is None:
        return BORROWED
    values = read_json(Path(path), "Write one with moesaic law reuse.").get("reuse")
    names = sorted(ReuseLaw.__dataclass_fields__)
    if not isinstance(values, dict) or sorted(values) != names:
        raise UserError(path, f"not a law of reuse, which has {', '.join(names)}", "Write one with moesaic law reuse.")
    try:
        return ReuseLaw(float(values["a"]), float(values["b"]), values["growth"], values["shape"])
    except (TypeError, ValueError) as error:
        raise UserError(path, str(error)) from None


def subset(documents: np.ndarray, lengths: np.ndarray, tokens: int, seed: int) -> np.ndarray:
    """So many tokens of these documents, chosen at random; of one seed, fewer tokens are among the more."""
    order = np.random.default_rng([seed, 0x5EED]).permutation(len(documents))
    total = np.cumsum(lengths[order])
    if not len(total) or total[-1] < tokens:
        have = int(total[-1]) if len(total) else 0
        raise UserError("data.unique_tokens", f"{tokens:,}, and the data has {have:,}", "Lower it, or leave it out.")
    return np.sort(documents[order[: int(np.searchsorted(total, tokens)) + 1]])
