"""The shape of the model in a row of a table: from its columns, its name, or no more than its size."""

from __future__ import annotations

import re
from typing import Any

from ...spec import ModelSpec, SpecError
from .columns import Row
from .names import GPT, shape_named

COUNTS = ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "experts", "top_k", "shared_experts")
USUAL_VOCAB = {"swiglu": 32_000, "gelu": 51_200}


def model_of(row: Row, seq: int) -> ModelSpec:
    """What the row says wins; a known name fills the rest; then the usual."""
    given = {key: value for key in (*COUNTS, "expert_ffn") if (value := row.whole(key))}
    tied = row.flag("tie_embeddings")
    if tied is not None:
        given["tie_embeddings"] = tied
    known = named(row, given)
    if not known and not {"layers", "hidden"} <= given.keys():
        known = by_size(row, given)
    shape = {**known, **given}
    if "heads" not in shape:
        shape["heads"] = max(1, shape["hidden"] // 128)
        row.assume("heads", f"heads = {shape['heads']}: 128 wide")
    shape.update({key: value for key, value in style(row, shape).items() if key not in shape})
    if "vocab" not in shape:
        shape["vocab"] = USUAL_VOCAB[shape["mlp"]]
        row.assume("vocab", f"vocab = {shape['vocab']}")
    if shape.get("experts"):  # the spec's experts are SwiGLU without biases
        shape.update(mlp="swiglu", bias=False)
        if "top_k" not in shape:
            row.assume("top_k", "top_k = 2")
    return ModelSpec.from_dict({**shape, "context": max(seq, 1)})


def named(row: Row, given: dict[str, Any]) -> dict[str, Any]:
    """The public model of that name. A run of fewer layers is still of that family; a row of other widths is not."""
    parts = row.text("model").split("; ")  # a family and a size may have a column each
    found = shape_named(row.text("model")) or shape_named("-".join(parts)) or shape_named("-".join(reversed(parts)))
    if not found:
        return {}
    note = found.pop("note", "")
    if any(key in given and found.get(key, given[key]) != given[key] for key in ("hidden", "ffn")):
        return {
            key: found[key] for key in ("norm", "positions", "mlp", "bias", "tie_embeddings", "qk_norm") if key in found
        }
    if note:
        row.assume("model", f"model: {note}")
        given.pop("kv_heads", None)
    return {key: value for key, value in found.items() if key not in ("context", "rope_scaling", "rope_theta")}


def by_size(row: Row, given: dict[str, Any]) -> dict[str, Any]:
    """A public shape of as many parameters, or 12 × layers × hidden² with 128 of width a layer, as GPT-3 has it."""
    size = row.real("params") or 1e9 * (row.real("params_b") or 0) or size_in(row.text("model"))
    if not size:
        raise SpecError(
            f"model = {row.text('model')!r} is not a known name, and neither layers and hidden nor params are given"
        )
    if 0 < size < 2000:  # a column of billions without saying so
        size *= 1e9
    written = f"{size / 1e9:g}b" if size >= 1e9 else f"{size / 1e6:g}m"
    shape = shape_named(f"gpt3-{written}") or shape_named(f"llama-{written}")
    if not shape or "layers" in given or "hidden" in given:
        hidden = given.get("hidden") or max(128, round((size / 12 * 128) ** (1 / 3) / 128) * 128)
        shape = {**GPT, "hidden": hidden, "layers": given.get("layers") or max(1, round(size / (12 * hidden**2)))}
    row.assume("model", f"model: {written.upper()} parameters as {shape['layers']} layers of {shape['hidden']}")
    return shape


def size_in(name: str) -> float:
    """7e9 of "my model 7B"; 0 where the name has no size."""
    found = re.search(r"(?i)(?<![a-z0-9.])(\d+(?:\.\d+)?)\s*([bmt])(?![a-z0-9])", name)
    return float(found[1]) * {"m": 1e6, "b": 1e9, "t": 1e12}[found[2].lower()] if found else 0.0


def style(row: Row, shape: dict[str, Any]) -> dict[str, Any]:
    """Llama's kind of block or GPT's, where no name says so: by the MLP that is given, or by its width."""
    word = row.text("mlp").lower()
    grouped = shape.get("kv_heads", shape["heads"]) != shape["heads"]
    ffn = shape.get("ffn", 0)
    llama = bool(shape.get("experts")) or grouped or (ffn and ffn < 3.5 * shape["hidden"])
    if word:
        llama = any(part in word for part in ("swi", "silu", "glu")) and "relu" not in word
    elif shape.get("mlp"):
        llama = shape["mlp"] == "swiglu"
    elif not llama and ffn and ffn != 4 * shape["hidden"]:
        llama = True
    return {"mlp": "swiglu"} if llama else dict(GPT)
