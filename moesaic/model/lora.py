"""LoRA (Hu et al. 2021): low-rank corrections of a frozen model's matrices, which are trained in its place.

    model.lora = Lora(model, rank=16, alpha=32, targets=("q_proj", "v_proj"), seed=0)   # from now on in every forward
    model.lora.files(model.state_dict(), base, life)       # adapter/, as `peft` writes it
    model.lora.merged(model.state_dict())                  # the weights of a plain model that says the same

They stand in at the call sites of the matrices, so trainer and engine compute them by the same kernels. A matrix that
a checkpoint keeps in parts (queries, keys, values) has an adapter for each part, as `peft` has it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from moesaic.errors import UserError
from moesaic.model import lineage
from moesaic.model.families import family_for, write_config
from moesaic.model.families.places import Place, by_parameter
from moesaic.model.formats.tensor_file import TensorFile
from moesaic.model.formats.turned import from_disk, to_disk, turned_in
from moesaic.model.linear import Linear

if TYPE_CHECKING:
    from moesaic.model.transformer import Model

FOLDER = "adapter"  # in a model directory, beside the merged weights
CONFIG, WEIGHTS = f"{FOLDER}/adapter_config.json", f"{FOLDER}/adapter_model.safetensors"
PREFIX = "lora."  # of its parameters in the model
PEFT = "base_model.model."  # of theirs in a file


class Correction(nn.Module):
    """Of one matrix: the adapters of its parts, side by side. `parts` are all of its rows; those that are not `chosen`
    stay as they are."""

    def __init__(self, parts: Sequence[Place], chosen: Sequence[Place], rank: int, scale: float, seed: int) -> None:
        super().__init__()
        self.parts, self.chosen, self.rank, self.scale = tuple(parts), tuple(chosen), rank, scale
        self.down_RI = nn.Parameter(torch.cat([first_down(place, rank, seed) for place in chosen]))
        self.ups = nn.ParameterList(torch.zeros(place.shape[0], rank) for place in chosen)  # changes nothing yet

    def forward(self) -> tuple[Tensor, Tensor]:
        return self.down_RI, self.up(list(self.ups))

    def up(self, ups: Sequence[Tensor]) -> Tensor:
        """As one matrix, each part's in its own rows and columns."""
        if len(self.parts) == 1:
            return ups[0] * self.scale
        known = {place.name: up for place, up in zip(self.chosen, ups, strict=True)}
        blocks = [known.get(part.name, ups[0].new_empty(part.shape[0], 0)) for part in self.parts]
        return torch.block_diag(*blocks) * self.scale


