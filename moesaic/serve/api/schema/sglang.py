"""POST /generate as SGLang has it: the request."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from moesaic.serve.api.schema.completions import Texts
from moesaic.serve.api.schema.samplers import LogitBias
from moesaic.serve.api.schema.sampling import MAX_LOGPROBS, ExtraSamplingParams, RequestModel, Token
from moesaic.serve.api.schema.tokens import Tokens


class SglangSampling(ExtraSamplingParams):
    """Names that differ from OpenAI's; the others are the same."""

    max_new_tokens: int | None = Field(default=128, ge=0, lt=2**31)
    min_new_tokens: int | None = Field(default=None, ge=0, lt=2**31)
    temperature: float | None = Field(default=None, ge=0, le=100)
    top_p: float | None = Field(default=None, gt=0, le=1)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    logit_bias: LogitBias | None = None
    sampling_seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    n: int | None = Field(default=None, ge=1, le=128)
    stop: str | Annotated[list[str], Field(max_length=32)] | None = None


class GenerateRequest(RequestModel):
    """`text` or `input_ids`."""

    text: Texts | None = None
    input_ids: Tokens | Annotated[list[Tokens], Field(min_length=1, max_length=2048)] | None = None
    sampling_params: SglangSampling = Field(default_factory=SglangSampling)
    return_logprob: bool | None = None
    logprob_start_len: int | None = Field(default=None, ge=-1, description="From which prompt token on; -1: none.")
    top_logprobs_num: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    token_ids_logprob: Annotated[list[Token], Field(max_length=1024)] | None = None
    return_text_in_logprobs: bool = False
    stream: bool | None = None
    rid: str | None = Field(default=None, max_length=256)
    lora_path: str | None = Field(default=None, description="The name of an adapter.")
    model: str | None = None
    priority: int | None = Field(default=None, ge=-(2**31), lt=2**31)
    cache_salt: str | None = None
