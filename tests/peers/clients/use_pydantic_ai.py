"""Pydantic AI: agents whose last answer is a call of an output tool, or of a given form. (With Anthropic's
client of this year it does not work, wherever the server.)"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

SETTINGS: Any = {"max_tokens": 300}


class Trip(BaseModel):
    """Where to go, and for how long."""

    place: Literal["Bonn", "Ulm"]
    days: int = Field(ge=1, le=9)


def models(at: Any) -> dict[str, Any]:
    openai = OpenAIProvider(base_url=at.v1, api_key=at.key)
    return {
        "chat": OpenAIChatModel(at.model, provider=openai),
        "responses": OpenAIResponsesModel(at.model, provider=openai),
    }


async def check_text(at: Any) -> None:
    for name, model in models(at).items():
        result = await Agent(model, model_settings={"max_tokens": 16, "temperature": 0.0}, retries=0).run("Hello there")
        assert isinstance(result.output, str) and result.usage.output_tokens >= 1, name


async def check_output_tool(at: Any) -> None:
    for name, model in models(at).items():
        agent = Agent(model, output_type=ToolOutput(Trip), model_settings=SETTINGS)
        assert isinstance((await agent.run("Where to?")).output, Trip), name


async def check_native_output(at: Any) -> None:
    model = models(at)["chat"]
    agent = Agent(model, output_type=NativeOutput(Trip), model_settings=SETTINGS)
    assert isinstance((await agent.run("Where to?")).output, Trip)


async def check_stream(at: Any) -> None:
    agent = Agent(models(at)["chat"], model_settings={"max_tokens": 16, "temperature": 0.0})
    async with agent.run_stream("Hello there") as stream:
        text = [piece async for piece in stream.stream_text(delta=True)]
    assert "".join(text) == (await agent.run("Hello there")).output
