"""Request bodies of Anthropic's Messages API."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ...request_bodies import BIGGEST, LONGEST_NAME, Continuation, Count, Name, Strict


class Block(BaseModel):
    """Answers are sent back as they came, and may have marks for caches and citations: these are left aside."""

    model_config = ConfigDict(extra="ignore", strict=True)


class TextBlock(Block):
    type: Literal["text"]
    text: str


class ThinkingBlock(Block):
    """Of an earlier answer. Its signature is not checked: nothing here is encrypted."""

    type: Literal["thinking"]
    thinking: str


class ToolUseBlock(Block):
    type: Literal["tool_use"]
    id: str
    name: Name
    input: dict[str, Any]


class ToolResultBlock(Block):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Annotated[list[TextBlock], Field(fail_fast=True)] | None = None
    is_error: bool | None = None


AnyBlock = Annotated[TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")]


class MessageParam(Strict):
    role: Literal["user", "assistant"]
    content: str | Annotated[list[AnyBlock], Field(fail_fast=True)]


class ToolParam(Block):
    type: Literal["custom"] | None = None
    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    description: str | None = None
    input_schema: dict[str, Any]


class ToolChoiceParam(Strict):
    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = Field(None, description="of the tool that must be called, with type tool")
    disable_parallel_tool_use: bool | None = None


class ThinkingParam(Strict):
    """Templates know on and off; a budget is accepted, and has no effect."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Count | None = None
    display: str | None = None


class OutputFormat(Strict):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Strict):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class UserMetadata(Strict):
    user_id: str | None = None


class CountTokensRequest(Strict):
    """`POST /v1/messages/count_tokens`"""

    model: Name
    messages: Annotated[list[MessageParam], Field(min_length=1, fail_fast=True)]
    system: str | Annotated[list[TextBlock], Field(fail_fast=True)] | None = None
    tools: Annotated[list[ToolParam], Field(fail_fast=True)] | None = None
    tool_choice: ToolChoiceParam | None = None
    thinking: ThinkingParam | None = None
    output_config: OutputConfig | None = None


class MessagesRequest(CountTokensRequest):
    """`POST /v1/messages`"""

    max_tokens: Annotated[int, Field(ge=1, le=BIGGEST)]
    stop_sequences: Annotated[list[str], Field(fail_fast=True)] | None = None
    stream: bool | None = None
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=BIGGEST)
    cache_salt: str | None = Field(
        None, min_length=1, max_length=LONGEST_NAME, description="share cached prefixes with equal salts alone"
    )
    continuation: Continuation | None = Field(None, description="for gateways: a stream that can be continued")
    # Accepted, and of no effect here.
    metadata: UserMetadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
