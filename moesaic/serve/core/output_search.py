"""FGD (fast graph decoder, Zhang et al. 2018): the likeliest token by a search of the output matrix, without a matmul.

    moesaic serve DIR --output-search scan            # all rows as codes of 8 bits, the best few in full
    moesaic serve DIR --output-search graph           # a walk on a navigable graph over the rows, as in the paper
    moesaic serve DIR --drafter model path=SMALLER_DIR output=scan      # only a draft: the model verifies it exactly

A search may miss the likeliest token. In a draft model that costs an accepted token and no output changes. In the model
itself every `check`-th searched token is computed in full, which gives the token where they differ and the miss rate
(`output_search_checked`, `output_search_missed`). Only greedy requests without log-probabilities are searched for;
the log-probability that is recorded of a token is then that among the candidates.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from moesaic.errors import UserError
from moesaic.model.transformer import Model
from moesaic.nearest.inner_product import InnerProducts
from moesaic.nearest.scan import Scan
from moesaic.serve.core.request import Request, TokenLogprob
from moesaic.serve.core.sampler import Sampler

Kind = Literal["graph", "scan"]
CANDIDATES = 10  # whose products are exact


@dataclass(frozen=True)
class SearchOptions:
    kind: Kind
    pool: int = 256  # rows that are ranked in full (scan), or that a walk keeps (graph)
    check: int = 64  # every so-many-th searched token is computed in full; 0: none


class OutputSearch:
    """The output matrix of a model, indexed."""

    def __init__(self, model: Model, options: SearchOptions, where: str) -> None:
        if model.device.type != "cpu":
            raise UserError(where, f"searches on a CPU, and the model is on {model.device.type}", "Leave it out.")
        if not isinstance(model.output, Tensor) or not model.output.is_floating_point():
            raise UserError(where, "the output matrix is quantised", "Leave it out, or keep the matrix in full.")
        self.model, self.options = model, options
        self.searched = self.checked = self.missed = self.turn = 0
        self.indexed_again()

    def indexed_again(self) -> OutputSearch:
        """With the weights of now."""
        rows_VD = np.ascontiguousarray(self.model.output.detach().float().numpy())
        self.index = InnerProducts(rows_VD) if self.options.kind == "graph" else Scan(rows_VD, bits=8)
        return self

    def sampler(self, hidden_RD: Tensor) -> SearchedSampler:
        return SearchedSampler(self, hidden_RD)

    def best(self, hidden_RD: Tensor) -> tuple[list[int], list[float]]:
        """The likeliest token after each row, and its log-probability among the candidates."""
        k = min(CANDIDATES, len(self.model.output))
        rows_RD = np.ascontiguousarray(hidden_RD.detach().float().numpy())
        ids_RK, scores_RK = self.index.search(rows_RD, k, self.options.pool, threads=torch.get_num_threads())
        logprobs_RK = torch.from_numpy(np.where(ids_RK >= 0, scores_RK, -np.inf)).log_softmax(-1)
        self.searched += len(ids_RK)
        return ids_RK[:, 0].tolist(), logprobs_RK[:, 0].tolist()


class SearchedSampler:
    """Samples like `Sampler`, from hidden states: where all logits are needed, they are computed when they are."""

    def __init__(self, search: OutputSearch, hidden_RD: Tensor) -> None:
        self.search, self.hidden_RD = search, hidden_RD
        self.found: tuple[list[int], list[float]] | None = None
        self.exact: dict[int, Sampler] = {}

    def sample(self, row: int, request: Request, stop_tokens: Set[int]) -> TokenLogprob:
        sampling = request.sampling
        reports = sampling.logprobs is not None or sampling.logprob_tokens or sampling.record_draws
        if not sampling.plain or reports:
            return self._exact(row).sample(0, request, stop_tokens)
        self.found = self.found or self.search.best(self.hidden_RD)
        token, logprob = self.found[0][row], self.found[1][row]
        if self._due():
            exact = self._exact(row).sample(0, request, stop_tokens)
            self.search.checked += 1
            self.search.missed += exact.token != token
            return exact
        return TokenLogprob(token, logprob)

    def _due(self) -> bool:
        every = self.search.options.check
        self.search.turn = (self.search.turn + 1) % every if every else 0
        return bool(every) and self.search.turn == 0

    def _exact(self, row: int) -> Sampler:
        if row not in self.exact:
            self.exact[row] = Sampler(self.search.model.logits_at(self.hidden_RD[row : row + 1]))
        return self.exact[row]
