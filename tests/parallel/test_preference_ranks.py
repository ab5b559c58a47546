"""Preference optimization on several ranks: the losses of one process, for every objective of the stage."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from moesaic.align.preference import reference
from moesaic.data.packing import GroupedBatch
from moesaic.errors import UserError
from tests.parallel.ranks import on_ranks
from tests.parallel.small_runs import as_rank, assert_as_alone
from tests.parallel.test_align_ranks import tune, tune_alone

STAGE = "{{name: preference, steps: 3, lr: 0.003, data: [{{path: 'builtin:sums'}}], pairs: 14, batch_pairs: 4,"
STAGE += " max_length: 64, evaluate_every: 3, evaluate: 5, save_every: 3, objective: {}}}"
OBJECTIVES = {
    "dpo": "{kind: sigmoid, smoothing: 0.1, sft: 0.2}",
    "ipo": "{kind: ipo, beta: 0.5}",
    "hinge": "{kind: hinge, normalised: true}",
    "simpo": "{reference: false, normalised: true, margin: 0.5, beta: 2.0}",
}
FEW = 200  # tokens of a forward of the reference: ranks take several turns, in the last of which one has nothing new
SHOWN = ("reward_margin", "logprob_chosen", "pairs_right", "accuracy", "held_out_margin")


def stage(name: str) -> str:
    return STAGE.format(OBJECTIVES[name])


def on_two(rank: int, world: int, folder: Path) -> None:
    as_rank(rank, world)
    reference.TOKENS = FEW
    model = folder / "model"
    tune(model, folder / "dpo-2", "parallel.exact=true", "parallel.zero=3", stage=stage("dpo"))
    tune(model, folder / "ipo-2", "parallel.exact=true", "parallel.ep=2", stage=stage("ipo"))
    tune(model, folder / "hinge-2", "parallel.zero=0", stage=stage("hinge"))
    tune(model, folder / "simpo-2", "parallel.zero=1", stage=stage("simpo"))
    with pytest.raises(UserError, match="Nearest that works: align.stages.0.batch_pairs=4"):
        tune(model, folder / "no", stage=stage("dpo").replace("batch_pairs: 4", "batch_pairs: 3"))


def test_preference_on_two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "TOKENS", FEW)
    tune_alone(tmp_path, {name: stage(name) for name in OBJECTIVES})
    on_ranks(2, on_two, tmp_path, tmp_path)
    for name in OBJECTIVES:
        one, two = tmp_path / name, tmp_path / f"{name}-2"
        assert_as_alone(two, one, name in ("dpo", "ipo"), SHOWN, 1e-5)  # those two with parallel.exact
        if name == "simpo":
            assert not (two / "reference").exists()
            continue
        (mine_file,), (other_file,) = ((place / "reference").iterdir() for place in (two, one))
        found, known = load_file(mine_file)["logprobs"], load_file(other_file)["logprobs"]
        assert torch.allclose(found, known, rtol=1e-5, atol=1e-5, equal_nan=True) and not known.isnan().all()


def test_pairs_stay_together_and_every_rank_has_some() -> None:
    lengths = [50, 40, 1, 1, 2, 1, 1, 2, 3, 1, 1, 1]
    tokens_T = torch.arange(sum(lengths))
    batch = GroupedBatch(tokens_T, tokens_T, lengths, [0] * 12, 6, groups=[2] * 6)
    shares = [batch.share(rank, 3) for rank in range(3)]
    assert all(isinstance(share, GroupedBatch) and share.groups == [2, 2] for share in shares)
    assert sorted(torch.cat([share.tokens_T for share in shares]).tolist()) == tokens_T.tolist()
    assert all(share.all_lengths == lengths and share.count == 6 for share in shares)
    for share in shares:  # both sequences of a pair, one behind the other
        pieces = share.tokens_T.split(share.lengths)
        assert all(int(pieces[n][-1]) + 1 == int(pieces[n + 1][0]) for n in (0, 2))
        assert len(share.parts(2)) == 2
