"""Request bodies: OpenAI's fields, and extensions that vLLM has too.

Unknown fields are errors; they are never silently ignored. `null` is the same as leaving a field out.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ..engine.core.request import MAX_PRIORITY
from ..engine.core.sampling_params import SEEDS

LONGEST_NAME = 256
BIGGEST = 2**31 - 1
GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")  # fields of one shape each
SCHEMA_FIELD = "response_format.json_schema.schema"

Name = Annotated[str, Field(min_length=1, max_length=LONGEST_NAME)]
Count = Annotated[int, Field(ge=0, le=BIGGEST)]
# Without fail_fast a list of a million wrong items would make a million errors.
Tokens = Annotated[list[Count], Field(min_length=1, fail_fast=True)]
Texts = Annotated[list[str], Field(min_length=1, fail_fast=True)]


SPECIAL = "put what the tokenizer wants at the beginning of a text (a begin-of-text token) there"
PARSE = "read the names of special tokens in the text as these tokens; else they are text"
VARIABLES = "variables for the chat template, such as enable_thinking"
GENERATION = "whether the prompt ends with the beginning of an answer (default: unless continue_final_message)"
CONTINUE = "the answer goes on with the last message, which the prompt leaves open"
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class Strict(BaseModel):
    """No unknown fields, and no "5" for 5."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(Strict):
    include_usage: bool = Field(False, description="a last chunk that says how many tokens it came to")
    include_obfuscation: bool = Field(False, description="accepted; chunks are never padded here")


class StructuredOutputs(Strict):
    """One of these shapes, as vLLM names them."""

    json_: dict[str, Any] | str | None = Field(None, alias="json", description="a JSON schema that the answer fits")
    regex: str | None = None
    choice: Annotated[list[str], Field(fail_fast=True)] | None = None
    grammar: str | None = Field(None, description="a context-free grammar: Lark, or EBNF (root ::= …)")
    json_object: bool | None = Field(None, description="any JSON object")
    structural_tag: dict[str, Any] | str | None = Field(None, description="free text with tags that hold JSON")


class Continuation(Strict):
    """Makes a stream one that another server can go on with: comments in it name the tokens of each event."""

    id: str | None = Field(None, min_length=1, max_length=LONGEST_NAME, description="of the answer, as it began")
    created: Count | None = None
    answers: Annotated[list[Annotated[list[Count], Field(fail_fast=True)]], Field(fail_fast=True)] = Field(
        default_factory=list, description="the tokens of each answer so far; the stream goes on after them"
    )
    sequence: Count = Field(0, description="of Responses: the number of the next event")


class KVTransfer(Strict):
    """Where the keys and values of the prompt are: at a server that has computed it."""

    remote: str = Field(min_length=1, max_length=LONGEST_NAME, description="its address, one of engine.kv_peers")


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
    kv_transfer_params: KVTransfer | None = Field(None, description="for gateways: prefill by another server")
    continuation: Continuation | None = Field(None, description="for gateways: a stream that can be continued")
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
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = Field(None, description="the newer name of the guided_… fields")
    allowed_token_ids: Tokens | None = Field(None, description="no other token is sampled")
    bad_words: Annotated[list[str], Field(fail_fast=True)] | None = None
    prompt_logprobs: int | None = Field(None, ge=0, le=BIGGEST, description="of the prompt's tokens; not in streams")
    truncate_prompt_tokens: int | None = Field(
        None, ge=-1, le=BIGGEST, description="keep so many of the prompt's last tokens; -1: as many as fit"
    )
    skip_special_tokens: bool | None = Field(None, description="false: names of special tokens stay in the text")
    spaces_between_special_tokens: bool | None = Field(None, description="true alone: blanks are never taken away")
    return_token_ids: bool | None = Field(None, description="token_ids and prompt_token_ids beside the text")
    return_tokens_as_token_ids: bool | None = Field(None, description='tokens in logprobs as "token_id:…"')
    cache_salt: str | None = Field(
        None, min_length=1, max_length=LONGEST_NAME, description="share cached prefixes with equal salts alone"
    )
    priority: int | None = Field(
        None, ge=-MAX_PRIORITY, le=MAX_PRIORITY, description="smaller goes first; not below the key's own"
    )
    use_beam_search: bool | None = Field(None, description="the n likeliest answers; not sampled, not streamed")
    length_penalty: float | None = Field(None, ge=-10, le=10, description="of beams: score = Σ log p / length^penalty")
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
    reasoning_content: str | None = Field(None, description="of an earlier answer; templates decide whether it is kept")
    reasoning: str | None = Field(None, description="the same")


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


