"""An answer's text, token by token: the same as that of all tokens at once, at a cost that does not grow.

Tokens are not characters. A character may be spread over several byte tokens, a leading space is dropped only at the
very beginning, and a stop string may begin in one token and end in another. So some text waits: half a character,
and whatever might still turn out to be the beginning of a stop string.

It is what the tokenizer decodes, with one exception. If any of a run of byte tokens (<0xE2>) is not UTF-8, the library
turns the whole run into U+FFFD, also the characters in it that were shown long ago. Here they stay: only a byte that
belongs to no character becomes U+FFFD.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from ...data.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer

BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
REPLACEMENT = "\ufffd"
WINDOW = 8  # settled tokens (or characters of several) that are decoded again as the context of the next


class Decoder(Protocol):
    """Turns tokens into text as they come. What `push` returns is final; `flush` returns what was waiting."""

    def push(self, token: int) -> str: ...

    def flush(self) -> str: ...


class ByteDecoder:
    """Tokens that are bytes: only a character that is cut in two has to wait."""

    def __init__(self, pieces: Callable[[int], bytes]) -> None:
        self.pieces = pieces
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        return self.decoder.decode(self.pieces(token))

    def flush(self) -> str:
        return self.decoder.decode(b"", final=True)


class WindowDecoder:
    """Tokens that are pieces of text, for whatever decoder the tokenizer has.

    A token's text is what it adds to that of a few tokens before it.
    """

    def __init__(self, tokenizer: Tokenizer, vocabulary: Vocabulary | None = None) -> None:
        self.decode, self.vocabulary = tokenizer.decode, vocabulary
        self.window: list[list[int]] = []  # settled, each together, and decoded with what follows

    def push(self, token: int) -> str:
        return self.settle([token]) if self.vocabulary is None or self.vocabulary.is_text(token) else ""

    def flush(self) -> str:
        return ""

    def settle(self, tokens: list[int]) -> str:
        before = [*chain.from_iterable(self.window)]
        text = self.decode(before + tokens)[len(self.decode(before)) :]
        # A lone "▁" decodes to nothing: without what stood before it, it would be no context at all.
        self.window = [tokens] if self.decode(tokens) else [*self.window[-WINDOW:], tokens]
        return text


class ByteFallbackDecoder(WindowDecoder):
    """Pieces of text, and bytes of characters that have no piece, as SentencePiece writes them.

    Byte tokens wait until they are a whole character. One that cannot become any is read as if U+FFFD stood there.
    """

    def __init__(self, tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
        super().__init__(tokenizer)
        self.is_text, self.byte_tokens = vocabulary.is_text, vocabulary.byte_tokens
        self.replacement = vocabulary.replacement
        self.half: list[int] = []  # byte tokens that wait

    def push(self, token: int) -> str:
        if not self.is_text(token):
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
        """The first byte that waits belongs to no character."""
        del self.half[0]
        return self.settle(self.replacement)


class Vocabulary:
    """What decoding one token needs to know of a tokenizer.json, looked up once for all answers."""

    def __init__(self, tokenizer: FileTokenizer) -> None:
        inner = tokenizer.inner
        self.kinds = decoder_kinds(inner.decoder)
        self.piece: Callable[[int], str | None] = inner.id_to_token
        self.special = frozenset(number for number, token in inner.get_added_tokens_decoder().items() if token.special)
        self.byte_tokens: dict[int, int] = {}  # and the bytes that they stand for
        if "ByteFallback" in self.kinds:
            for piece, token in inner.get_vocab(with_added_tokens=True).items():
                if BYTE_TOKEN.fullmatch(piece):
                    self.byte_tokens[token] = int(piece[3:5], 16)
        tokens = {byte: token for token, byte in self.byte_tokens.items()}
        self.replacement = [tokens[byte] for byte in REPLACEMENT.encode() if byte in tokens]

    def is_text(self, token: int) -> bool:
        """Special tokens, and ids that no token has, are nothing to the decoder: a run of bytes goes on past them."""
        return token >= 0 and token not in self.special and self.piece(token) is not None


VOCABULARIES: WeakKeyDictionary[Any, Vocabulary] = WeakKeyDictionary()


def decoder_of(tokenizer: Tokenizer) -> Decoder:
    if isinstance(tokenizer, ByteTokenizer):
        return ByteDecoder(lambda token: bytes([token]) if 0 <= token < 256 else b"")
    if not isinstance(tokenizer, FileTokenizer):  # one that a caller brought along: nothing is known of its tokens
        return WindowDecoder(tokenizer)
    known = VOCABULARIES.get(tokenizer)
    if known is None:
        known = VOCABULARIES[tokenizer] = Vocabulary(tokenizer)
    if known.kinds == ["ByteLevel"]:
        return ByteDecoder(lambda token: byte_level(known, token))
    return ByteFallbackDecoder(tokenizer, known) if known.byte_tokens else WindowDecoder(tokenizer, known)


def decode(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """The text of all tokens at once, for those that nobody looked at before."""
    text = tokenizer.decode(ids)
    if REPLACEMENT in text and isinstance(decoder := decoder_of(tokenizer), ByteFallbackDecoder):
        text = "".join(map(decoder.push, ids)) + decoder.flush()
    return text


def decoder_kinds(decoder: Any) -> list[str]:
    """Types of the decoder and, for a sequence of them, of its parts; empty: there is none."""
    if decoder is None:
        return []
    described = json.loads(decoder.__getstate__())
    return [part["type"] for part in described.get("decoders", [described])]


def byte_alphabet() -> dict[str, int]:
    """GPT-2's letters for the 256 bytes: printable ones stand for themselves, the others follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


