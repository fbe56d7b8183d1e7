"""LoRA and DoRA adapters in PEFT's format: a folder with adapter_config.json and adapter_model.safetensors.

An adapter changes a weight by a low-rank product, W + scale · B·A, with A (rank, in), B (out, rank) and scale = alpha /
rank, or alpha / √rank with rsLoRA (Hu et al. 2022; Kalajdzievski 2023). Names are those of the Hugging Face model;
`hf_layout` maps them to ours. A scalar head that was trained with the adapters is one of PEFT's `modules_to_save`.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..spec import CheckpointError, ModelSpec, SpecError, components
from ..spec.hf_config import family_of_spec
from ..spec.lora import ADAPTERS, DEFAULT_ADAPTER, LoraSpec, target_linears
from .hf import one_line, read_json
from .hf_layout import Stored, layout
from .hf_write import part, write_json
from .tensor_files import save_tensors

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX, MAGNITUDE = "base_model.model.", "lora_magnitude_vector"
TENSOR = re.compile(rf"base_model\.model\.(.+)\.(?:lora_([AB])\.weight|({MAGNITUDE}))")
HEAD = "score"  # of AutoModelForSequenceClassification
# Options that are not supported: the key, and the values that mean it is not used.
UNUSED: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": (None, "none"),
    "lora_bias": (None, False),
    "layer_replication": (None, []),
    # Others (pissa, olora, corda, loftq) also change the base weights before training.
    "init_lora_weights": (None, False, "gaussian", "eva", "orthogonal", True),
}


@dataclass(frozen=True)
class PeftLayer:
    """The update of one of our weights; `module`: the layer in the Hugging Face model."""

    module: str
    lora_A: Tensor
    lora_B: Tensor
    scale: float
    magnitude: Tensor | None = None  # DoRA

    @property
    def rank(self) -> int:
        return self.lora_A.shape[0]


@dataclass(frozen=True)
class PeftAdapter:
    folder: Path
    layers: dict[str, PeftLayer]  # by the name of our weight
    score: Tensor | None = None  # the scalar head

    def check(self, model: ModelSpec, lora: LoraSpec) -> None:
        """Whether it is an adapter of these options, to go on training it."""
        targets = {linear.name for linear in target_linears(model, lora)}
        for name, layer in self.layers.items():
            for key, here, there in (
                ("rank", lora.rank, layer.rank),
                ("dora", lora.dora, layer.magnitude is not None),
            ):
                if here != there:
                    raise SpecError(f"lora.{key} = {str(here).lower()}, but {self.folder} has {str(there).lower()}")
            if not math.isclose(lora.scale, layer.scale, rel_tol=1e-6):
                raise SpecError(
                    f"lora.alpha = {lora.alpha:g}: the scale would be {lora.scale:g}, but {self.folder} was trained "
                    f"with {layer.scale:g}"
                )
            if (linear := linear_name(name)) not in targets:
                raise SpecError(f"lora.targets: {self.folder} changes {linear!r}; add it")
        found = {linear_name(name) for name in self.layers}
        if missing := sorted(targets - found):
            raise SpecError(f"lora.targets: {self.folder} does not change {missing[0]!r}; name {', '.join(found)}")

    def weight(self, name: str) -> Tensor:
        """Of a run's adapter: blocks.0.attention.q.adapters.default.lora_A."""
        layer, _, rest = name.partition(f".{ADAPTERS}.")
        found: Tensor = getattr(self.layers[f"{layer}.weight"], rest.partition(".")[2])
        return found


def linear_name(weight: str) -> str:
    """Of a layer within its block: attention.q."""
    return weight.split(".", 2)[2].removesuffix(".weight")


def adapted_modules(spec: ModelSpec) -> dict[str, Stored]:
    """Linear layers of blocks by their names in the Hugging Face model."""
    linears = {f"{linear.name}.weight" for linear in components.linears(spec)}
    whole = layout(spec, family_of_spec(spec))
    inside = (one for one in whole if all(part.split(".", 2)[-1] in linears for part in one.parts))
    return {one.name.removesuffix(".weight"): one for one in inside}


# --- reading --------------------------------------------------------------------------------------------------


