"""instructor, in every mode that needs no understanding of the model: a grammar holds the form. In its other modes
(JSON, MD_JSON) the form is only asked for in words, which a model of chance cannot follow."""

from __future__ import annotations

from typing import Any, Literal

import anthropic
import instructor
import openai
from instructor import Mode
from pydantic import BaseModel, Field

ASKED: list[Any] = [{"role": "user", "content": "Where to?"}]


class Stay(BaseModel):
    nights: int = Field(ge=1, le=9)
    breakfast: bool


class Trip(BaseModel):
    """Where to go, and for how long."""

    place: Literal["Bonn", "Ulm"]
    stay: Stay
    others: list[Literal["Anna", "Emil"]] = Field(max_length=2)


def by_openai(at: Any, mode: Mode) -> instructor.Instructor:
    return instructor.from_openai(openai.OpenAI(base_url=at.v1, api_key=at.key, max_retries=0), mode=mode)


def check_openai_modes(at: Any) -> None:
    for mode in (Mode.TOOLS, Mode.TOOLS_STRICT, Mode.JSON_SCHEMA, Mode.FUNCTIONS):
        found = by_openai(at, mode).chat.completions.create(
            model=at.model, messages=ASKED, response_model=Trip, max_tokens=400, max_retries=0
        )
        assert isinstance(found, Trip), mode


def check_responses(at: Any) -> None:
    found = by_openai(at, Mode.RESPONSES_TOOLS).chat.completions.create(
        model=at.model, messages=ASKED, response_model=Trip, max_output_tokens=400, max_retries=0
    )
    assert isinstance(found, Trip)


def check_partial(at: Any) -> None:
    made = by_openai(at, Mode.TOOLS).chat.completions.create_partial(
        model=at.model, messages=ASKED, response_model=Trip, max_tokens=400, max_retries=0
    )
    assert list(made)[-1].place in ("Bonn", "Ulm")


def check_several(at: Any) -> None:
    """A list of them, streamed one by one."""
    made = by_openai(at, Mode.TOOLS).chat.completions.create(
        model=at.model, messages=ASKED, response_model=list[Stay], max_tokens=2000, max_retries=0, seed=5
    )
    assert all(isinstance(one, Stay) for one in made)


def check_anthropic(at: Any) -> None:
    made = instructor.from_anthropic(
        anthropic.Anthropic(base_url=at.url, api_key=at.key, max_retries=0), mode=Mode.ANTHROPIC_TOOLS
    )
    found = made.messages.create(model=at.model, messages=ASKED, response_model=Trip, max_tokens=400, max_retries=0)
    assert isinstance(found, Trip)