class Lora(nn.Module):
    """Freezes the model; what is trained is here. `targets` are the last words of matrices' names on disk; by default
    all that `peft` can hold, too."""

    def __init__(self, model: Model, rank: int, alpha: float, targets: Sequence[str] = (), seed: int = 0) -> None:
        super().__init__()
        model.requires_grad_(False)
        self.rank, self.alpha = rank, alpha
        self.raw = write_config(model.config)[1]  # which says in what order rows of a matrix lie on disk
        self.corrections = nn.ModuleDict()
        wanted = targets or known_to_peft(model)
        for parameter, parts in adaptable(model).items():
            chosen = [place for place in parts if target(place) in wanted]
            if chosen:
                site = parameter.removesuffix(".weight")
                self.corrections[_key(site)] = Correction(parts, chosen, rank, alpha / rank, seed)
        self.to(model.device, model.dtype)

    def correction(self, site: str) -> tuple[Tensor, Tensor] | None:
        key = _key(site)
        return self.corrections[key]() if key in self.corrections else None

    @property
    def matrices(self) -> int:
        return sum(len(correction.chosen) for correction in self._each().values())

    def _each(self) -> dict[str, Correction]:
        """By the name of the parameter that is corrected."""
        found = self.corrections.items()
        return {f"{key.replace('/', '.')}.weight": one for key, one in found if isinstance(one, Correction)}

    def _trained(self, parameter: str, weights: Mapping[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
        """What a state of the model holds of a correction."""
        path, count = f"{PREFIX}corrections.{_key(parameter.removesuffix('.weight'))}", len(self._each()[parameter].ups)
        return weights[f"{path}.down_RI"], [weights[f"{path}.ups.{number}"] for number in range(count)]

    @torch.no_grad()
    def merged(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The model's weights with the corrections in them, which are no longer beside them."""
        found = {name: tensor for name, tensor in weights.items() if not name.startswith(PREFIX)}
        for parameter, correction in self._each().items():
            down_RI, ups = self._trained(parameter, weights)
            up_OR = correction.up([up.float() for up in ups])
            found[parameter] = (found[parameter].float() + up_OR @ down_RI.float()).to(found[parameter].dtype)
        return found

    def files(self, weights: Mapping[str, Tensor], base: str, life: list[dict[str, Any]]) -> dict[str, bytes]:
        """The adapter as `peft` writes it, with its lineage."""
        tensors: dict[str, Tensor] = {}
        for parameter, correction in self._each().items():
            down_RI, ups = self._trained(parameter, weights)
            for place, down, up in zip(correction.chosen, down_RI.split(self.rank), ups, strict=True):
                up = to_disk(turned_in(self.raw, place.name), up)
                for name, tensor in zip(_names(place), (down, up), strict=True):
                    tensors[name] = tensor.detach().cpu().contiguous()
        settings = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base,
            "r": self.rank,
            "lora_alpha": self.alpha,
            "lora_dropout": 0.0,
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
            "target_modules": sorted({target(place) for one in self._each().values() for place in one.chosen}),
        }
        story = json.dumps(lineage.content(life), indent=2, ensure_ascii=False) + "\n"
        return {
            CONFIG: (json.dumps(settings, indent=2) + "\n").encode(),
            WEIGHTS: save(tensors),
            f"{FOLDER}/{lineage.FILE}": story.encode(),
        }

    @torch.no_grad()
    def restore(self, directory: Path) -> None:
        """As it was when a model directory was written."""
        file = TensorFile(directory / WEIGHTS)
        for correction in self._each().values():
            for place, *own in zip(correction.chosen, correction.down_RI.split(self.rank), correction.ups, strict=True):
                for name, tensor in zip(_names(place), own, strict=True):
                    if name not in file.tensors or file.tensors[name].shape != tuple(tensor.shape):
                        remedy = "Remove this checkpoint to resume from the one before."
                        raise UserError(file.path, f"does not hold {name} of this adapter", remedy)
                    found = file.tensor(name)
                    tensor.copy_(found if tensor is own[0] else from_disk(turned_in(self.raw, place.name), found))


def adaptable(model: Model) -> dict[str, list[Place]]:
    """The matrices that can be corrected, by parameter, each as the parts that a checkpoint has of it."""
    plain = {f"{site}.weight" for site, module in model.named_modules() if isinstance(module, Linear)}
    places = by_parameter(family_for(model.config.family, "model").layouts(model.config)[0])
    # Latents are expanded for all cached tokens, whoever they belong to; an indexer only selects, without a gradient.
    no = (".kv_up.weight", ".indexer.")
    return {
        parameter: parts
        for parameter, parts in places.items()
        if parameter in plain and parameter.startswith("layers.") and not any(part in parameter for part in no)
    }


def known_to_peft(model: Model) -> set[str]:
    """Beside routed experts, it takes names of dense and shared feed-forward matrices to be those of the experts."""
    known = adaptable(model).items()
    return {target(p) for name, parts in known for p in parts if ".attention." in name or not model.config.has_experts}


def target(place: Place) -> str:
    """What `peft` calls it: the last word of the module's name."""
    return place.name.removesuffix(".weight").rpartition(".")[2]


def first_down(place: Place, rank: int, seed: int) -> Tensor:
    """Uniform, as `peft` begins; of seed and name alone."""
    digest = hashlib.blake2b(f"{seed}/{place.name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    bound = place.shape[1] ** -0.5
    return torch.empty(rank, place.shape[1]).uniform_(-bound, bound, generator=generator)


def _names(place: Place) -> tuple[str, str]:
    module = PEFT + place.name.removesuffix(".weight")
    return f"{module}.lora_A.weight", f"{module}.lora_B.weight"


def _key(site: str) -> str:
    return site.replace(".", "/")  # a module's name has no dots
