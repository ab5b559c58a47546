"""Which matrices of a model can be quantized or sparsified, by the names of their parameters."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from moesaic.model.linear import Linear

# Small, or used otherwise than by multiplying: which expert, which token, and the latent that attention folds away.
KEPT_PLAIN = ("router", "indexer", "kv_up", "residual")


def matrices_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """What can be made smaller, by name; an expert's number comes last."""
    for path, part in module.named_modules():
        if isinstance(part, Linear) and not any(word in path.split(".") for word in KEPT_PLAIN):
            yield f"{path}.weight", part.weight
    for name, parameter in module.named_parameters():
        if parameter.dim() == 3:
            yield from ((f"{name}.{expert}", weight_OI) for expert, weight_OI in enumerate(parameter))


def matrix_parameters(module: nn.Module) -> set[str]:
    """The parameters these are, all experts of a layer in one."""
    return {name.rpartition(".")[0] if name[-1].isdigit() else name for name, _ in matrices_of(module)}


def site_of(parameter: str) -> str:
    """The call site at which a parameter is multiplied by, as `ops` are told it."""
    return parameter.removesuffix(".weight")
