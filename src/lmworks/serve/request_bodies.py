"""Request bodies: OpenAI's fields, and extensions that vLLM has too.

Unknown fields are errors; they are never silently ignored. `null` is the same as leaving a field out.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ..engine.core.sampling_params import SEEDS

LONGEST_NAME = 256
BIGGEST = 2**31 - 1

Name = Annotated[str, Field(min_length=1, max_length=LONGEST_NAME)]
Count = Annotated[int, Field(ge=0, le=BIGGEST)]
# Without fail_fast a list of a million wrong items would make a million errors.
Tokens = Annotated[list[Count], Field(min_length=1, fail_fast=True)]
Texts = Annotated[list[str], Field(min_length=1, fail_fast=True)]


SPECIAL = "put what the tokenizer wants at the beginning of a text (a begin-of-text token) there"
PARSE = "read the names of special tokens in the text as these tokens; else they are text"
VARIABLES = "variables for the chat template, such as enable_thinking"


class Strict(BaseModel):
    """No unknown fields, and no "5" for 5."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(Strict):
    include_usage: bool = Field(False, description="a last chunk that says how many tokens it came to")
    include_obfuscation: bool = Field(False, description="accepted; chunks are never padded here")


class Sampling(Strict):
    """What completions and chats have in common."""

    model: Name
    temperature: float | None = Field(None, ge=0, description="0 is greedy")
    top_p: float | None = Field(None, gt=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: dict[str, float] | None = Field(None, description="token ids, as strings, to what is added")
    n: int | None = Field(None, ge=1, le=BIGGEST)
    seed: int | None = Field(None, ge=-SEEDS, lt=SEEDS)
    stop: str | Annotated[list[str], Field(fail_fast=True)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # Beyond OpenAI's: as vLLM calls them.
    top_k: int | None = Field(None, ge=-1, le=BIGGEST, description="0 and -1: any")
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0)
    min_tokens: Count | None = None
    stop_token_ids: Annotated[list[Count], Field(fail_fast=True)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    guided_json: dict[str, Any] | str | None = Field(None, description="a JSON schema that the answer fits")
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Field(fail_fast=True)] | None = None
    # Accepted, and of no effect here.
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class CompletionRequest(Sampling):
    """`POST /v1/completions`"""

    prompt: str | Texts | Tokens | Annotated[list[Tokens], Field(min_length=1, fail_fast=True)]
    max_tokens: Count | None = Field(None, description="16 where nothing is said; 0 with echo: the prompt alone")
    best_of: int | None = Field(None, ge=1, le=BIGGEST)
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=BIGGEST)
    suffix: str | None = Field(None, description="the text after the gap, for models that were trained to infill")
    add_special_tokens: bool | None = Field(None, description=SPECIAL)
    parse_special: bool | None = Field(None, description=PARSE)


# --- chat -------------------------------------------------------------------------------------------------


class Part(Strict):
    """Of a message: only text is understood."""

    type: Literal["text"]
    text: str


class CalledFunction(Strict):
    name: Name
    arguments: str


class Call(Strict):
    """A call that the assistant made earlier."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(BaseModel):
    """Answers are sent back as they came, so fields that are not known are left aside here."""

    model_config = ConfigDict(extra="ignore", strict=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[Part], Field(fail_fast=True)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[Call], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None


class Function(Strict):
    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="a JSON schema")
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: Function


class ChosenFunction(Strict):
    name: Name


class ChosenTool(Strict):
    type: Literal["function"]
    function: ChosenFunction


class SchemaFormat(Strict):
    name: Name
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextFormat(Strict):
    type: Literal["text"]


class ObjectFormat(Strict):
    type: Literal["json_object"]


class JSONFormat(Strict):
    type: Literal["json_schema"]
    json_schema: SchemaFormat


Format = Annotated[TextFormat | ObjectFormat | JSONFormat, Field(discriminator="type")]


class ChatRequest(Sampling):
    """`POST /v1/chat/completions`"""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_tokens: Annotated[int, Field(ge=1, le=BIGGEST)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=BIGGEST)] | None = Field(
        None, description="the same under its newer name; what the context holds where nothing is said"
    )
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=BIGGEST)
    response_format: Format | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(None, description=VARIABLES)
    add_special_tokens: bool | None = Field(None, description=f"{SPECIAL}, before what the chat template writes")


# --- tokens -----------------------------------------------------------------------------------------------


class TokenizeRequest(Strict):
    """`POST /tokenize`: a text, or a conversation."""

    model: Name | None = Field(None, description="needed where several are served")
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)] | None = None
    tools: Annotated[list[Tool], Field(max_length=128, fail_fast=True)] | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(None, description=VARIABLES)
    add_special_tokens: bool | None = Field(None, description=SPECIAL)
    parse_special: bool | None = Field(None, description=PARSE)


class DetokenizeRequest(Strict):
    """`POST /detokenize`"""

    model: Name | None = Field(None, description="needed where several are served")
    tokens: Annotated[list[Count], Field(fail_fast=True)]
