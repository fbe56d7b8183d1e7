"""Response bodies of OpenAI's API: typed dictionaries, as one is made for every token.

Text and bytes of single tokens, for responses with log-probabilities.
"""

from __future__ import annotations

import codecs
import math
from copy import copy
from functools import lru_cache
from typing import Literal, NotRequired

from typing_extensions import TypedDict

from ..data.tokenizer import END_OF_TEXT, ByteTokenizer, FileTokenizer, Tokenizer
from ..engine.core.detokenizer import BYTE_TOKEN, Vocabulary, byte_level
from ..engine.core.request import Logprob

Finish = Literal["stop", "length"]
ChatFinish = Literal["stop", "length", "tool_calls"]


class PromptDetails(TypedDict):
    cached_tokens: int


class UsageObject(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class CompletionLogprobs(TypedDict):
    """One entry a token. A prompt's first token has no log-probability."""

    text_offset: list[int]
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]


class PromptLogprob(TypedDict):
    """Of vLLM: one of the tokens that are reported at one place of a prompt."""

    logprob: float
    rank: int | None  # 1 is the likeliest; None: not among those that were asked for
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class CompletionChoice(TypedDict):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Finish | None
    prompt_logprobs: NotRequired[PromptLogprobs]  # these where asked for, as in vLLM
    prompt_token_ids: NotRequired[list[int]]
    token_ids: NotRequired[list[int]]


class Completion(TypedDict):
    """Also a chunk of a stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: NotRequired[UsageObject | None]


# --- chat -------------------------------------------------------------------------------------------------


class TopLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    content: list[TokenLogprob]
    refusal: None


class FunctionObject(TypedDict):
    name: str
    arguments: str


class ToolCall(TypedDict):
    id: str
    type: Literal["function"]
    function: FunctionObject


class FunctionDelta(TypedDict):
    name: NotRequired[str]
    arguments: str


class ToolCallDelta(TypedDict):
    """The first of a call has its id and name, later ones more of its arguments."""

    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: FunctionDelta


class ChatMessage(TypedDict):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: NotRequired[str]
    reasoning: NotRequired[str]  # the same, under vLLM's newer name
    tool_calls: NotRequired[list[ToolCall]]


class ChatChoice(TypedDict):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinish
    token_ids: NotRequired[list[int]]


class ChatCompletion(TypedDict):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageObject
    prompt_logprobs: NotRequired[PromptLogprobs]
    prompt_token_ids: NotRequired[list[int]]


class Delta(TypedDict, total=False):
    role: Literal["assistant"]
    content: str
    reasoning_content: str
    reasoning: str
    tool_calls: list[ToolCallDelta]


class ChunkChoice(TypedDict):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinish | None
    token_ids: NotRequired[list[int]]


class ChatChunk(TypedDict):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: NotRequired[UsageObject | None]
    prompt_token_ids: NotRequired[list[int]]


# --- embeddings -------------------------------------------------------------------------------------------


class EmbeddingUsage(TypedDict):
    prompt_tokens: int
    total_tokens: int


class EmbeddingObject(TypedDict):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str  # base64: of little-endian float32


class EmbeddingList(TypedDict):
    object: Literal["list"]
    data: list[EmbeddingObject]
    model: str
    usage: EmbeddingUsage


class ScoreObject(TypedDict):
    index: int
    object: Literal["score"]
    score: float


class ScoreResponse(TypedDict):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[ScoreObject]
    usage: EmbeddingUsage


class ClassifiedObject(TypedDict):
    index: int
    label: str
    probs: list[float]  # vLLM's name; without `use_activation` the head's value
    num_classes: int


class ClassifyResponse(TypedDict):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[ClassifiedObject]
    usage: EmbeddingUsage


class DocumentObject(TypedDict):
    text: str


class RankedDocument(TypedDict):
    index: int
    relevance_score: float
    document: NotRequired[DocumentObject]


class RerankResponse(TypedDict):
    id: str
    model: str
    usage: EmbeddingUsage
    results: list[RankedDocument]


# --- models, tokens ---------------------------------------------------------------------------------------


class ModelObject(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int | None  # longest sequence; None: unknown, of an upstream
    parent: str | None  # of an adapter: its base model
    sampling_defaults: NotRequired[dict[str, int | float]]  # of the model's generation_config.json


class ModelList(TypedDict):
    object: Literal["list"]
    data: list[ModelObject]


class Tokenized(TypedDict):
    count: int
    max_model_len: int
    tokens: list[int]


class Detokenized(TypedDict):
    prompt: str


class TokenizerInfo(TypedDict):
    """The fields that lm-eval reads."""

    tokenizer_class: str
    vocab_size: int
    eos_token: str
    bos_token: str | None
    pad_token: str | None
    chat_template: str | None


# --- token logprobs --------------------------------------------------------------------------------------


IMPOSSIBLE_LOGPROB = -9999.0  # as OpenAI writes -inf: JSON has no infinity
CACHED_TOKENS = 65_536
BLANK = "▁"  # how SentencePiece writes a space


class TokenTexts:
    """Text of a token alone. Half a character is written as OpenAI does, `bytes:\\xe2\\x82`: unambiguous."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.tokenizer = tokenizer
        self.vocabulary = Vocabulary(tokenizer) if isinstance(tokenizer, FileTokenizer) else None
        self.bytes = lru_cache(CACHED_TOKENS)(self.bytes_of)
        self.text = lru_cache(CACHED_TOKENS)(self.text_of)

    def as_ids(self) -> TokenTexts:
        """The same, with each token written as its id."""
        found = copy(self)
        found.text = "token_id:{}".format  # type: ignore[assignment]
        return found

    def text_of(self, token: int) -> str:
        if self.tokenizer is None:
            return f"token_id:{token}"
        found = self.bytes(token)
        if found is None:
            return self.special(token)
        try:
            return found.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in found)

    def bytes_of(self, token: int) -> bytes | None:
        """None: a special token."""
        if isinstance(self.tokenizer, ByteTokenizer):
            return bytes([token]) if token < 256 else None
        if self.tokenizer is None:
            return None
        if self.vocabulary is None:
            return self.tokenizer.decode([token]).encode()
        if not self.vocabulary.is_text(token):
            return None
        if self.vocabulary.kinds == ["ByteLevel"]:
            return byte_level(self.vocabulary, token)
        piece = self.vocabulary.piece(token) or ""
        if BYTE_TOKEN.fullmatch(piece):
            return bytes([int(piece[3:5], 16)])
        if piece.startswith(BLANK):  # alone it would be the beginning of a text, which has no space
            return piece.replace(BLANK, " ").encode()
        return self.tokenizer.decode([token]).encode()

    def special(self, token: int) -> str:
        name = self.vocabulary.piece(token) if self.vocabulary is not None else None
        return name or (
            END_OF_TEXT if self.tokenizer is not None and token == self.tokenizer.eot else f"token_id:{token}"
        )


class Offsets:
    """Offsets of tokens in a text. Half a character begins where the whole one does; a special token has no length."""

    def __init__(self, texts: TokenTexts, start: int = 0) -> None:
        self.texts, self.at = texts, start
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def next(self, token: int) -> int:
        before = self.at
        self.at += len(self.decoder.decode(self.texts.bytes(token) or b""))
        return before


def finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else IMPOSSIBLE_LOGPROB


def top_tokens(found: Logprob) -> list[tuple[int, float]]:
    """The tokens that are reported at one position: the top ones, and the sampled one."""
    top = [(token, finite(logprob)) for token, logprob in found.top]
    return top if any(token == found.token for token, _ in top) else [*top, (found.token, finite(found.logprob))]
