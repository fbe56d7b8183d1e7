"""Incremental detokenization: the text of an answer token by token, equal to that of all tokens at once, at constant
cost.

Tokens are not characters. A character may span several byte tokens, a leading space is dropped only at the beginning,
and a stop string may span tokens. So some text is held back: incomplete characters, and a suffix that may be the
beginning of a stop string.

The text is what the tokenizer decodes, with one exception. If any byte of a run of byte tokens (<0xE2>) is not UTF-8,
the library replaces the whole run by U+FFFD, including characters that were emitted before. Here only bytes that belong
to no character become U+FFFD.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from ...data.tokenizer import END_OF_TEXT, ByteTokenizer, FileTokenizer, Tokenizer

BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
REPLACEMENT = "\ufffd"
WINDOW = 8  # decoded tokens (or characters of several) that are decoded again as context of the next


class Decoder(Protocol):
    """Decodes tokens one by one. What `push` returns is final; `flush` returns what was held back."""

    def push(self, token: int) -> str: ...

    def flush(self) -> str: ...


class ByteDecoder:
    """Tokens that are bytes: only incomplete characters are held back."""

    def __init__(self, pieces: Callable[[int], bytes]) -> None:
        self.pieces = pieces
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        return self.decoder.decode(self.pieces(token))

    def flush(self) -> str:
        return self.decoder.decode(b"", final=True)


class WindowDecoder:
    """Tokens that are pieces of text, with any decoder of the tokenizer.

    A token's text is what it adds to the text of a few tokens before it.
    """

    def __init__(
        self, tokenizer: Tokenizer, vocabulary: Vocabulary | None = None, skip_special_tokens: bool = True
    ) -> None:
        self.decode, self.vocabulary = decoding(tokenizer, skip_special_tokens), vocabulary
        self.skip_special_tokens = skip_special_tokens
        self.window: list[list[int]] = []  # decoded groups, the context of the next token

    def push(self, token: int) -> str:
        return self.settle([token]) if self.shown(token) else ""

    def shown(self, token: int) -> bool:
        vocabulary = self.vocabulary
        if vocabulary is None or vocabulary.is_text(token):
            return True
        return not self.skip_special_tokens and token in vocabulary.special

    def flush(self) -> str:
        return ""

    def settle(self, tokens: list[int]) -> str:
        before = [*chain.from_iterable(self.window)]
        text = self.decode(before + tokens)[len(self.decode(before)) :]
        # A single "▁" decodes to nothing, and would be no context by itself.
        self.window = [tokens] if self.decode(tokens) else [*self.window[-WINDOW:], tokens]
        return text


class ByteFallbackDecoder(WindowDecoder):
    """SentencePiece's byte fallback: pieces of text, and bytes of characters that have no piece.

    Byte tokens are held back until a character is complete. A byte that belongs to none is decoded as U+FFFD.
    """

    def __init__(self, tokenizer: Tokenizer, vocabulary: Vocabulary, skip_special_tokens: bool = True) -> None:
        super().__init__(tokenizer, vocabulary, skip_special_tokens)
        self.byte_tokens = vocabulary.byte_tokens
        self.replacement = vocabulary.replacement
        self.half: list[int] = []  # byte tokens of an incomplete character

    def push(self, token: int) -> str:
        if not self.shown(token):
            return ""
        if token not in self.byte_tokens:
            return self.flush() + self.settle([token])
        self.half.append(token)
        text = ""
        while self.half:
            try:
                _, taken = codecs.utf_8_decode(bytes(self.byte_tokens[each] for each in self.half))
            except UnicodeDecodeError:
                text += self.flush_invalid()
                continue
            if not taken:
                break
            text += self.settle(self.half[:taken])
            del self.half[:taken]
        return text

    def flush(self) -> str:
        return "".join(self.flush_invalid() for _ in range(len(self.half)))

    def flush_invalid(self) -> str:
        """The first byte held back belongs to no character."""
        del self.half[0]
        return self.settle(self.replacement)


class Vocabulary:
    """Facts of a tokenizer.json for decoding single tokens, computed once."""

    def __init__(self, tokenizer: FileTokenizer) -> None:
        inner = tokenizer.inner
        self.kinds = decoder_kinds(inner.decoder)
        self.piece: Callable[[int], str | None] = inner.id_to_token
        self.special = frozenset(number for number, token in inner.get_added_tokens_decoder().items() if token.special)
        self.byte_tokens: dict[int, int] = {}  # token → byte
        if "ByteFallback" in self.kinds:
            for piece, token in inner.get_vocab(with_added_tokens=True).items():
                if BYTE_TOKEN.fullmatch(piece):
                    self.byte_tokens[token] = int(piece[3:5], 16)
        tokens = {byte: token for token, byte in self.byte_tokens.items()}
        self.replacement = [tokens[byte] for byte in REPLACEMENT.encode() if byte in tokens]

    def is_text(self, token: int) -> bool:
        """Special tokens and unused ids have no text: a run of byte tokens continues after them."""
        return token >= 0 and token not in self.special and self.piece(token) is not None


VOCABULARIES: WeakKeyDictionary[Any, Vocabulary] = WeakKeyDictionary()


def decoding(tokenizer: Tokenizer, skip_special_tokens: bool) -> Callable[[Sequence[int]], str]:
    """A caller's own tokenizer decodes as it will."""
    if skip_special_tokens or not isinstance(tokenizer, FileTokenizer):
        return tokenizer.decode
    return lambda ids: str(tokenizer.inner.decode(list(ids), skip_special_tokens=False))