LETTERS = byte_alphabet()


def byte_level(vocabulary: Vocabulary, token: int) -> bytes:
    """The bytes of a token that is written in that alphabet; an added token may be written plainly."""
    piece = (vocabulary.piece(token) or "") if vocabulary.is_text(token) else ""
    if all(letter in LETTERS for letter in piece):
        return bytes(LETTERS[letter] for letter in piece)
    return piece.encode("utf-8")


class IncrementalDetokenizer:
    """The text of one answer. `push` returns what may be shown; after a stop string (`stopped`) that is nothing."""

    def __init__(
        self, tokenizer: Tokenizer, stop: Sequence[str] = (), include_stop: bool = False, min_tokens: int = 0
    ) -> None:
        self.decoder = decoder_of(tokenizer)
        self.stop, self.include_stop, self.min_tokens = tuple(stop), include_stop, min_tokens
        self.stopped: str | None = None
        self.parts: list[str] = []
        self.held = ""  # might be the beginning of a stop string
        self.tokens = 0

    @property
    def text(self) -> str:
        """All that was shown so far."""
        return "".join(self.parts)

    def push(self, token: int) -> str:
        self.tokens += 1
        return self.emit(self.decoder.push(token), final=False)

    def flush(self) -> str:
        """No more tokens: what still waits, half characters as U+FFFD."""
        return self.emit(self.decoder.flush(), final=True)

    def emit(self, new: str, final: bool) -> str:
        if self.stopped is not None:
            return ""
        waiting = self.held + new
        found = first_stop(waiting, self.stop) if self.tokens >= self.min_tokens else None
        if found is not None:
            start, self.stopped = found
            self.held = ""
            shown = waiting[: start + len(self.stopped) * self.include_stop]
        else:
            keep = 0 if final else possible_start(waiting, self.stop)
            shown, self.held = waiting[: len(waiting) - keep], waiting[len(waiting) - keep :]
        if shown:
            self.parts.append(shown)
        return shown


def first_stop(text: str, stop: Sequence[str]) -> tuple[int, str] | None:
    """Where the stop string that is complete first begins, and which; of those that end together the longest.

    The first to be complete, not the first to begin: so it does not matter how the text was cut into tokens.
    """
    found = [(text.find(each) + len(each), -len(each), each) for each in stop if each in text]
    if not found:
        return None
    end, _, each = min(found)
    return end - len(each), each


def possible_start(text: str, stop: Sequence[str]) -> int:
    """Length of the longest end of the text that is the beginning of a stop string."""
    longest = min(len(text), max((len(each) - 1 for each in stop), default=0))
    return next((n for n in range(longest, 0, -1) if any(each.startswith(text[-n:]) for each in stop)), 0)
