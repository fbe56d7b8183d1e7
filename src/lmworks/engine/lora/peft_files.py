"""LoRA adapters in PEFT's format: a folder with adapter_config.json and adapter_model.safetensors.

An adapter changes a weight by a low-rank product, W + scale·B·A, with A (rank, in), B (out, rank) and scale = alpha /
rank, or alpha / √rank with rsLoRA (Hu et al. 2022; Kalajdzievski 2023). Names are those of the Hugging Face model;
`model.hf_layout` maps them to ours.
"""

from __future__ import annotations

import math
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ...model.gpt import GPT
from ...model.hf import read_json
from ...model.hf_config import family_of_spec
from ...model.hf_layout import Stored, layout
from ...spec import CheckpointError, ModelSpec, SpecError, components

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
TENSOR = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
# Options that are not supported: the key, and the values that mean it is not used.
UNUSED: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": (None, "none"),
    "use_dora": (None, False),
    "modules_to_save": (None, []),
    "lora_bias": (None, False),
    "layer_replication": (None, []),
    # Others (pissa, olora, corda, loftq) also change the base weights before training.
    "init_lora_weights": (None, False, "gaussian", "eva", "orthogonal", True),
}


@dataclass(frozen=True)
class Delta:
    """The update of one weight: up · down, with the scale in `up`."""

    down: Tensor  # A: (rank, in)
    up: Tensor  # scale · B: (out, rank)


@dataclass(frozen=True)
class Adapter:
    name: str
    deltas: dict[str, Delta]  # by the name of our weight

    @property
    def rank(self) -> int:
        """The largest rank of its layers."""
        return max(delta.down.shape[0] for delta in self.deltas.values())


def read_adapter(name: str, folder: Path, spec: ModelSpec, dtype: torch.dtype) -> Adapter:
    """In fp32, for use in `dtype`; an adapter with anything unsupported is rejected."""
    config = read_json(folder / CONFIG)
    for key, harmless in UNUSED.items():
        if config.get(key) not in harmless:
            raise SpecError(
                f"{folder / CONFIG}: {key} = {config.get(key)!r} is not supported; it must be {harmless[-1]!r}"
            )
    pairs = read_pairs(folder / WEIGHTS)
    with torch.device("meta"):
        ours: dict[str, Tensor] = dict(GPT(spec).named_parameters())
    whole = layout(spec, family_of_spec(spec))
    linears = {f"{linear.name}.weight" for linear in components.linears(spec)}
    stored = {one.name.removesuffix(".weight"): one for one in whole if in_block(one, linears)}
    deltas: dict[str, Delta] = {}
    for module, (down, up) in pairs.items():
        if module not in stored:
            raise SpecError(
                f"{folder / WEIGHTS}: it changes '{module}', which is not a linear layer in a block of this model"
            )
        scale = scale_of(config, module, down.shape[0], folder)
        tensor = f"{folder / WEIGHTS}: '{module}.lora"
        delta = Delta(scaled(down, 1.0, dtype, f"{tensor}_A'"), scaled(up, scale, dtype, f"{tensor}_B'"))
        deltas |= dict(cut(stored[module], delta, ours, folder))
    return Adapter(name, deltas)


def scaled(matrix: Tensor, scale: float, dtype: torch.dtype, which: str) -> Tensor:
    """In fp32. Values that are not finite in `dtype` are rejected: times zero they are NaN in every row."""
    plain = matrix.float()
    whole = plain * scale
    if bool(whole.to(dtype).isfinite().all()):
        return whole
    if not bool(plain.isfinite().all()):
        raise CheckpointError(
            f"{which} holds NaN or infinity: the file is damaged, or the training diverged; use an earlier save of it"
        )
    largest, wide = float(plain.abs().max()) * abs(scale), torch.finfo(torch.bfloat16).max
    way = "use engine.dtype = 'bf16' or 'fp32'" if largest <= wide else "no engine.dtype reaches that"
    raise SpecError(
        f"{which} has numbers up to {largest:.3g}, its scale included, "
        f"but {str(dtype).removeprefix('torch.')} ends at {torch.finfo(dtype).max:.3g}: {way}"
    )


def in_block(stored: Stored, linears: set[str]) -> bool:
    """Whether it is one of these linear layers of a block."""
    return all(part.split(".", 2)[-1] in linears for part in stored.parts)


def read_pairs(path: Path) -> dict[str, tuple[Tensor, Tensor]]:
    """A and B of every adapted layer, by its name in the Hugging Face model."""
    found: dict[str, dict[str, Tensor]] = {}
    try:
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118  # not a mapping
                match = TENSOR.fullmatch(key)
                if match is None:
                    raise SpecError(f"{path}: tensor '{key}' is not a LoRA matrix of a linear layer")
                found.setdefault(match[1], {})[match[2]] = file.get_tensor(key)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file, and an adapter needs it") from None
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: not a whole safetensors file ({' '.join(str(error).split())})") from None
    if not found:
        raise CheckpointError(f"{path}: it holds no LoRA matrices")
    for module, both in found.items():
        whole = both.keys() == {"A", "B"} and all(matrix.dim() == 2 and matrix.numel() for matrix in both.values())
        if not whole or both["A"].shape[0] != both["B"].shape[1]:
            raise CheckpointError(f"{path}: the two matrices of '{module}' do not fit together")
    return {module: (both["A"], both["B"]) for module, both in found.items()}


def scale_of(config: dict[str, Any], module: str, rank: int, folder: Path) -> float:
    """alpha / rank or alpha / √rank; both may have exceptions by the name's ending."""
    try:
        declared = by_pattern(config.get("rank_pattern"), module, config.get("r"))
        alpha = by_pattern(config.get("alpha_pattern"), module, config.get("lora_alpha"))
    except (re.error, AttributeError, TypeError) as error:
        raise CheckpointError(f"{folder / CONFIG}: rank_pattern or alpha_pattern cannot be read ({error})") from None
    if declared != rank:
        raise CheckpointError(f"{folder}: '{module}' has rank {rank}, but {CONFIG} says {declared}")
    if not isinstance(alpha, int | float) or not abs(alpha) <= sys.float_info.max:  # which NaN is not either
        raise CheckpointError(f"{folder / CONFIG}: lora_alpha = {alpha!r:.60}: a number is expected")
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def by_pattern(patterns: dict[str, Any] | None, module: str, default: Any) -> Any:
    """A pattern is a regular expression for the end of a name, from a dot on."""
    for pattern, value in (patterns or {}).items():
        if re.fullmatch(rf"(.*\.)?({pattern})", module):
            return value
    return default


def cut(stored: Stored, delta: Delta, weights: dict[str, Tensor], folder: Path) -> list[tuple[str, Delta]]:
    """Where the layer is several of our weights side by side (GPT-2's q, k, v), each has its rows of B, and all A."""
    parts = [weights[name] for name in stored.parts]
    expected = sum(part.shape[0] for part in parts), parts[0].shape[1]
    if (found := (delta.up.shape[0], delta.down.shape[1])) != expected:
        raise CheckpointError(
            f"{folder / WEIGHTS}: '{stored.name}' is {expected[0]} × {expected[1]} in this model, "
            f"but the adapter was made for {found[0]} × {found[1]}"
        )
    pieces = delta.up.split([part.shape[0] for part in parts])
    return [(name, Delta(delta.down, up)) for name, up in zip(stored.parts, pieces, strict=True)]
