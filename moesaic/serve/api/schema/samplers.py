"""The sampling parameters of llama.cpp's, vLLM's and SGLang's requests that OpenAI's do not have, under their names.
docs/api/sampling.md says what each does."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from moesaic.serve.core.branches import MAX_BRANCHES

Token = Annotated[int, Field(ge=0, lt=2**31)]
Name = Annotated[str, Field(max_length=32)]
Word = Annotated[str, Field(min_length=1, max_length=256)]
# false: never. Tried in this order, because 0 equals false.
Bias = Annotated[Annotated[float, Field(ge=-100, le=100)] | Literal[False], Field(union_mode="left_to_right")]
TokenAndBias = Annotated[
    list[Annotated[float | Literal[False] | Word, Field(union_mode="left_to_right")]], Field(min_length=2, max_length=2)
]
# By token id or text; as llama.cpp also takes it, a list of pairs.
LogitBias = (
    Annotated[dict[Annotated[str, Field(max_length=256)], Bias], Field(max_length=1024)]
    | Annotated[list[TokenAndBias], Field(max_length=1024)]
)


class SamplerParams(BaseModel):
    min_p: float | None = Field(default=None, ge=0, le=1)
    typical_p: float | None = Field(default=None, gt=0, le=1, description="1: off.")
    top_n_sigma: float | None = Field(default=None, ge=-1, le=100, description="0 or less: off.")
    xtc_probability: float | None = Field(default=None, ge=0, le=1, description="0: off.")
    xtc_threshold: float | None = Field(default=None, ge=0, le=1, description="Above 0.5: off.")
    dynatemp_range: float | None = Field(default=None, ge=0, le=100, description="0: off.")
    dynatemp_exponent: float | None = Field(default=None, ge=0, le=100)
    mirostat: int | None = Field(default=None, ge=0, le=2, description="0: off.")
    mirostat_tau: float | None = Field(default=None, ge=0, le=100)
    mirostat_eta: float | None = Field(default=None, ge=0, le=100)
    samplers: Name | Annotated[list[Name], Field(max_length=16)] | None = Field(
        default=None, description="The only samplers to apply, in their order: names, or llama.cpp's letters."
    )
    repetition_penalty: float | None = Field(default=None, gt=0, le=100)
    repeat_penalty: float | None = Field(default=None, gt=0, le=100, description="As repetition_penalty.")
    repeat_last_n: int | None = Field(default=None, ge=-1, lt=2**31, description="For all penalties; -1: all tokens.")
    dry_multiplier: float | None = Field(default=None, ge=0, le=100, description="0: off.")
    dry_base: float | None = Field(default=None, ge=1, le=100)
    dry_allowed_length: int | None = Field(default=None, ge=1, lt=2**31)
    dry_penalty_last_n: int | None = Field(default=None, ge=-1, lt=2**31, description="-1: all tokens.")
    dry_sequence_breakers: Annotated[list[Word], Field(min_length=1, max_length=32)] | None = None
    bad_words: Annotated[list[Word], Field(max_length=1024)] | None = None
    allowed_token_ids: Annotated[list[Token], Field(min_length=1, max_length=2**18)] | None = None


class BeamParams(BaseModel):
    use_beam_search: bool | None = Field(default=None, description="With `best_of`, or `n`, beams.")
    length_penalty: float | None = Field(default=None, ge=-10, le=10, description="Above 0, longer beams are better.")
    early_stopping: bool | Literal["never"] | None = Field(
        default=None, description="true: as soon as as many beams have ended as were asked for."
    )


Context = Annotated[str, Field(min_length=1)]


class ContextParams(BaseModel):
    parallel_contexts: Annotated[list[Context], Field(min_length=1, max_length=256)] | None = Field(
        default=None, description="Texts before the prompt that do not see each other; the prompt sees all of them."
    )


class BranchParams(BaseModel):
    parallel_branches: int | None = Field(
        default=None,
        ge=1,
        le=MAX_BRANCHES,
        description="APAR: parts of the answer written in parallel, at most so many.",
    )
