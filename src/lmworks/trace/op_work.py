"""FLOPs and bytes of single operators from their recorded shapes, and the floor: the least time they can take.

Bytes are those an operator must read and write: its inputs, and its output where that follows from them. The floor is
the longer of FLOPs at the device's peak and bytes at its bandwidth: of the datasheet for a GPU of the catalogue, of
the machine's measurement for our own runs on a CPU.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..spec import recognise
from .kineto import item_size
from .model import Trace

PRODUCT = re.compile(r"^aten::(mm|addmm|bmm|baddbmm|_scaled_mm)$")
ATTENTION = re.compile(
    r"^aten::_scaled_dot_product_(?:fused|flash|efficient|cudnn)_attention(?:_for_cpu)?(?P<backward>_backward)?$"
)
# Return views or new memory, read a part of their inputs that shapes do not tell, or call ops that have the traffic.
NO_TRAFFIC = re.compile(
    r"^aten::(?:view|_unsafe_view|reshape|as_strided|t|transpose|permute|narrow|slice|select|split|split_with_sizes|chunk"
    r"|unbind|expand|squeeze|unsqueeze|flatten|unflatten|alias|detach|lift_fresh|resolve_conj|resolve_neg|result_type"
    r"|item|_local_scalar_dense|to|type_as|contiguous|empty|empty_like|empty_strided|new_empty|resize_|set_|linear|matmul"
    r"|scaled_dot_product_attention|embedding|index|index_select|gather|scatter_add_|embedding_dense_backward"
    r"|embedding_backward|nll_loss\w*|cross_entropy_loss|log_softmax|softmax|dropout|layer_norm|rms_norm|square|clone|zero_"
    r"|view_as|reshape_as|expand_as|_to_copy|new_full|new_zeros|full_like|zeros_like|ones_like)$"
)
REDUCES = re.compile(r"^aten::(?:sum|mean|amax|amin|argmax|norm|linalg_vector_norm|any|all)$")
DTYPES = {"float": "fp32", "c10::bfloat16": "bf16", "c10::half": "fp16", "half": "fp16", "bfloat16": "bf16"}
DTYPES |= {"c10::float8_e4m3fn": "fp8", "c10::float8_e5m2": "fp8"}


@dataclass(frozen=True)
class Peaks:
    """FLOP/s by number format, and bytes/s."""

    flops: Mapping[str, float]
    bytes: float

    def seconds(self, flops: float | None, moved: float | None, dtype: str) -> float | None:
        """The least time; None where neither amount nor its rate is known."""
        rate = self.flops.get(dtype)
        bounds = [flops / rate] if flops and rate else []
        bounds += [moved / self.bytes] if moved and self.bytes else []
        return max(bounds, default=None)


def peaks_of(trace: Trace) -> Peaks | None:
    """Of a device that the catalogue knows; of a CPU, as our own run's machine was measured."""
    gpu = recognise(trace.device) if trace.device else None
    if gpu is not None:
        flops = {dtype: peak for dtype in ("fp32", "bf16", "fp16", "fp8") if (peak := gpu.peak_flops(dtype))}
        # Products of fp32 may run in TF32, at half the rate of bf16: a floor holds for both.
        if flops.keys() >= {"fp32", "bf16"}:
            flops["fp32"] = max(flops["fp32"], flops["bf16"] / 2)
        return Peaks(flops, 1e9 * gpu.bandwidth_gbs)
    rates = trace.about.get("machine_rates")
    if trace.on_device or not isinstance(rates, dict):
        return None
    return Peaks(rates.get("flops_per_s", {}), rates.get("bytes_per_s", 0.0))


def parse_shapes(text: str) -> tuple[list[Any], list[str]]:
    """Dims and types of the inputs; types may be missing."""
    decoder = json.JSONDecoder()
    dims, end = decoder.raw_decode(text)
    rest = text[end:].strip()
    return dims, decoder.raw_decode(rest)[0] if rest else []


def tensor_bytes(dims: Sequence[Any], types: Sequence[str]) -> list[int]:
    """Of every input that is a tensor with a known type."""
    sizes = [item_size(kind) or 0 for kind in types]
    plain = [bool(one) and all(isinstance(size, int) for size in one) for one in dims]
    return [math.prod(one) * size for one, size, flat in zip(dims, sizes, plain, strict=False) if flat]


def input_bytes(dims: Sequence[Any], types: Sequence[str]) -> int:
    return sum(tensor_bytes(dims, types))


def op_flops(name: str, dims: Sequence[Any]) -> float | None:
    """Multiplications and additions, by torch.utils.flop_counter's rules.

    2·m·k·n for a product. Attention has two products forward, and backward five, as scores are computed again; what a
    causal mask skips is counted.
    """
    try:
        if match := PRODUCT.match(name):
            first = 1 if match[1].startswith(("add", "badd")) else 0
            left, right = dims[first], dims[first + 1]
            return 2.0 * math.prod(left) * right[-1]
        if match := ATTENTION.match(name):
            query, key, value = dims[1:4] if match["backward"] else dims[:3]
            scores = 2.0 * math.prod(query[:-1]) * key[-2]
            return scores * (3 * query[-1] + 2 * value[-1] if match["backward"] else query[-1] + value[-1])
    except (IndexError, TypeError, ValueError):
        pass
    return None


def op_bytes(name: str, dims: Sequence[Any], types: Sequence[str]) -> float | None:
    """Read and written; None where shapes do not tell."""
    lists = any(isinstance(one, list) and one and isinstance(one[0], list) for one in dims)  # whose types are not told
    if not name.startswith("aten::") or NO_TRAFFIC.match(name) or lists:
        return None
    inputs = tensor_bytes(dims, types)
    if not inputs:
        return None
    try:
        if match := PRODUCT.match(name):
            first = 1 if match[1].startswith(("add", "badd")) else 0
            used = inputs[: first + 2]
            width = item_size(types[first]) or 0
            return float(sum(used) + math.prod(dims[first][:-1]) * dims[first + 1][-1] * width)
        if match := ATTENTION.match(name):  # and the output, as wide as queries; backward three gradients
            return float(sum(inputs) + (sum(inputs[1:4]) if match["backward"] else inputs[0]))
    except (IndexError, TypeError):
        return float(sum(inputs))
    if name.endswith("::fill_"):
        return float(inputs[0])
    if name.endswith("::copy_"):  # writes the first and does not read it
        return float(sum(inputs[:2]))
    return float(sum(inputs) + (0 if REDUCES.match(name) else inputs[0] if name.endswith("_") else max(inputs)))


def op_floor(name: str, dims: Sequence[Any], types: Sequence[str], peaks: Peaks) -> float | None:
    """Of one call. A causal kernel skips half of the scores, and shapes do not tell whether it is one."""
    flops = op_flops(name, dims)
    if flops is not None and ATTENTION.match(name):
        flops /= 2
    dtype = next((DTYPES[kind.lower()] for kind in types if kind.lower() in DTYPES), "")
    return peaks.seconds(flops, op_bytes(name, dims, types), dtype)
