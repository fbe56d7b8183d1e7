"""A tokenizer in the form that llguidance needs: the bytes of each token, and which are special."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from ...data.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer
from ...spec import LMWorksError, SpecError

if TYPE_CHECKING:
    import llguidance


def import_llguidance() -> Any:
    try:
        import llguidance
    except ImportError:
        raise LMWorksError("json_schema, regex and choice need llguidance: pip install 'lmworks[grammar]'") from None
    return llguidance


class ByteVocabulary:
    """`ByteTokenizer` for llguidance."""

    eos_token_id = ByteTokenizer.eot
    bos_token_id = None
    special_token_ids = (ByteTokenizer.eot,)

    def __init__(self, vocab: int) -> None:
        self.tokens = [*(bytes([byte]) for byte in range(256)), b"<eot>"]
        self.tokens += [b""] * (vocab - len(self.tokens))

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode("utf-8") if isinstance(text, str) else text)


class FileVocabulary:
    """`FileTokenizer` for llguidance, which can read one by itself, but would use a special token where an answer has
    to spell its name. So such names are tokenized in two parts.
    """

    bos_token_id = None

    def __init__(self, tokenizer: FileTokenizer, read: llguidance.LLTokenizer) -> None:
        self.eos_token_id, self.read = tokenizer.eot, read
        ids = range(read.vocab_size)
        added = tokenizer.inner.get_added_tokens_decoder()
        # The library treats every added token as special; one that is not (often <think>) is text.
        self.special_token_ids = [
            each for each in ids if read.is_special_token(each) and (each not in added or added[each].special)
        ]
        self.tokens = [read.decode_bytes([each]) for each in ids]
        names = "|".join(re.escape(each.content) for each in added.values() if each.special)
        self.named = re.compile(f"(?={names})") if names else None

    def __call__(self, text: str) -> list[int]:
        starts = [found.start() + 1 for found in self.named.finditer(text)] if self.named else []
        parts = (text[begin:end] for begin, end in pairwise([0, *starts, len(text)]))
        return [token for part in parts for token in self.read.tokenize_str(part)]


def to_llguidance(tokenizer: Tokenizer, vocab: int, ends: list[int]) -> llguidance.LLTokenizer:
    """Takes one to two seconds for a large vocabulary."""
    library = import_llguidance()
    try:
        if isinstance(tokenizer, FileTokenizer):
            read = library.LLTokenizer(tokenizer.inner.to_str(), n_vocab=vocab)
            known: ByteVocabulary | FileVocabulary = FileVocabulary(tokenizer, read)
        elif isinstance(tokenizer, ByteTokenizer):
            known = ByteVocabulary(vocab)
        else:
            raise SpecError("json_schema, regex and choice need a tokenizer.json, or bytes")
        return library.LLTokenizer(library.TokenizerWrapper(known), n_vocab=vocab, eos_token=ends)
    except ValueError as error:
        raise SpecError(f"json_schema, regex and choice do not work with this tokenizer: {error}") from None