def decoder_of(tokenizer: Tokenizer, skip_special_tokens: bool = True) -> Decoder:
    if isinstance(tokenizer, ByteTokenizer):
        end = b"" if skip_special_tokens else END_OF_TEXT.encode()
        return ByteDecoder(lambda token: bytes([token]) if 0 <= token < 256 else end if token == 256 else b"")
    if not isinstance(tokenizer, FileTokenizer):  # a caller's own: nothing is known of its tokens
        return WindowDecoder(tokenizer)
    known = VOCABULARIES.get(tokenizer)
    if known is None:
        known = VOCABULARIES[tokenizer] = Vocabulary(tokenizer)
    if known.kinds == ["ByteLevel"]:
        return ByteDecoder(lambda token: byte_level(known, token, skip_special_tokens))
    kind = ByteFallbackDecoder if known.byte_tokens else WindowDecoder
    return kind(tokenizer, known, skip_special_tokens)


def decode(tokenizer: Tokenizer, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
    """The text of all tokens at once."""
    if isinstance(tokenizer, ByteTokenizer) and not skip_special_tokens:
        decoder = decoder_of(tokenizer, False)
        return "".join(map(decoder.push, ids)) + decoder.flush()
    text = decoding(tokenizer, skip_special_tokens)(ids)
    if REPLACEMENT in text and isinstance(inner := decoder_of(tokenizer, skip_special_tokens), ByteFallbackDecoder):
        text = "".join(map(inner.push, ids)) + inner.flush()
    return text


def decoder_kinds(decoder: Any) -> list[str]:
    """Types of a decoder, or of the parts of a sequence of them."""
    if decoder is None:
        return []
    described = json.loads(decoder.__getstate__())
    return [part["type"] for part in described.get("decoders", [described])]


def byte_alphabet() -> dict[str, int]:
    """GPT-2's characters for the 256 bytes: printable ones map to themselves, others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


LETTERS = byte_alphabet()


def byte_level(vocabulary: Vocabulary, token: int, skip_special_tokens: bool = True) -> bytes:
    """The bytes of a token in that alphabet; an added token may be plain text."""
    if vocabulary.is_text(token) or (not skip_special_tokens and token in vocabulary.special):
        piece = vocabulary.piece(token) or ""
    else:
        piece = ""
    if all(letter in LETTERS for letter in piece):
        return bytes(LETTERS[letter] for letter in piece)
    return piece.encode("utf-8")


class IncrementalDetokenizer:
    """The text of one answer. `push` returns the text that may be emitted; nothing after a stop string (`stopped`)."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
    ) -> None:
        self.decoder = decoder_of(tokenizer, skip_special_tokens)
        self.stop, self.include_stop, self.min_tokens = tuple(stop), include_stop, min_tokens
        self.stopped: str | None = None
        self.parts: list[str] = []
        self.held = ""  # may be the beginning of a stop string
        self.after_stop = ""  # what the token that completed it had after it
        self.tokens = 0

    @property
    def text(self) -> str:
        """All text emitted so far."""
        return "".join(self.parts)

    def push(self, token: int) -> str:
        self.tokens += 1
        return self.emit(self.decoder.push(token), final=False)

    def flush(self) -> str:
        """No more tokens: emit what was held back, incomplete characters as U+FFFD."""
        return self.emit(self.decoder.flush(), final=True)

    def emit(self, new: str, final: bool) -> str:
        if self.stopped is not None:
            return ""
        waiting = self.held + new
        found = first_stop(waiting, self.stop) if self.tokens >= self.min_tokens else None
        if found is not None:
            start, self.stopped = found
            self.held, self.after_stop = "", waiting[start + len(self.stopped) :]
            shown = waiting[: start + len(self.stopped) * self.include_stop]
        else:
            keep = 0 if final else possible_start(waiting, self.stop)
            shown, self.held = waiting[: len(waiting) - keep], waiting[len(waiting) - keep :]
        if shown:
            self.parts.append(shown)
        return shown


def first_stop(text: str, stop: Sequence[str]) -> tuple[int, str] | None:
    """Start of the stop string that is complete first, and which; of those that end together the longest.

    The first to be complete, not the first to begin, so that it does not depend on token boundaries.
    """
    found = [(text.find(each) + len(each), -len(each), each) for each in stop if each in text]
    if not found:
        return None
    end, _, each = min(found)
    return end - len(each), each


def possible_start(text: str, stop: Sequence[str]) -> int:
    """Length of the longest suffix of the text that is a prefix of a stop string."""
    longest = min(len(text), max((len(each) - 1 for each in stop), default=0))
    return next((n for n in range(longest, 0, -1) if any(each.startswith(text[-n:]) for each in stop)), 0)
