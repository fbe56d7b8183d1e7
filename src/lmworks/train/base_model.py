"""The frozen weights under the adapters of a run: where they are, a digest of them, and the adapters merged into them.

A checkpoint of such a run holds what is trained, and the digest. Whoever loads it reads the base from checkpoint.init
(a Hugging Face folder, a run folder or one of its checkpoints), and refuses one that is not what it was.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..checkpoint.format.index import read_index
from ..checkpoint.format.manifest import Manifest, read_committed
from ..checkpoint.format.survey import locate
from ..model import GPT
from ..model.gpt import initial_weight
from ..model.hf import CONFIG, check_same_network, weight_files
from ..model.lora import add_adapters, merged_weight, split_adapter_name
from ..parallel.initial_weights import Source, as_stored, base_source, is_hf
from ..spec import CheckpointError, RunSpec, SpecError, components
from ..spec.components import SCORE
from ..spec.lora import ADAPTERS
from .saved_weights import find, read_tensor, reader, spec_of


@dataclass(frozen=True)
class Base:
    digest: str
    checkpoint: Path | None = None  # the step folder, where it is that of a run


def find_base(spec: RunSpec) -> Base:
    """Every byte of it is read once: on one rank."""
    start = spec.checkpoint.init
    if not start:
        return Base(f"seed {spec.seed}")
    if is_hf(Path(start)):
        return Base(digest_of_files([Path(start) / CONFIG, *weight_files(Path(start))]))
    folder, manifest = find(locate(Path(start)), None)
    if spec_of(folder, manifest).adapters:
        raise SpecError(
            f"checkpoint.init = {start!r} is a run of adapters; make a model of it with `lmworks checkpoint export`"
        )
    return Base(digest_of_checkpoint(manifest), folder)


def digest_of_checkpoint(manifest: Manifest) -> str:
    files = {name: entry["digests"] for name, entry in sorted(manifest.files.items())}
    return hashlib.sha256(json.dumps(files).encode()).hexdigest()


def digest_of_files(paths: list[Path]) -> str:
    """Of names and contents; several files at a time."""

    def one(path: Path) -> str:
        with path.open("rb") as file:
            return f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}"

    try:
        with ThreadPoolExecutor(4) as pool:
            return hashlib.sha256("\n".join(pool.map(one, paths)).encode()).hexdigest()
    except OSError as error:
        raise CheckpointError(f"cannot read {error.filename}: {error.strerror}") from None


def check_base(spec: RunSpec, base: Base, saved: str | None, where: str) -> None:
    """`saved`: the digest in the checkpoint `where`."""
    if base.digest == saved:
        return
    pin = ""
    if base.checkpoint is not None:
        pin = f"; it has step {base.checkpoint.name} now: name the checkpoint itself, {base.checkpoint.parent}/step-…"
    raise SpecError(
        f"checkpoint.init = {spec.checkpoint.init!r} holds other weights than those that the adapters of {where} were "
        f"trained over: restore them{pin}"
    )


def base_weights(spec: RunSpec, base: Base) -> Source:
    """The base's weights by our names."""
    if base.checkpoint is None:
        return base_source(spec)
    manifest = read_committed(base.checkpoint)
    there = spec_of(base.checkpoint, manifest).model
    new_head = spec.model.scalar_head and not there.scalar_head
    check_same_network(there, spec.model.replace(scalar_head=there.scalar_head), str(base.checkpoint), "its run has")
    with torch.device("meta"):
        shapes: dict[str, Tensor] = GPT(there).state_dict()
    read = reader(base.checkpoint, manifest, shapes)

    def weight(name: str, shape: torch.Size) -> Tensor:
        return initial_weight(spec.model, spec.seed, name, shape) if new_head and name == SCORE else read(name)

    return weight


@torch.no_grad()
def fill_buffers(base: Base, buffers: Mapping[str, Tensor]) -> None:
    """What a base run keeps beside its weights: the choice bias of experts."""
    if base.checkpoint is not None and buffers:
        index = read_index(base.checkpoint, read_committed(base.checkpoint))
        for name, buffer in buffers.items():
            if saved := index.get(f"model.{name}"):
                buffer.copy_(read_tensor(base.checkpoint, saved))


# --- a trained adapter and its base ---------------------------------------------------------------------------


def trained_parameters(spec: RunSpec) -> dict[str, Tensor]:
    """Names and shapes of what the run trains, on the meta device."""
    with torch.device("meta"):
        model = GPT(spec.model)
        if spec.adapters:
            add_adapters(model, spec.lora, spec.adapters)
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def merged_reader(spec: RunSpec, base: Source, trained: Callable[[str], Tensor]) -> Callable[[str], Tensor]:
    """The weights of the plain network: those of the base, with the run's first adapter merged; in fp32."""
    with torch.device("meta"):
        shapes = {name: parameter.shape for name, parameter in GPT(spec.model).named_parameters()}
    own, adapter = trained_parameters(spec).keys(), spec.adapters[0]
    layers = {place[0] for name in own if (place := split_adapter_name(name))}

    def read(name: str) -> Tensor:
        if name in own:
            return trained(name)
        described = components.find(spec.model, name)
        weight, layer = as_stored(spec, described, base(name, shapes[name])), name.removesuffix(".weight")
        if layer not in layers or layer == name:
            return weight
        down, up = (trained(f"{layer}.{ADAPTERS}.{adapter}.{key}") for key in ("lora_A", "lora_B"))
        magnitude = trained(f"{layer}.{ADAPTERS}.{adapter}.magnitude") if spec.lora.dora else None
        return merged_weight(weight, down, up, spec.lora.scale, magnitude)

    return read
