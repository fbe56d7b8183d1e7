"""What `lmworks quantize` holds at its peak, and the refusal of what does not fit."""

from __future__ import annotations

import torch

from ...parallel.memory_preflight import free_for
from ...plan.memory.fit import sentence, total
from ...plan.memory.peak_memory import Row, row
from ...spec import ModelSpec, SpecError, components
from .quantize import ROWS_TOKENS


def peak_rows(model: ModelSpec, scheme: str, tokens: int, width: int) -> list[Row]:
    """Weights, the states between two blocks, one block's second moments (int4) and a batch of logits."""
    inputs = [linear.inputs for linear in components.linears(model)]
    moments = 4 * sum(size**2 for size in inputs) + 24 * max(inputs) ** 2 if scheme == "int4" else 0
    batch = min(tokens, ROWS_TOKENS)
    return [
        row("weights", width * model.params, f"{width} B × {model.params:,}"),
        row(
            "states between blocks", 2 * width * (tokens // 2) * model.hidden, "of half of the tokens, before and after"
        ),
        row("second moments", moments, "of one block, and a factor in fp64"),
        row("logits", (width + 8) * batch * model.vocab, f"of {batch:,} tokens, and their softmax in fp32"),
    ]


def check_memory(name: str, model: ModelSpec, scheme: str, tokens: int, width: int, device: torch.device) -> None:
    """Before anything is loaded; with the most tokens that would fit, or how much the rest takes without any."""
    limits = free_for(device)

    def fits(fewer: int) -> bool:
        return limits.fits([total(peak_rows(model, scheme, fewer, width))])

    if fits(tokens):
        return
    rows = peak_rows(model, scheme, tokens, width)
    fewer = next((count for power in range(1, 11) if fits(count := tokens >> power)), 0)
    least = f"the weights alone take {width * model.params / 2**30:.3g} GiB"
    raise SpecError(sentence(name, [total(rows)], rows, limits, f"--tokens {fewer} would fit" if fewer else least))