class AllowedSet(Strict):
    mode: Literal["auto", "required"]
    tools: Annotated[list[ChosenTool], Field(min_length=1, fail_fast=True)]


class AllowedTools(Strict):
    """Of all tools these may be called, or one of them must be."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedSet


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
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | AllowedTools | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = Field(None, description="a variable for the chat template; none: no thinking")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description=VARIABLES)
    add_generation_prompt: bool | None = Field(None, description=GENERATION)
    continue_final_message: bool | None = Field(None, description=CONTINUE)
    add_special_tokens: bool | None = Field(None, description=f"{SPECIAL}, before what the chat template writes")


# --- embeddings -------------------------------------------------------------------------------------------


class Pooled(Strict):
    """What embeddings, scores and rankings have in common."""

    model: Name
    truncate_prompt_tokens: int | None = Field(
        None, ge=-1, le=BIGGEST, description="keep so many of each text's last tokens; -1: as many as fit"
    )
    add_special_tokens: bool | None = Field(None, description=SPECIAL)
    cache_salt: str | None = Field(None, min_length=1, max_length=LONGEST_NAME)
    priority: int | None = Field(None, ge=-MAX_PRIORITY, le=MAX_PRIORITY)
    user: str | None = None


class EmbeddingRequest(Pooled):
    """`POST /v1/embeddings`"""

    input: str | Texts | Tokens | Annotated[list[Tokens], Field(min_length=1, fail_fast=True)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(None, ge=1, le=BIGGEST, description="the first so many numbers, of length 1 again")


ACTIVATION = "of a scalar head: true: its value as a probability, by the sigmoid; default: as it is"


class ScoreRequest(Pooled):
    """`POST /score`"""

    use_activation: bool | None = Field(None, description=ACTIVATION)

    text_1: str | Texts = Field(description="one for all of text_2, or one for each")
    text_2: str | Texts


class RerankRequest(Pooled):
    """`POST /rerank`"""

    query: str
    documents: Texts
    top_n: Count | None = Field(None, description="0: all")
    return_documents: bool | None = Field(None, description="false: indices and scores alone")
    use_activation: bool | None = Field(None, description=ACTIVATION)


class ClassifyRequest(Pooled):
    """`POST /classify`: texts, or one conversation."""

    input: str | Texts | Tokens | Annotated[list[Tokens], Field(min_length=1, fail_fast=True)] | None = None
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)] | None = None
    add_generation_prompt: bool | None = Field(None, description="whether the conversation is left open: default false")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description=VARIABLES)
    use_activation: bool | None = Field(None, description=ACTIVATION)


# --- operations -------------------------------------------------------------------------------------------


class UnloadAdapterRequest(Strict):
    """`POST /v1/unload_lora_adapter`"""

    lora_name: Name
    model: Name | None = Field(None, description="needed where several are served")


class LoadAdapterRequest(UnloadAdapterRequest):
    """`POST /v1/load_lora_adapter`"""

    lora_path: str = Field(min_length=1, max_length=4096, description="a folder below --adapter-root")


# --- tokens -----------------------------------------------------------------------------------------------


class TokenizeRequest(Strict):
    """`POST /tokenize`: a text, or a conversation."""

    model: Name | None = Field(None, description="needed where several are served")
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)] | None = None
    tools: Annotated[list[Tool], Field(max_length=128, fail_fast=True)] | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(None, description=VARIABLES)
    add_generation_prompt: bool | None = Field(None, description=GENERATION)
    continue_final_message: bool | None = Field(None, description=CONTINUE)
    add_special_tokens: bool | None = Field(None, description=SPECIAL)
    parse_special: bool | None = Field(None, description=PARSE)


class DetokenizeRequest(Strict):
    """`POST /detokenize`"""

    model: Name | None = Field(None, description="needed where several are served")
    tokens: Annotated[list[Count], Field(fail_fast=True)]
