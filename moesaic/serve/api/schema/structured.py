"""Every way in which a client may ask for an answer of a form: OpenAI's, vLLM's, SGLang's and llama.cpp's fields."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from moesaic.serve.api.schema.request_model import RequestModel

MAX_GRAMMAR_CHARS = 65_536  # characters of a grammar, a regular expression or a schema
GrammarText = Annotated[str, Field(max_length=MAX_GRAMMAR_CHARS)]
Choices = Annotated[list[str], Field(max_length=1000)]
Schema = dict[str, Any] | bool | str  # a schema, or its text


class JsonSchema(RequestModel):
    name: str = "answer"
    description: str | None = None
    json_schema: dict[str, Any] | bool | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextFormat(RequestModel):
    type: Literal["text"]


class JsonObjectFormat(RequestModel):
    """llama.cpp's and Together's clients put a schema beside the type."""

    type: Literal["json_object"]
    schema_beside: dict[str, Any] | bool | None = Field(default=None, alias="schema")


class JsonSchemaFormat(RequestModel):
    type: Literal["json_schema"]
    json_schema: JsonSchema | None = None
    schema_beside: dict[str, Any] | bool | None = Field(default=None, alias="schema")


class RegexFormat(RequestModel):
    """SGLang's and Fireworks' clients."""

    type: Literal["regex"]
    pattern: GrammarText


class GrammarFormat(RequestModel):
    type: Literal["grammar"]
    grammar: GrammarText


class StructuralTagFormat(RequestModel):
    """xgrammar's: `structures` with `triggers`, or one `format`."""

    type: Literal["structural_tag"]
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None
    format: dict[str, Any] | None = None


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat | RegexFormat | GrammarFormat | StructuralTagFormat,
    Field(discriminator="type"),
]


class StructuredOutputs(RequestModel):
    """vLLM's: one of them."""

    json_schema: Schema | None = Field(default=None, alias="json")
    regex: GrammarText | None = None
    choice: Choices | None = None
    grammar: GrammarText | None = None
    json_object: bool | None = None
    structural_tag: dict[str, Any] | str | None = None
    whitespace_pattern: GrammarText | None = Field(default=None, description="Between the parts of JSON.")
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = Field(default=None, description="They are, unless the schema allows.")
    disable_fallback: bool | None = None


class StructuredFields(RequestModel):
    """Beside `response_format`, wherever text is generated."""

    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: GrammarText | None = None
    guided_choice: Choices | None = None
    guided_grammar: GrammarText | None = None
    guided_json_object: bool | None = None
    guided_whitespace_pattern: GrammarText | None = None
    guided_decoding_backend: str | None = Field(default=None, description="There is one.")
    structural_tag: dict[str, Any] | str | None = None
    grammar: GrammarText | None = Field(default=None, description="GBNF, as llama.cpp takes it, or Lark.")
    json_schema: Schema | None = Field(default=None, description="As llama.cpp and SGLang take it.")
    regex: GrammarText | None = None
    ebnf: GrammarText | None = None
