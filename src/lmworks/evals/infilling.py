"""Prompts of infilling: prefix and suffix between the sentinel tokens that a model knows."""

from __future__ import annotations

from ..data import Tokenizer
from ..data.fim import Sentinels
from ..data.tokenizer import FileTokenizer
from ..spec.errors import DataError
from ..spec.fim import FAMILIES, FimSpec


def find_sentinels(tokenizer: Tokenizer, trained: FimSpec | None = None) -> Sentinels | None:
    """Those that a run was trained with; without a run, of the first family that the tokenizer knows.

    None: the model knows none, and only the text before a gap can be continued.
    """
    if trained is not None:
        return Sentinels.of(trained, tokenizer) if trained.rate else None
    if isinstance(tokenizer, FileTokenizer):
        for name in FAMILIES:
            try:
                return Sentinels.of(FimSpec(sentinels=name), tokenizer)
            except DataError:
                continue
    return None
