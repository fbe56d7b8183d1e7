"""Hugging Face folders, written a tensor at a time: what is in memory is one stored tensor and the weights in it.

Weights need not be in memory: `write_hf` reads each of them once, just before its first use, and frees it
after its last. Everything is written beside its place and renamed at the end, `config.json` last, without which nothing
loads the folder: an export that fails leaves an earlier one as it was.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..spec import CheckpointError, ModelSpec
from ..spec.files import sync_folder, write_whole
from ..spec.hf_config import config_of_spec, family_of_spec
from .hf import CONFIG, INDEX, SINGLE, one_line
from .hf_layout import Stored, layout, named_tensors
from .tensor_files import write_tensors

if TYPE_CHECKING:
    from .gpt import GPT

SHARD_BYTES = 5 * 10**9  # of one file, by default
WEIGHTS = re.compile(
    r"model(-[0-9]+-of-[0-9]+)?\.safetensors(\.index\.json)?(\.part)?"
)  # of any export, also of one that was killed
ProgressCallback = Callable[[int, int], None]
"""Called after each tensor with the bytes written so far, and the total."""


def save_hf(model: GPT, folder: Path, eos: int | list[int] | None = None, shard_bytes: int = SHARD_BYTES) -> None:
    """Write `model` in its own precision. Weights that an earlier export left in the folder are replaced."""
    parameters = named_tensors(model)
    write_hf(model.spec, parameters, parameters.__getitem__, folder, eos=eos, shard_bytes=shard_bytes)


@torch.no_grad()
def write_hf(
    spec: ModelSpec,
    parameters: dict[str, Tensor],
    read: Callable[[str], Tensor],
    folder: Path,
    *,
    eos: int | list[int] | None = None,
    shard_bytes: int = SHARD_BYTES,
    progress: ProgressCallback = lambda done, total: None,
) -> list[Path]:
    """The files of weights. `parameters` have shapes and precision, also on `meta`; `read` returns their values."""
    config = config_of_spec(spec, eos)
    config["torch_dtype"] = str(parameters["embed.weight"].dtype).removeprefix("torch.")
    tensors = list(layout(spec, family_of_spec(spec)))
    shards = list(split(tensors, parameters, shard_bytes))
    count = len(shards)
    names = [SINGLE] if count == 1 else [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    total = sum(nbytes(stored, parameters) for stored in tensors)
    values = with_progress(gathered(tensors, read), progress, total)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, shard in zip(names, shards, strict=True):
            write_tensors(part(folder / name), {stored.name: like(stored, parameters) for stored in shard}, values)
        if count > 1:
            of = {stored.name: name for name, shard in zip(names, shards, strict=True) for stored in shard}
            write_json(part(folder / INDEX), {"metadata": {"total_size": total}, "weight_map": of})
        write_json(part(folder / CONFIG), config)
        put_in_place(folder, [*names, *([INDEX] if count > 1 else [])])
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be written ({one_line(error)})") from None
    finally:
        for name in (*names, INDEX, CONFIG):
            drop(part(folder / name))
    return [folder / name for name in names]


def split(tensors: Iterable[Stored], parameters: dict[str, Tensor], limit: int) -> Iterator[list[Stored]]:
    """Consecutive tensors in groups of at most `limit` bytes (one that is larger stands alone)."""
    group: list[Stored] = []
    size = 0
    for stored in tensors:
        more = nbytes(stored, parameters)
        if group and size + more > limit:
            yield group
            group, size = [], 0
        group.append(stored)
        size += more
    yield group


def nbytes(stored: Stored, parameters: dict[str, Tensor]) -> int:
    return sum(view.nbytes for view in stored.views(parameters))


def like(stored: Stored, parameters: dict[str, Tensor]) -> Tensor:
    """Its shape and precision, without its values."""
    return torch.empty(stored.shape(parameters), dtype=parameters[stored.parts[0]].dtype, device="meta")


def gathered(tensors: Iterable[Stored], read: Callable[[str], Tensor]) -> Iterator[Tensor]:
    """Each tensor as it is stored. A weight is read before its first use and freed after its last."""
    tensors = list(tensors)
    last = {name: index for index, stored in enumerate(tensors) for name in stored.parts}
    held: dict[str, Tensor] = {}
    for index, stored in enumerate(tensors):
        held |= {name: read(name) for name in stored.parts if name not in held}
        yield stored.gather(held)
        held = {name: value for name, value in held.items() if last[name] > index}


def with_progress(values: Iterator[Tensor], progress: ProgressCallback, total: int) -> Iterator[Tensor]:
    done = 0
    for value in values:
        done += value.nbytes
        progress(done, total)
        yield value
        del value  # the next one is read while this name would hold it


# --- files ----------------------------------------------------------------------------------------------


def write_json(path: Path, data: dict[str, Any]) -> None:
    write_whole(path, json.dumps(data, indent=2) + "\n")


def part(path: Path) -> Path:
    return path.with_name(f"{path.name}.part")


def put_in_place(folder: Path, names: list[str]) -> None:
    """Between the first rename and the last the folder has no config.json: half old and half new would load."""
    (folder / CONFIG).unlink(missing_ok=True)
    for name in names:
        part(folder / name).replace(folder / name)
    for stale in folder.iterdir():
        if WEIGHTS.fullmatch(stale.name) and stale.name not in names:
            stale.unlink()
    part(folder / CONFIG).replace(folder / CONFIG)
    sync_folder(folder)


def drop(path: Path) -> None:
    with suppress(OSError):  # where nothing can be removed nothing was written; the first error is raised
        path.unlink(missing_ok=True)
