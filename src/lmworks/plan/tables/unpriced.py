"""Rows that are no training of a transformer are refused, wherever they say what they are."""

from __future__ import annotations

import re

from ...spec import SpecError
from .columns import OTHER, Row, place

OTHER_ADAPTERS = re.compile(r"(?i)\b(prefix[- ]tuning|prompt[- ]tuning|ia3)\b")
SERVING = re.compile(
    r"(?i)\b(inference|serving|decod(e|ing)|prefill|vllm|sglang|tensorrt-?llm|trt-?llm|tgi|llama\.cpp)\b"
)
# Layers that are no attention, or attention of another kind, whose kernels have no prices here.
STATE_SPACE = re.compile(
    r"(?i)mamba|jamba|bamba|zamba|samba|hymba|nemotron-?h\b|falcon-?h1|granite-?4.*-h\b|rwkv|retnet|hyena"
    r"|recurrent-?gemma|griffin|xlstm|lfm-?2|qwen-?3-?next|kimi-?linear|minimax-?text-?01|gated[ -]?delta"
)
EXPERTS = re.compile(r"(?i)\bmoe\b|mixture|\d+e\b|-a\d+(\.\d+)?b\b|\d+ ?x ?\d+b\b")


def refuse(row: Row) -> None:
    """Raises SpecError for adapters that are not of low rank, inference and layers that are not attention."""
    for column, cell in row.cells.items():
        if column != "origin" and (found := OTHER_ADAPTERS.search(cell)):
            raise SpecError(f"{place(column)}{found[0]!r} is not priced; of adapters those of low rank are")
    for column in ("task", "label", "framework", "model", OTHER):
        if found := SERVING.search(row.text(column)):
            raise SpecError(f"{place(column)}{found[0]!r}: a row of inference; lmworks plan serve predicts that")
    if found := STATE_SPACE.search(row.text("model")):
        raise SpecError(f"model = {row.text('model')!r}: {found[0]} has layers that are not attention; not priced")


def refuse_dense(row: Row) -> None:
    """Of a size alone: a mixture of experts is not a dense model of as many parameters."""
    if EXPERTS.search(row.text("model")) and not row.text("experts"):
        raise SpecError(
            f"model = {row.text('model')!r} is a mixture of experts that is not known by name; "
            "give layers, hidden, experts, top_k and expert_ffn"
        )
