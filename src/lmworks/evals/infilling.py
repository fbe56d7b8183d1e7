"""Prompts of infilling: prefix and suffix between the sentinel tokens that a model's tokenizer has."""

from __future__ import annotations

from ..data import Tokenizer
from ..data.tokenizer import FileTokenizer

# Sentinels before the prefix, before the suffix and before the middle, by family.
SENTINELS = {
    "Qwen": ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    "StarCoder, Mellum": ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    "SantaCoder": ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    "Code Llama": ("▁<PRE>", "▁<SUF>", "▁<MID>"),
    "DeepSeek": ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
}


def sentinels(tokenizer: Tokenizer) -> tuple[int, int, int] | None:
    """Ids of the first family whose three tokens the tokenizer has."""
    if not isinstance(tokenizer, FileTokenizer):
        return None
    for names in SENTINELS.values():
        ids = [number for name in names if (number := tokenizer.inner.token_to_id(name)) is not None]
        if len(ids) == len(names):
            return ids[0], ids[1], ids[2]
    return None


def infilling_prompt(tokenizer: Tokenizer, prefix: str, suffix: str) -> list[int] | None:
    """Prefix, suffix, middle; None where the tokenizer has no sentinels: then only the prefix can be continued."""
    found = sentinels(tokenizer)
    if found is None:
        return None
    before, after, middle = found
    return [before, *tokenizer.encode(prefix), after, *tokenizer.encode(suffix), middle]
