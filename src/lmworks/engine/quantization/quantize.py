"""Quantization with a quality gate: calibrate, round, evaluate, reject a network that lost too much.

Half of the calibration text is for rounding, the other half for evaluation. A network whose perplexity rises by more
than `limit` is rejected: nothing is written, and the error names the layers with the largest output errors.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from ...kernels.inference.quantized import GROUPS
from ...model.gpt import GPT
from ...parallel.preflight import memory_limits
from ...plan.memory.fit import sentence, total
from ...plan.memory.peak_memory import Row, row
from ...spec import DataError, LMWorksError, ModelSpec, SpecError, components
from .calibrated_rounding import LayerReport, Make, loss_on, quantize_layers
from .quantized_model import check_quantizable, get_scheme, served_bytes

LIMITS = {"int8": 0.02, "int4": 0.05, "fp8": 0.02}  # allowed relative increase of perplexity
ROWS_TOKENS = 4096  # of a batch


class QuantizationRefused(LMWorksError):
    """The quantized network lost more than was allowed."""

    def __init__(self, message: str, report: Report) -> None:
        super().__init__(message)
        self.report = report


@dataclass(frozen=True)
class Calibration:
    """Text as batches of tokens (rows, seq + 1)."""

    fit: list[Tensor]
    measure: list[Tensor]
    source: str  # where it comes from
    fingerprint: str  # of all its tokens, in order

    @classmethod
    def of(cls, ids: Sequence[int] | Tensor, seq: int, vocab: int, source: str) -> Self:
        """Windows of seq + 1 tokens, every second one for evaluation."""
        tokens = torch.as_tensor(ids, dtype=torch.int64)
        count = len(tokens) // (seq + 1)
        if count < 4:
            raise DataError(
                f"{source}: {len(tokens):,} tokens are too few to calibrate on: at least four windows of {seq + 1:,}"
            )
        if int(tokens.max()) >= vocab:
            raise DataError(
                f"{source}: token {int(tokens.max())} is outside the model's vocabulary of {vocab:,}; it was made with "
                "another tokenizer"
            )
        windows = tokens[: count * (seq + 1)].view(count, seq + 1)
        digest = hashlib.sha256(windows.numpy().tobytes()).hexdigest()
        # At least two batches for rounding: the last quarter of them is for layer errors.
        rows = max(1, min(ROWS_TOKENS // seq, count // 4))
        return cls(list(windows[0::2].split(rows)), list(windows[1::2].split(rows)), source, digest)

    @property
    def tokens(self) -> int:
        return sum(batch.numel() for batch in (*self.fit, *self.measure))


@dataclass(frozen=True)
class Report:
    """Result of quantization."""

    scheme: str
    layers: tuple[LayerReport, ...]
    loss_before: float  # nats per token, on the evaluation half
    loss_after: float
    bytes_before: int  # of weights on a GPU: those not quantized in half precision
    bytes_after: int
    limit: float
    calibration: str  # source of the text
    calibration_fingerprint: str
    calibration_tokens: int

    @property
    def increase(self) -> float:
        """Relative increase of perplexity."""
        return math.expm1(min(700.0, self.loss_after - self.loss_before))

    @property
    def passed(self) -> bool:
        return math.isfinite(self.loss_after) and self.increase <= self.limit

    def worst(self, count: int = 3) -> list[LayerReport]:
        """Layers with the largest output errors; non-finite ones first."""
        return sorted(self.layers, key=lambda one: -math.inf if math.isnan(one.error) else -one.error)[:count]

    def to_dict(self) -> dict[str, Any]:
        """For JSON: non-finite numbers are null."""
        derived = {
            "perplexity_before": math.exp(min(700.0, self.loss_before)),
            "perplexity_after": math.exp(min(700.0, self.loss_after)),
            "perplexity_increase": self.increase,
            "worst_layers": [layer.name for layer in self.worst()],
        }
        return finite({**dataclasses.asdict(self), **derived, "passed": self.passed})


def finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def quantize(
    model: GPT,
    scheme: str,
    calibration: Calibration,
    *,
    group: int = GROUPS[0],
    limit: float | None = None,
    progress: Callable[[LayerReport], None] | None = None,  # called after each layer
    make: Make | None = None,
) -> Report:
    """Quantize a network in place. Raises QuantizationRefused if it lost too much; the network is then unusable."""
    chosen = get_scheme(scheme)
    check_quantizable(model, scheme)
    model.eval().requires_grad_(False)
    loss_before, bytes_before = loss_on(model, calibration.measure), served_bytes(model)
    if not math.isfinite(loss_before):
        raise LMWorksError(
            f"the loss of the model as it is, on {calibration.source}, is {loss_before}: there is nothing to keep; "
            "are its weights damaged?"
        )
    layers: list[LayerReport] = []
    for layer in quantize_layers(model, chosen, [batch[:, :-1] for batch in calibration.fit], group, make):
        layers.append(layer)
        if progress is not None:
            progress(layer)
    report = Report(
        scheme=scheme,
        layers=tuple(layers),
        loss_before=loss_before,
        loss_after=loss_on(model, calibration.measure),
        bytes_before=bytes_before,
        bytes_after=served_bytes(model),
        limit=LIMITS[scheme] if limit is None else limit,
        calibration=calibration.source,
        calibration_fingerprint=calibration.fingerprint,
        calibration_tokens=calibration.tokens,
    )
    if not report.passed:
        raise QuantizationRefused(refusal(report), report)
    return report


def refusal(report: Report) -> str:
    names = ", ".join(f"{layer.name} ({layer.error:.1%} off)" for layer in report.worst())
    return (
        f"{report.scheme} raised perplexity from {math.exp(min(700.0, report.loss_before)):.4g} to "
        f"{math.exp(min(700.0, report.loss_after)):.4g} ({report.increase:+.2%}), more than the {report.limit:.1%} "
        f"allowed; nothing was written. The worst layers: {names}. "
        "A wider scheme, more calibration text or a higher --max-loss-increase would let it pass"
    )


# --- memory ----------------------------------------------------------------------------------------------


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
    """Before anything is loaded; the error has the most tokens that would fit, or the memory of the weights alone."""
    limits = memory_limits(device)

    def fits(fewer: int) -> bool:
        return limits.fits([total(peak_rows(model, scheme, fewer, width))])

    if fits(tokens):
        return
    rows = peak_rows(model, scheme, tokens, width)
    fewer = next((count for power in range(1, 11) if fits(count := tokens >> power)), 0)
    least = f"the weights alone take {width * model.params / 2**30:.3g} GiB"
    raise SpecError(sentence(name, [total(rows)], rows, limits, f"--tokens {fewer} would fit" if fewer else least))
