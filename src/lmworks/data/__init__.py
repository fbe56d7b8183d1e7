"""Text → tokens → batches.

`prepare` turns text into memory-mapped token shards, `Batches` turns shards into the batch of a cursor.
Names are loaded when they are used: only `Batches` needs torch, and preparing data must not wait for it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .batch_factory import open_batches as open_batches
    from .chat_tokenizer import copy_tokenizer as copy_tokenizer
    from .chat_tokenizer import load_model_tokenizer as load_model_tokenizer
    from .index import Index as Index
    from .index import read_index as read_index
    from .loader import Batch as Batch
    from .loader import Batches as Batches
    from .loader import BatchSource as BatchSource
    from .pipeline import Prepared as Prepared
    from .pipeline import prepare as prepare
    from .pipeline import resolve as resolve
    from .progress import console_progress as console_progress
    from .sources import Reading as Reading
    from .store import TokenData as TokenData
    from .survey import bigram_loss as bigram_loss
    from .tokenizer import Tokenizer as Tokenizer
    from .tokenizer import load_tokenizer as load_tokenizer

EXPORTS = {
    "Batch": "loader",
    "BatchSource": "loader",
    "Batches": "loader",
    "Index": "index",
    "Prepared": "pipeline",
    "Reading": "sources",
    "TokenData": "store",
    "Tokenizer": "tokenizer",
    "bigram_loss": "survey",
    "console_progress": "progress",
    "copy_tokenizer": "chat_tokenizer",
    "load_model_tokenizer": "chat_tokenizer",
    "load_tokenizer": "tokenizer",
    "open_batches": "batch_factory",
    "prepare": "pipeline",
    "read_index": "index",
    "resolve": "pipeline",
}


def __getattr__(name: str) -> Any:
    if name not in EXPORTS:
        raise AttributeError(f"module 'lmworks.data' has no attribute '{name}'")
    return getattr(importlib.import_module(f".{EXPORTS[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(EXPORTS)
