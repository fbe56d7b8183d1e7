"""A run as a Hugging Face folder: weights and config as `transformers` reads them, and the tokenizer beside them.

Weights go from the checkpoint's files to those of the export one at a time, each put together from the pieces that
ranks have saved: what is in memory is the largest of them, not the model.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..checkpoint.format.manifest import Manifest
from ..checkpoint.format.survey import locate
from ..data import Tokenizer, load_tokenizer, resolve
from ..data.chat_tokenizer import folder_of_model, load_model_tokenizer
from ..data.index import TOKENIZER_FILE
from ..data.progress import Progress, silent
from ..data.tokenizer import FileTokenizer
from ..model import GPT
from ..model.hf_layout import named_tensors
from ..model.hf_write import SHARD_BYTES, write_hf
from ..model.merge import BESIDE
from ..model.peft import WEIGHTS, write_peft
from ..model.reward_stats import copy_stats
from ..parallel.precision import DTYPES
from ..spec import CheckpointError, RunSpec, SpecError
from ..spec.files import check_writable, write_whole
from ..spec.hf_config import family_of_spec
from .base_model import base_weights, check_base, find_base, merged_reader, trained_parameters
from .saved_weights import find, reader, spec_of

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
    adapter: bool = False,
) -> Export:
    """Write the newest intact checkpoint (or that of `step`), whatever its layout was, for others to load.

    Adapters are merged into their base, or with `adapter` written alone, in PEFT's format.
    """
    check_output_folder(out)
    place = locate(Path(source))
    if place.run:
        family_of_spec(place.run.spec().model)  # refuses what no family can express, before a byte is read
    folder, manifest = find(place, step)
    spec = place.run.spec() if place.run else spec_of(folder, manifest)
    if adapter and not spec.adapters:
        raise SpecError(f"{source} trained all weights: it has no adapter to export")
    if place.run:  # a fine-tuned run keeps its own
        there = folder_of_model(place.run.path)
        tokenizer = load_model_tokenizer(place.run.path)
    else:
        there = resolve(next(iter(spec.data.sources)))
        tokenizer = load_tokenizer(there)
    about = json.dumps({"run": str(Path(source).absolute()), "step": manifest.step}, indent=2)
    if adapter:
        own = trained_parameters(spec)
        own_read = reader(folder, manifest, own)
        begin(out, about)
        write_peft(out, spec.model, spec.lora, {name: own_read(name) for name in own}, spec.checkpoint.init)
        finish(out, about, there, tokenizer)
        if spec.model.scalar_head and place.run:
            copy_stats(place.run.path, out, manifest.step)
        size = sum(parameter.numel() for parameter in own.values())
        return Export(out, manifest.step, size, [WEIGHTS], isinstance(tokenizer, FileTokenizer))
    with torch.device("meta"):
        dtype = DTYPES[spec.precision.weights]
        parameters = named_tensors(GPT(spec.model), dtype)
    read = merged(spec, folder, manifest, dtype) if spec.adapters else reader(folder, manifest, parameters)
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
    finish(out, about, there, tokenizer)
    if spec.model.scalar_head and place.run:
        copy_stats(place.run.path, out, manifest.step)
    return Export(
        out,
        manifest.step,
        spec.model.params,
        [path.name for path in written],
        isinstance(tokenizer, FileTokenizer),
    )


def merged(spec: RunSpec, folder: Path, manifest: Manifest, dtype: torch.dtype) -> Callable[[str], Tensor]:
    """Weights of the base with the adapters of a checkpoint."""
    base = find_base(spec)
    check_base(spec, base, manifest.meta.get("base"), str(folder))
    read = merged_reader(spec, base_weights(spec, base), reader(folder, manifest, trained_parameters(spec)))
    return lambda name: read(name).to(dtype)


def check_output_folder(out: Path) -> None:
    try:
        if out.exists() and not out.is_dir():
            raise SpecError(f"{out} is a file; name a folder for the export")
        if out.is_dir() and any(out.iterdir()) and not (out / MARKER).is_file():
            raise SpecError(f"{out} is not empty and not an earlier export; name another folder")
        check_writable(out, "the export")
    except OSError as error:
        raise SpecError(f"cannot write {out}: {error.strerror}") from None


# --- tokenizer and marker --------------------------------------------------------------------------------


def begin(out: Path, about: str) -> None:
    """Mark a new folder as ours before anything is in it, so that an export that was killed can be done again."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        if not (out / MARKER).exists():
            write_whole(out / MARKER, about)
    except OSError as error:
        raise CheckpointError(f"cannot write {out}: {error.strerror}") from None


def finish(out: Path, about: str, there: Path | str, tokenizer: Tokenizer) -> None:
    """The tokenizer of the folder `there`, if it is one; what an earlier export of other data left goes."""
    config = out / "tokenizer_config.json"
    try:
        for name in (*BESIDE, TOKENIZER_FILE):
            (out / name).unlink(missing_ok=True)
            if isinstance(there, Path) and (there / name).is_file():
                shutil.copyfile(there / name, out / name)
        if isinstance(tokenizer, FileTokenizer) and not config.exists():
            write_whole(config, tokenizer_config(tokenizer))
        write_whole(out / MARKER, about)
    except OSError as error:
        raise CheckpointError(f"cannot write {out}: {error.strerror}") from None


def tokenizer_config(tokenizer: FileTokenizer) -> str:
    """Enough for AutoTokenizer to take tokenizer.json as it is."""
    end = tokenizer.inner.id_to_token(tokenizer.eot)
    return json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "add_prefix_space": False})
