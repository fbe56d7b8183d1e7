"""A run as a Hugging Face folder: weights and config as `transformers` reads them, and the tokenizer beside them.

Weights go from the checkpoint's files to those of the export one at a time, each put together from the pieces that
ranks have saved: what is in memory is the largest of them, not the model.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from .. import checkpoint
from ..checkpoint.format.digest import read_all
from ..checkpoint.format.index import SavedTensor, read_index
from ..checkpoint.format.manifest import Manifest
from ..checkpoint.format.survey import CheckpointLocation, locate
from ..checkpoint.save_plan import as_bytes
from ..data import Tokenizer, load_tokenizer, resolve
from ..data.index import TOKENIZER_FILE
from ..data.progress import Progress, silent
from ..data.tokenizer import FileTokenizer
from ..model import GPT
from ..model.hf_write import SHARD_BYTES, write_hf
from ..model.tensor_files import TORCH_DTYPES
from ..parallel.precision import DTYPES
from ..spec import CheckpointError, RunSpec, SpecError
from ..spec.files import check_writable, write_whole
from ..spec.hf_config import family_of_spec
from .load_run import RefusalLog

MARKER = "lmworks_export.json"  # the source of an export; a folder that has it may be overwritten


@dataclass(frozen=True)
class Export:
    folder: Path
    step: int
    params: int
    files: list[str]  # of weights
    tokenizer: bool  # whether one was there to go with it


def export(
    source: str | Path,
    out: Path,
    step: int | None = None,
    *,
    shard_bytes: int = SHARD_BYTES,
    progress: Progress = silent,
) -> Export:
    """Write the newest intact checkpoint (or that of `step`), whatever its layout was, for others to load."""
    check_output_folder(out)
    place = locate(Path(source))
    if place.run:
        family_of_spec(place.run.spec().model)  # refuses what no family can express, before a byte is read
    folder, manifest = find(place, step)
    spec = place.run.spec() if place.run else spec_of(folder, manifest)
    tokenizer = load_tokenizer(resolve(next(iter(spec.data.sources))))
    with torch.device("meta"):
        dtype = DTYPES[spec.precision.weights]
        parameters: dict[str, Tensor] = {name: weight.to(dtype) for name, weight in GPT(spec.model).named_parameters()}
    read = reader(folder, manifest, parameters)
    about = json.dumps({"run": str(Path(source).absolute()), "step": manifest.step}, indent=2)
    begin(out, about)
    written = write_hf(
        spec.model,
        parameters,
        read,
        out,
        eos=tokenizer.eot,
        shard_bytes=shard_bytes,
        progress=lambda done, total: progress("export", done, total),
    )
    finish(out, about, spec, tokenizer)
    return Export(
        out,
        manifest.step,
        spec.model.params,
        [path.name for path in written],
        isinstance(tokenizer, FileTokenizer),
    )


def check_output_folder(out: Path) -> None:
    try:
        if out.exists() and not out.is_dir():
            raise SpecError(f"{out} is a file; name a folder for the export")
        if out.is_dir() and any(out.iterdir()) and not (out / MARKER).is_file():
            raise SpecError(f"{out} is not empty and not an earlier export; name another folder")
        check_writable(out, "the export")
    except OSError as error:
        raise SpecError(f"cannot write {out}: {error.strerror}") from None


# --- reading ------------------------------------------------------------------------------------------


def find(place: CheckpointLocation, step: int | None) -> tuple[Path, Manifest]:
    """Every byte of a checkpoint is verified before the first is used; a damaged one is named, and the next taken."""
    refused = RefusalLog()
    found = checkpoint.find(place.root, refused, place.step if step is None else step)
    if found is None:
        raise CheckpointError(f"{place.name} has no committed checkpoint")
    refused.report_fallback(found[1].step)
    return found


def spec_of(folder: Path, manifest: Manifest) -> RunSpec:
    """As it was when the checkpoint was saved: all that is left of it where the run folder is elsewhere."""
    if "spec" not in manifest.meta:
        raise CheckpointError(f"{folder} does not describe its model; use the run folder instead")
    return RunSpec.from_dict(manifest.meta["spec"])


def reader(folder: Path, manifest: Manifest, parameters: dict[str, Tensor]) -> Callable[[str], Tensor]:
    """Gives each parameter of the model by name. One that is missing or has another shape is refused here and now."""
    index = read_index(folder, manifest)
    wanted = {f"model.{name}" for name in parameters}
    if surplus := [name for name in index if name.startswith("model.") and name not in wanted]:
        raise CheckpointError(f"{folder} has {surplus[0]}, which the run's model does not have")
    for name, parameter in parameters.items():
        saved = index.get(f"model.{name}")
        if saved is None:
            raise CheckpointError(f"{folder} does not have model.{name}, which the run's model has")
        if saved.shape != tuple(parameter.shape):
            here = tuple(parameter.shape)
            raise CheckpointError(f"{folder}: model.{name} is {saved.shape} there, but {here} in the run's model")
    return lambda name: read_tensor(folder, index[f"model.{name}"]).to(parameters[name].dtype)


def read_tensor(folder: Path, saved: SavedTensor) -> Tensor:
    """One whole tensor, from the pieces of as many ranks as it was cut over."""
    whole = torch.empty(saved.shape, dtype=TORCH_DTYPES[saved.dtype])
    for piece in saved.pieces:
        target = whole[
            tuple(slice(first, first + size) for first, size in zip(piece.offsets, piece.sizes, strict=True))
        ]
        buffer = target if target.is_contiguous() else torch.empty(piece.sizes, dtype=whole.dtype)
        try:
            descriptor = os.open(folder / piece.file, os.O_RDONLY)
            try:
                read_all(descriptor, [as_bytes(buffer)], piece.start)
            finally:
                os.close(descriptor)
        except (OSError, EOFError) as error:
            reason = getattr(error, "strerror", None) or "it ends before its end"
            raise CheckpointError(f"cannot read {folder / piece.file}: {reason}") from None
        if buffer is not target:
            target.copy_(buffer)
    return whole


# --- tokenizer and marker --------------------------------------------------------------------------------


def begin(out: Path, about: str) -> None:
    """Mark a new folder as ours before anything is in it, so that an export that was killed can be done again."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        if not (out / MARKER).exists():
            write_whole(out / MARKER, about)
    except OSError as error:
        raise CheckpointError(f"cannot write {out}: {error.strerror}") from None


def finish(out: Path, about: str, spec: RunSpec, tokenizer: Tokenizer) -> None:
    """The tokenizer, where it is a file; one that an earlier export of other data left goes."""
    file, config = out / TOKENIZER_FILE, out / "tokenizer_config.json"
    try:
        if isinstance(tokenizer, FileTokenizer):
            shutil.copyfile(resolve(next(iter(spec.data.sources))) / TOKENIZER_FILE, file)
            write_whole(config, tokenizer_config(tokenizer))
        else:
            file.unlink(missing_ok=True)
            config.unlink(missing_ok=True)
        write_whole(out / MARKER, about)
    except OSError as error:
        raise CheckpointError(f"cannot write {out}: {error.strerror}") from None


def tokenizer_config(tokenizer: FileTokenizer) -> str:
    """Enough for AutoTokenizer to take tokenizer.json as it is."""
    end = tokenizer.inner.id_to_token(tokenizer.eot)
    return json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "add_prefix_space": False})
