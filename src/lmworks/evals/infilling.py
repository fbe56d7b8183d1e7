"""Prompts of infilling: prefix and suffix between the sentinel tokens that a model's tokenizer has."""

from __future__ import annotations

from ..data import Tokenizer
from ..data.fim import Sentinels
from ..spec.errors import DataError
from ..spec.fim import FAMILIES, FimSpec


def find_sentinels(tokenizer: Tokenizer, trained: FimSpec | None = None) -> Sentinels | None:
    """Those that the model was trained with, or of the first family that its tokenizer knows. None: it has none, and
    only the text before the gap can be continued."""
    known = [FimSpec(sentinels=name) for name in FAMILIES]
    for spec in [trained, *known] if trained is not None and trained.rate else known:
        try:
            return Sentinels.of(spec, tokenizer)
        except DataError:
            continue
    return None