def read_peft(folder: Path, spec: ModelSpec, dora: bool = True) -> PeftAdapter:
    """An adapter with anything unsupported is refused; `dora`: whether DoRA is supported."""
    config = read_json(folder / CONFIG)
    heads: tuple[Any, ...] = ([HEAD], ["classifier", HEAD]) if spec.scalar_head else ()
    choices = UNUSED | {"modules_to_save": (*heads, None, []), **({} if dora else {"use_dora": (None, False)})}
    for key, harmless in choices.items():
        if config.get(key) not in harmless:
            raise SpecError(
                f"{folder / CONFIG}: {key} = {config.get(key)!r} is not supported; it must be {harmless[-1]!r}"
            )
    modules, score = read_modules(folder / WEIGHTS)
    stored = adapted_modules(spec)
    shapes = {f"{linear.name}.weight": (linear.outputs, linear.inputs) for linear in components.linears(spec)}
    layers: dict[str, PeftLayer] = {}
    for module, found in modules.items():
        if module in stored and stored[module].order:
            raise SpecError(
                f"{folder / WEIGHTS}: '{module}' has heads in another order here; merge the adapter with peft"
            )
        if module not in stored:
            raise SpecError(
                f"{folder / WEIGHTS}: it changes '{module}', which is not a linear layer in a block of this model"
            )
        scale = scale_of(config, module, found["A"].shape[0], folder)
        layer = PeftLayer(module, found["A"], found["B"], scale, found.get(MAGNITUDE))
        layers |= cut(stored[module], layer, shapes, folder)
    return PeftAdapter(folder, layers, score)


def read_modules(path: Path) -> tuple[dict[str, dict[str, Tensor]], Tensor | None]:
    """A, B and magnitudes of every adapted layer by its name in the Hugging Face model; the scalar head."""
    found: dict[str, dict[str, Tensor]] = {}
    score = None
    try:
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118  # not a mapping
                if key == f"{PREFIX}{HEAD}.weight":
                    score = file.get_tensor(key)
                    continue
                match = TENSOR.fullmatch(key)
                if match is None:
                    raise SpecError(f"{path}: tensor '{key}' is not a LoRA matrix of a linear layer")
                found.setdefault(match[1], {})[match[2] or match[3]] = file.get_tensor(key)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file, and an adapter needs it") from None
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: not a whole safetensors file ({one_line(error)})") from None
    if not found:
        raise CheckpointError(f"{path}: it holds no LoRA matrices")
    for module, matrices in found.items():
        pair = [matrices.get(name) for name in "AB"]
        whole = all(matrix is not None and matrix.dim() == 2 and matrix.numel() for matrix in pair)
        if not whole or matrices["A"].shape[0] != matrices["B"].shape[1]:
            raise CheckpointError(f"{path}: the two matrices of '{module}' do not fit together")
        if MAGNITUDE in matrices and matrices[MAGNITUDE].numel() != matrices["B"].shape[0]:
            raise CheckpointError(f"{path}: '{module}.{MAGNITUDE}' does not have one number for each output")
    return found, score


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


def cut(stored: Stored, layer: PeftLayer, shapes: Mapping[str, tuple[int, int]], folder: Path) -> dict[str, PeftLayer]:
    """Where the layer is several of our weights side by side (GPT-2's q, k, v), each has its rows of B, and all A."""
    parts = [shapes[name.split(".", 2)[2]] for name in stored.parts]
    expected = sum(outputs for outputs, _ in parts), parts[0][1]
    if (found := (layer.lora_B.shape[0], layer.lora_A.shape[1])) != expected:
        raise CheckpointError(
            f"{folder / WEIGHTS}: '{stored.name}' is {expected[0]} × {expected[1]} in this model, "
            f"but the adapter was made for {found[0]} × {found[1]}"
        )
    rows = [outputs for outputs, _ in parts]
    magnitudes = [None] * len(rows) if layer.magnitude is None else layer.magnitude.flatten().split(rows)
    pieces = zip(stored.parts, layer.lora_B.split(rows), magnitudes, strict=True)
    return {name: PeftLayer(layer.module, layer.lora_A, up, layer.scale, magnitude) for name, up, magnitude in pieces}


# --- writing --------------------------------------------------------------------------------------------------


