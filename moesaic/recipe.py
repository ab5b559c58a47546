"""A run's YAML: one typed section per stage, so that a misspelt key is an error before any work is done.

    recipe = load_recipe("recipes/tiny.yaml", ["train.steps=50", "schedule={name: wsd, decay: 0.2}"])
    recipe.train.steps                                # 50
    schedule = recipe.build("schedule", Schedule)     # the method that the recipe names

Every key has a default, a section that is not written is all defaults, and the later of two overrides wins. Each
section belongs to its stage: a key is added here when the stage that reads it is written.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, cast

from pydantic import BaseModel, Field, PlainSerializer, PlainValidator, PrivateAttr

from moesaic.errors import UserError
from moesaic.methods import Method, build
from moesaic.strict import STRICT, KeyPath, dotted, found, nearest, validate, wrong
from moesaic.yaml_reader import read_yaml

COMMAND_LINE = "command line"
Base = TypeVar("Base")
Count = Annotated[int, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]


def _method(value: object) -> Method:
    if isinstance(value, Method):
        return value
    if isinstance(value, str):
        return Method(value)
    if not isinstance(value, dict):
        raise wrong(f"expected the name of a method, or its name and options, found {found(value)}")
    if not isinstance(value.get("name"), str):
        raise wrong("names no method; write name: and then its options")
    return Method(value["name"], {key: option for key, option in value.items() if key != "name"})


Named = Annotated[Method, PlainValidator(_method), PlainSerializer(Method.plain)]


class Section(BaseModel):
    model_config = STRICT


class Router(Section):
    """How a token chooses its experts."""

    score: Literal["softmax", "sigmoid"] = Field("sigmoid", description="how a router's logits become scores")
    normalize: bool = Field(True, description="the chosen experts' weights sum to one")
    scale: float = Field(1.0, gt=0, description="factor on the routed experts' output")
    correction: bool = Field(True, description="a balance bias that chooses experts but does not weigh them")
    groups: Count = Field(1, description="groups the experts are divided into")
    top_groups: Count = Field(1, description="groups a token may choose from")


class ModelSection(Section):
    """The sizes of a model that is trained from scratch."""

    family: str = Field("glm4_moe", description="the Hugging Face architecture it is written as")
    vocab: Count = 4096
    hidden: Count = 256
    layers: Count = 6
    heads: Count = 8
    kv_heads: Count = 2
    head_size: Count = 32
    qk_norm: bool = True
    dense_layers: int = Field(1, ge=0, description="first layers that have one feed-forward and no experts")
    dense_hidden: Count = 1024
    experts: Count | Annotated[tuple[Count, ...], Field(min_length=1)] = Field(
        8, description="experts in a layer, or one number for each such layer"
    )
    experts_per_token: Count = 2
    expert_hidden: Count = 256
    shared_experts: int = Field(1, ge=0, description="experts that every token uses")
    router: Router = Router()
    mtp_layers: int = Field(0, ge=0, description="layers that predict the tokens after the next")
    rope_theta: float = Field(10_000.0, gt=0)
    context: Count = Field(1024, description="the longest sequence, in tokens")
    tied: bool = Field(False, description="the output matrix is the embedding")


class Source(Section):
    """Some text to learn from."""

    name: str
    path: str = Field(description="a file, a folder, a pattern such as texts/*.jsonl, or builtin:NAME")
    weight: float = Field(1.0, gt=0, description="how often it is drawn, against the other sources")


class Phase(Section):
    """A stretch of the run with a mixture of its own."""

    share: Share = Field(description="its part of all steps")
    weights: dict[str, float] = Field(description="source: weight, in place of the sources' own")


class DataSection(Section):
    """What is learned from, and in which order."""

    sources: tuple[Source, ...] = ()
    tokenizer: str | None = Field(
        None, description="where an existing one is; by default one is trained on the sources"
    )
    sequence_length: Count = 1024
    phases: tuple[Phase, ...] = ()
    curriculum: Named | None = None
    seed: int = 0


class TrainSection(Section):
    """How long, how much at a time, and what is kept."""

    objective: Named = Method("next_token")
    steps: Count = 1000
    batch_tokens: Count = Field(16_384, description="tokens that one optimizer step learns from")
    accumulate: Count = Field(1, description="parts that a batch is taken in, to save memory")
    warmup_steps: int = Field(0, ge=0, description="steps in which the learning rate rises to the schedule's first")
    clip: float = Field(1.0, gt=0, description="longest gradient norm")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field("auto", description="auto: what is fast here")
    seed: int = 0
    save_every: Count = Field(500, description="steps between checkpoints")
    keep_last: Count = Field(2, description="checkpoints that are kept")


class BalanceSection(Section):
    """How experts are kept equally busy. Zero turns a means off."""

    bias_rate: float = Field(0.001, ge=0, description="step of the auxiliary-loss-free balance bias")
    sequence_loss: float = Field(0.0, ge=0, description="weight of the auxiliary loss within each sequence")
    z_loss: float = Field(0.0, ge=0, description="weight of the router's z-loss")


class AlignStage(Section):
    """One stage of alignment."""

    name: Literal["sft", "preference", "reward_model", "policy", "distill"]
    steps: Count


class AlignSection(Section):
    """The stages of alignment, in order."""

    stages: tuple[AlignStage, ...] = ()
    invariant: bool = Field(True, description="trainer and engine agree to the bit")


class CompressSection(Section):
    """How the weights are made smaller."""

    method: Named | None = None


class ServeSection(Section):
    """How the engine is run."""

    host: str = "127.0.0.1"
    port: int = Field(8000, ge=0, le=65_535)
    kv_policy: Named | None = None
    drafter: Named | None = None


class EvaluateSection(Section):
    """What a model is measured by."""

    suites: tuple[Named, ...] = ()


class ParallelSection(Section):
    """Over how many devices each axis is divided."""

    shard: Count = Field(1, description="data, with the weights divided")
    experts: Count = 1
    context: Count = 1
    pipeline: Count = 1


class Recipe(Section):
    """Everything a run was asked to do."""

    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    train: TrainSection = TrainSection()
    optimizer: Named = Method("adamw")
    schedule: Named = Method("constant")
    balance: BalanceSection = BalanceSection()
    align: AlignSection = AlignSection()
    compress: CompressSection = CompressSection()
    serve: ServeSection = ServeSection()
    evaluate: EvaluateSection = EvaluateSection()
    parallel: ParallelSection = ParallelSection()

    _file: str = PrivateAttr("recipe")
    _overridden: tuple[KeyPath, ...] = PrivateAttr(())

    def dump(self) -> dict[str, Any]:
        """Plain values, every default included: what a lineage records, and itself a recipe."""
        return self.model_dump(mode="json")

    def origin(self, path: KeyPath) -> str:
        """Where a key was written: the recipe's file, or the command line."""
        return _origin(self._file, self._overridden, path)

    def build(self, key: str, base: type[Base]) -> Base:
        """The method under `key`, such as `schedule` or `evaluate.suites.0`, made of its options."""
        path = tuple(int(part) if part.isdigit() else part for part in key.split("."))
        method = reduce(
            lambda at, part: at[part] if isinstance(part, int) else getattr(at, part), path, cast(Any, self)
        )
        assert isinstance(method, Method), f"{key} is not a method"
        return build(method, base, self.origin, path)


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe and lay `section.key=value` overrides over it."""
    values = read_yaml(_read(Path(path)), str(path))
    if values is None:
        raise UserError(path, "empty; a recipe has sections", f"Known: {', '.join(Recipe.model_fields)}.")
    if not isinstance(values, dict):
        raise UserError(path, f"expected sections with keys and values, found {found(values)}")
    overridden = tuple(_override(values, text) for text in overrides)

    recipe = validate(Recipe, values, lambda key: _origin(str(path), overridden, key))
    recipe._file, recipe._overridden = str(path), overridden
    return recipe


def _origin(file: str, overridden: Iterable[KeyPath], key: KeyPath) -> str:
    return COMMAND_LINE if any(key[: len(other)] == other for other in overridden) else file


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        siblings = [str(file) for file in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
        close = nearest(str(path), siblings)
        raise UserError(path, "no such file" + (f"; did you mean {close}?" if close else "")) from None
    except UnicodeDecodeError:
        raise UserError(path, "not a text file; a recipe is YAML in UTF-8") from None
    except OSError as error:
        raise UserError(path, f"cannot be read: {error.strerror}") from None


def _override(values: dict[str, Any], text: str) -> KeyPath:
    """Set one `section.key=value` in place, and say which key that made or changed."""
    name, equals, value = text.partition("=")
    parts = name.strip().split(".")
    if not equals or not all(parts):
        raise UserError(COMMAND_LINE, f'"{text}" is not of the form section.key=value')
    at: Any = values
    path: KeyPath = ()
    made: KeyPath = ()  # the outermost section that was not in the file
    for number, part in enumerate(parts):
        here = f"{COMMAND_LINE}: {name.strip()}"
        key: str | int = part
        if isinstance(at, list):
            if not (part.isdecimal() and int(part) < len(at)):
                entries = f"{dotted(path)}.0 to {dotted(path)}.{len(at) - 1}" if at else "no entry"
                raise UserError(here, f"there is no such entry; the recipe has {entries}")
            key = int(part)
        elif not isinstance(at, dict):
            raise UserError(here, f"{dotted(path)} is {found(at)}, and has no keys")
        path = (*path, key)
        if number == len(parts) - 1:
            at[key] = read_yaml(value, here)
        else:
            if isinstance(at, dict) and at.get(part) is None:
                at[part] = {}
                made = made or path
            at = at[key]
    return made or path
