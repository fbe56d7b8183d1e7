"""Text ↔ token ids: raw bytes, or any `tokenizer.json` (one that is trained here included)."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ..spec.errors import DataError, SpecError
from .index import INDEX_FILE, TOKENIZER_FILE, read_index

if TYPE_CHECKING:
    import tokenizers

END_OF_TEXT = "<|endoftext|>"
FILE_TOKENS = (
    "<repo_name>",
    "<file_sep>",
    "<filename>",
)  # before the names and files of a repository (StarCoder2, Mellum)
CODE = "+code"  # after bpe:N: with the tokens of code models
CODE_TOKENS = ("<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<fim_pad>", *FILE_TOKENS)
COMMON_END_OF_TEXT = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "[EOS]", "<|eos|>", "<｜end▁of▁sentence｜>")


class Tokenizer(Protocol):
    """Ids are below `vocab_size`; `eot` follows every document and is never the encoding of any text."""

    vocab_size: int
    eot: int

    def encode(self, text: str) -> list[int]: ...

    def encode_iterable(self, texts: Iterable[str]) -> Iterator[int]:
        """Ids of one text after another, each encoded by itself when its ids are asked for: of a file that does not
        fit in memory, by lines."""
        for text in texts:
            yield from self.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Bytes that are not UTF-8 (a character cut in two) become U+FFFD; special tokens are left out."""
        ...

    def token_id(self, name: str) -> int | None:
        """Of a special token, where there is one of that name."""
        ...


class ByteTokenizer(Tokenizer):
    """The 256 byte values, and end-of-text. Tokens of code models follow it, and are used by those alone."""

    vocab_size = 257
    eot = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")

    def token_id(self, name: str) -> int | None:
        names = (END_OF_TEXT, *CODE_TOKENS)
        return self.eot + names.index(name) if name in names else None


class FileTokenizer(Tokenizer):
    """A `tokenizer.json` as the `tokenizers` library writes it."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, eot: int) -> None:
        self.inner = tokenizer
        # Otherwise a document that merely mentions "<|endoftext|>" would end there.
        self.inner.encode_special_tokens = True
        self.inner.no_truncation()
        self.inner.no_padding()
        self.vocab_size: int = max(self.inner.get_vocab(with_added_tokens=True).values()) + 1
        self.eot = eot

    def encode(self, text: str) -> list[int]:
        with convert_panics("the tokenizer cannot encode this text"):
            ids: list[int] = self.inner.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self.inner.decode(list(ids), skip_special_tokens=True)
        return text

    def token_id(self, name: str) -> int | None:
        number: int | None = self.inner.token_to_id(name)
        return number


@contextmanager
def convert_panics(what: str) -> Iterator[None]:
    """A panic of the library, which is written in Rust, is no `Exception`: a regular expression that it cannot run."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise DataError(f"{what}: the tokenizers library fails in it ({' '.join(str(error).split())[:300]})") from None


def load_tokenizer(folder_or_name: str | Path) -> Tokenizer:
    """The tokenizer of a prepared folder, `bytes`, or a path to a tokenizer.json (or a folder that holds one)."""
    if str(folder_or_name) == "bytes":
        return ByteTokenizer()
    path = Path(folder_or_name)
    if (path / INDEX_FILE).is_file():
        index = read_index(path)
        return ByteTokenizer() if index.tokenizer == "bytes" else read_tokenizer(path / TOKENIZER_FILE, index.eot)
    return read_tokenizer(path / TOKENIZER_FILE if path.is_dir() else path)


def read_tokenizer(path: Path, eot: int | str = "") -> FileTokenizer:
    """`eot` is the end-of-text token, by id or by name; empty: look for one of the common names."""
    import tokenizers

    if not path.is_file():
        raise DataError(f"no tokenizer at {path}: the file does not exist")
    try:
        with convert_panics(f"{path} cannot be used"):
            inner = tokenizers.Tokenizer.from_file(str(path))
    except DataError:
        raise
    except Exception as error:  # the library raises bare Exception
        raise DataError(f"{path} is not a tokenizer.json: {str(error).splitlines()[0]}") from None
    if isinstance(eot, int):
        return FileTokenizer(inner, eot)
    names = (eot,) if eot else COMMON_END_OF_TEXT
    known = [number for number in map(inner.token_to_id, names) if number is not None]
    if not known:
        tried = f"no token {eot!r}" if eot else f"none of the usual end-of-text tokens ({', '.join(names[:5])} …)"
        raise DataError(f"{path} has {tried}; name the one that ends a document with --eot")
    return FileTokenizer(inner, known[0])


def bpe_size(name: str) -> int:
    """4096 for `bpe:4096`, and for `bpe:4096+code`, which has the tokens of code models among them."""
    size = name.removeprefix("bpe:").removesuffix(CODE)
    if not (size.isascii() and size.isdecimal()) or int(size) < 257:
        raise SpecError(
            f"tokenizer {name!r}: write bpe:N with N at least 257 (256 bytes and end-of-text), e.g. bpe:4096"
        )
    return int(size)


def train_bpe(texts: Iterable[str], size: int, reserved: Sequence[str] = ()) -> str:
    """Byte-level BPE in the manner of GPT-2, as the text of a tokenizer.json. End-of-text is id 0, and special tokens
    that text never encodes to follow it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END_OF_TEXT, *reserved],
        # All 256 bytes, seen or not, so that every text can be encoded.
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(texts, trainer)
    text: str = inner.to_str(pretty=False)
    return text


def tokenizer_digest(name: str) -> str:
    """What is encoded how, as far as it is known before preparing: a file counts by content, not by name."""
    if name == "bytes":
        return name
    if name.startswith("bpe:"):
        return f"bpe:{bpe_size(name)}{CODE if name.endswith(CODE) else ''}"
    path = Path(name)
    if not path.is_file():
        raise SpecError(f"tokenizer {name!r} is not bytes, bpe:N, or a tokenizer.json file that exists")
    if not os.access(path, os.R_OK):
        raise DataError(f"cannot read {path}: permission denied")
    return hashlib.sha256(path.read_bytes()).hexdigest()