def write_peft(
    folder: Path,
    spec: ModelSpec,
    lora: LoraSpec,
    weights: Mapping[str, Tensor],
    base: str,
    adapter: str = DEFAULT_ADAPTER,
) -> None:
    """A folder that `peft` reads, from the adapter's weights by our names; `base`: where the base model is."""
    targets = {f"{linear.name}.weight" for linear in target_linears(spec, lora)}
    tensors: dict[str, Tensor] = {}
    ranks, alphas, modules = dict[str, int](), dict[str, float](), list[str]()
    for module, stored in adapted_modules(spec).items():
        own = [name for name in stored.parts if name.split(".", 2)[2] in targets]
        if not own:
            continue
        if stored.order:
            raise SpecError(
                f"lora.targets: '{module}' has heads in another order there, and cannot be written for PEFT"
            )
        if lora.dora and own != list(stored.parts):
            raise SpecError(f"lora.targets: PEFT trains the norms of '{module}' as one; name all of its parts")
        modules.append(module)
        joined = join(own, stored, spec, weights, adapter)
        tensors |= {f"{PREFIX}{module}.{key}": tensor for key, tensor in joined.items()}
        if len(own) > 1:  # block-diagonal, of a higher rank and with the same scale
            ends = module.rpartition(".")[2]
            ranks[ends] = len(own) * lora.rank
            alphas[ends] = lora.alpha * (math.sqrt(len(own)) if lora.rslora else len(own))
    if spec.scalar_head:
        tensors[f"{PREFIX}{HEAD}.weight"] = weights[components.SCORE]
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if spec.scalar_head else "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "use_rslora": lora.rslora,
        "use_dora": lora.dora,
        "target_modules": target_modules(modules, spec),
        "modules_to_save": [HEAD] if spec.scalar_head else None,
        "rank_pattern": ranks,
        "alpha_pattern": alphas,
        "bias": "none",
        "fan_in_fan_out": family_of_spec(spec) == "gpt2",  # its layers are Conv1D
        "init_lora_weights": True,
        "inference_mode": True,
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / CONFIG).unlink(missing_ok=True)
        save_tensors({name: tensor.contiguous() for name, tensor in tensors.items()}, part(folder / WEIGHTS))
        part(folder / WEIGHTS).replace(folder / WEIGHTS)
        write_json(folder / CONFIG, config)
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be written ({one_line(error)})") from None


def join(
    own: list[str], stored: Stored, spec: ModelSpec, weights: Mapping[str, Tensor], adapter: str
) -> dict[str, Tensor]:
    """PEFT's tensors of a stored layer. Parts side by side (GPT-2's q, k, v): A stacked, B block-diagonal."""
    layers = {
        name: {key: weights.get(f"{name.removesuffix('.weight')}.{ADAPTERS}.{adapter}.{key}") for key in KEYS}
        for name in own
    }
    downs = [layer["lora_A"] for layer in layers.values()]
    ups: list[Tensor] = []
    outputs = {f"{linear.name}.weight": linear.outputs for linear in components.linears(spec)}
    rank = sum(len(down) for down in downs if down is not None)
    column = 0
    for name in stored.parts:
        rows = torch.zeros(outputs[name.split(".", 2)[2]], rank)
        if name in layers:
            up = layers[name]["lora_B"]
            assert up is not None
            rows[:, column : column + up.shape[1]] = up
            column += up.shape[1]
        ups.append(rows)
    found = {"lora_A.weight": torch.cat([down.float() for down in downs if down is not None])}
    found["lora_B.weight"] = torch.cat(ups)
    magnitudes = [layer["magnitude"] for layer in layers.values() if layer["magnitude"] is not None]
    return found | ({MAGNITUDE: torch.cat(magnitudes).float()} if magnitudes else {})


KEYS = ("lora_A", "lora_B", "magnitude")


def target_modules(modules: list[str], spec: ModelSpec) -> list[str]:
    """The ends of their names; within a layer where layers without an adapter have the same end."""
    others = {name.rpartition(".")[2] for name in linear_modules(spec) if name not in modules}
    inside = {re.sub(r"^.*?\.\d+\.", "", module) for module in modules}
    return sorted({name.rpartition(".")[2] if name.rpartition(".")[2] not in others else name for name in inside})


def linear_modules(spec: ModelSpec) -> list[str]:
    """All matrices of blocks, experts included, by their names in the Hugging Face model."""
    return [
        one.name.removesuffix(".weight")
        for one in layout(spec, family_of_spec(spec))
        if one.parts[0].startswith("blocks.")
    ]
