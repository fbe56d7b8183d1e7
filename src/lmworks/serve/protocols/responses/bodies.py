"""Request bodies of the Responses API."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ...request_bodies import (
    BIGGEST,
    LONGEST_NAME,
    Continuation,
    Effort,
    Name,
    ObjectFormat,
    StreamOptions,
    Strict,
    TextFormat,
)


class Returned(BaseModel):
    """Items of earlier responses are sent back as they came: fields that are not known are left aside."""

    model_config = ConfigDict(extra="ignore", strict=True)


class TextPart(Returned):
    type: Literal["input_text", "output_text", "text", "summary_text", "reasoning_text"]
    text: str


class RefusalPart(Returned):
    type: Literal["refusal"]
    refusal: str


Parts = Annotated[list[TextPart | RefusalPart], Field(fail_fast=True)]


class MessageItem(Returned):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Parts


class FunctionCallItem(Returned):
    type: Literal["function_call"]
    call_id: str
    name: Name
    arguments: str


class FunctionOutputItem(Returned):
    type: Literal["function_call_output"]
    call_id: str
    output: str | Parts


class ReasoningItem(Returned):
    type: Literal["reasoning"]
    summary: Parts | None = None
    content: Parts | None = None


InputItem = MessageItem | FunctionCallItem | FunctionOutputItem | ReasoningItem


class FunctionTool(Strict):
    type: Literal["function"]
    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="a JSON schema")
    strict: bool | None = None


class NamedFunction(Strict):
    type: Literal["function"]
    name: Name


class AllowedFunctions(Strict):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedFunction], Field(min_length=1, fail_fast=True)]


class TextSchema(Strict):
    type: Literal["json_schema"]
    name: Name
    schema_: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class TextOptions(Strict):
    format: Annotated[TextFormat | ObjectFormat | TextSchema, Field(discriminator="type")] | None = None
    verbosity: Literal["low", "medium", "high"] | None = Field(None, description="a variable for the chat template")


class ReasoningOptions(Strict):
    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = Field(None, description="accepted: it is shown whole")


class ResponsesRequest(Strict):
    """`POST /v1/responses`"""

    model: Name
    input: str | Annotated[list[InputItem], Field(min_length=1, fail_fast=True)]
    instructions: str | None = Field(None, description="a system message, of this response alone")
    previous_response_id: str | None = Field(None, max_length=64)
    max_output_tokens: Annotated[int, Field(ge=1, le=BIGGEST)] | None = None
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    tools: Annotated[list[FunctionTool], Field(fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | AllowedFunctions | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: Annotated[list[Literal["reasoning.encrypted_content"]], Field(max_length=8, fail_fast=True)] | None = (
        Field(None, description="accepted: reasoning items have their content in plain text")
    )
    store: bool | None = Field(None, description="whether it can be retrieved and continued; default true")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = Field(None, description="there are no background responses")
    metadata: dict[str, str] | None = None
    cache_salt: str | None = Field(
        None, min_length=1, max_length=LONGEST_NAME, description="share cached prefixes with equal salts alone"
    )
    continuation: Continuation | None = Field(None, description="for gateways: a stream that can be continued")
    # Accepted, and of no effect here.
    user: str | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
