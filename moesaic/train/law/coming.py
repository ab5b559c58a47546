"""When a run will leave chance: the threshold of a task, read off the loss law's curve of that run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from moesaic.errors import UserError
from moesaic.train.law.emergence import Emergence
from moesaic.train.law.loss_law import load_law
from moesaic.train.law.predict import predict
from moesaic.train.law.runs import LOSS


def coming(found: Emergence, law: str | Path, schedule: str, steps: int, loss: str = LOSS) -> dict[str, Any]:
    """The first step whose predicted loss is below the threshold, and below both ends of its interval."""
    key = load_law(law)[1].get("loss", LOSS)
    if key != loss:
        raise UserError("--law", f"is a law of {key}, and the threshold one of {loss}", f"Ask with --loss {key}.")
    if not found.seen:
        return {"step": None, "text": "without a threshold there is no step to predict", "warnings": ()}
    predicted = predict(law, schedule, steps=steps)

    def below(threshold: float) -> int | None:
        at = np.flatnonzero(predicted.losses < threshold)
        return predicted.warmup + 1 + int(at[0]) if len(at) else None

    step, early, late = below(found.threshold), below(found.high), below(found.low)
    score = float(found.score(np.array([predicted.final]))[0])
    if step is None:
        text = f"in {steps:,} steps it does not come: the final loss is predicted to be {predicted.final:.3f}"
    else:
        until = f"{late:,}" if late is not None else "beyond the end"
        text = f"leaves chance at step {step:,} ({early:,} to {until}); a score of {score:.1%} at the end"
    return {
        "step": step,
        "early": early,
        "late": late,
        "final_loss": predicted.final,
        "final_score": score,
        "text": text,
        "warnings": predicted.warnings,
    }
