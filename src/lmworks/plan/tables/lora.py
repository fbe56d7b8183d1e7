"""Rows that train low-rank adapters: their rank and layers, from columns of their own or from words.

Both must be told: code bases differ in the layers that they take, and on these depends what a step costs.
"""

from __future__ import annotations

import re
from typing import Any

from ...spec import ModelSpec, SpecError
from ...spec.lora import DEFAULT_ADAPTER, LoraSpec, block_adapter_weights
from .columns import Row, place

ADAPTERS = re.compile(r"(?i)\b(q?lora|dora|peft|adapters?)\b")
QUANTIZED = re.compile(r"(?i)\bqlora\b|\bnf4\b")
RANK = re.compile(r"(?i)\b(?:rank|r)\s*[-=: ]\s*(\d+)")
EVERY = re.compile(r"(?i)\ball[- ]linear\b|\ball linear layers\b|^all$")
# Layers by the names of code bases: Hugging Face's, Megatron's, and whole halves of a block.
MODULES = [
    (r"\bq_proj\b", ("attention.q",)),
    (r"\bk_proj\b", ("attention.k",)),
    (r"\bv_proj\b", ("attention.v",)),
    (r"(linear|attention)_qkv\b|\bqkv_proj\b|\bquery_key_value\b", ("attention.q", "attention.k", "attention.v")),
    (r"\bo_proj\b|\blinear_proj\b", ("attention.out",)),
    (r"\bgate_proj\b", ("mlp.gate",)),
    (r"\bup_proj\b", ("mlp.up",)),
    (r"\blinear_fc1\b|\bgate_up_proj\b", ("mlp.gate", "mlp.up")),
    (r"\bdown_proj\b|\blinear_fc2\b", ("mlp.down",)),
    (r"^(attention|attn)$", ("attention",)),
    (r"^(mlp|ffn)$", ("mlp",)),
]  # fmt: skip


def lora_named(row: Row, model: ModelSpec) -> LoraSpec:
    """Without a rank where all weights are trained."""
    said = [f"{place(name)}{found[0]!r}" for name, cell in words(row).items() if (found := ADAPTERS.search(cell))]
    rank, targets = row.whole("lora_rank") or 0, row.text("lora_targets")
    if not said and not rank:
        return LoraSpec()
    text = "; ".join(words(row).values())
    if not rank and (found := RANK.search(text)):
        rank = int(found[1])
    if not targets and (every := EVERY.search(text)):
        targets = every[0]
    if not rank or not targets:
        missing = " and ".join([*["lora_rank"] * (not rank), *["lora_targets"] * (not targets)])
        raise SpecError(
            f"{[*said, f'lora_rank = {rank}'][0]}: training of adapters is priced where a row tells {missing} too"
        )
    lora = LoraSpec(rank=rank, targets=targets_named(targets, model), base="nf4" if QUANTIZED.search(text) else "")
    if model.experts and (not lora.targets or any(target.startswith("mlp") for target in lora.targets)):
        raise SpecError(f"lora_targets = {targets!r}: adapters of experts are not priced, those of attention are")
    return lora


def words(row: Row) -> dict[str, str]:
    """Cells that may say what is trained: not where the row comes from."""
    return {column: cell for column, cell in row.cells.items() if column not in ("origin", "lora_rank", "lora_targets")}


def targets_named(cell: str, model: ModelSpec) -> list[str]:
    """As `lora.targets`; none: all linear layers."""
    if EVERY.search(cell):
        return []
    found: list[str] = []
    for word in re.split(r"[\s,;+|'\"\[\]]+", cell.lower()):
        names = next((names for pattern, names in MODULES if re.search(pattern, word)), ())
        if word and not names:
            raise SpecError(f"lora_targets = {cell!r}: {word!r} is not known; use q_proj, linear_qkv, attention, all …")
        found += names
    if not model.gated_mlp:
        found = [name for name in found if name != "mlp.gate"]
    return list(dict.fromkeys(found))


def adapters_of(lora: LoraSpec, model: ModelSpec) -> dict[str, Any]:
    """Of a case."""
    adapters = (DEFAULT_ADAPTER,) if lora.rank else ()
    return {"adapters": tuple(block_adapter_weights(model, lora, adapters)), "frozen_base": lora.base}
