"""How many tokens of an answer are its reasoning: all up to the marker after it."""

from __future__ import annotations

from .chat import ChatGeneration
from .generation_request import CompletionOutput
from .parsers.base import Reasoning, parse_whole


def count_reasoning_tokens(chat: ChatGeneration, answer: CompletionOutput) -> int:
    _, closing = chat.form.reasoning_markers()
    if closing is None or not any(isinstance(piece, Reasoning) for piece in parse_whole(chat.parser(), answer.text)):
        return 0
    texts, marker, tail = chat.generation.local.token_texts, closing.encode(), b""
    for count, token in enumerate(answer.tokens, start=1):
        spelled = texts.bytes(token)
        tail += texts.text(token).encode() if spelled is None else spelled
        if marker in tail:
            return count
        tail = tail[-len(marker) :]
    return len(answer.tokens)
