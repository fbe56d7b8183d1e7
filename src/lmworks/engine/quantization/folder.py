"""Quantized networks on disk, read back bit for bit.

    config.json         the network's shape (ours, in "model") and the end-of-text tokens
    model.safetensors   tensors by our names: quantized ones as they are, the rest in bf16 where that is exact
    quantization.json   scheme, report, and digests of the two files above
    tokenizer.json …    if the model had them

`config.json` has a quantization_config, so that the folder is not mistaken for an ordinary Hugging Face one.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ...model.gpt import GPT
from ...model.hf import one_line, read_json
from ...model.tensor_files import STAGED_DEVICES, DoubleBuffer, Span, save_tensors, spans, upload_in_threads
from ...spec import CheckpointError, ModelSpec, SpecError
from ...spec.files import check_writable, write_whole
from .quantize import Report
from .quantized_model import SCHEMES, MetaModel, QuantLinear, get_scheme, layer_scheme

CONFIG, WEIGHTS, ABOUT = "config.json", "model.safetensors", "quantization.json"
VERSION = 2
PIECE = 1 << 26  # bytes that a thread hashes at a time


def is_quantized(folder: str | Path) -> bool:
    return (Path(folder) / ABOUT).is_file()


# --- writing --------------------------------------------------------------------------------------------


def check_output_folder(out: Path) -> None:
    """Before any work: it must be writable, and empty or a quantized model."""
    if out.exists() and not out.is_dir():
        raise SpecError(f"{out} is a file; name a folder for the quantized model")
    if out.is_dir() and any(out.iterdir()) and not is_quantized(out):
        raise SpecError(f"{out} is not empty and holds no quantized model; name another folder")
    check_writable(out, "--out")


def save_quantized(
    model: GPT,
    out: Path,
    report: Report,
    *,
    eos: Iterable[int] = (),
    tokenizer: str = "",
    files: Iterable[Path] = (),
    vocab: int = 0,
) -> None:
    """`tokenizer`: "bytes" if it has no file; `files`: tokenizer files to copy; `vocab`: ids that may be sampled (0:
    all of the model's).

    Written to a temporary folder and renamed at the end: a killed job leaves the old folder or none.
    """
    check_output_folder(out)
    place = out.resolve()  # of "." and of a link: what they stand for
    staging = place.with_name(f".{place.name}.part")
    try:
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        save_tensors({name: to_bf16_if_exact(tensor) for name, tensor in model.state_dict().items()}, staging / WEIGHTS)
        config = {
            "model_type": "lmworks",
            "model": model.spec.to_dict(),
            "eos_token_id": list(eos),
            "quantization_config": {"quant_method": "lmworks", "scheme": report.scheme},
        }
        write_whole(staging / CONFIG, json.dumps(config, indent=2) + "\n")
        for file in files:
            shutil.copyfile(file, staging / file.name)
        groups = {layer.name: layer.group for layer in report.layers if layer.group}
        about = {
            "version": VERSION,
            "scheme": report.scheme,
            "groups": groups,
            "tokenizer": tokenizer,
            "vocab": vocab,
            "digests": {name: digest(staging / name) for name in (CONFIG, WEIGHTS)},
            "report": report.to_dict(),
        }
        write_whole(staging / ABOUT, json.dumps(about, indent=2, allow_nan=False) + "\n")
        if place.is_dir():
            shutil.rmtree(place)
        staging.replace(place)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(staging, ignore_errors=True)
        raise CheckpointError(f"{out}: cannot be written ({one_line(error)})") from None


def to_bf16_if_exact(tensor: Tensor) -> Tensor:
    """In bf16 if that is exact, as for weights that were published in bf16."""
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype == torch.float32 and torch.equal(tensor.bfloat16().float(), tensor):
        return tensor.bfloat16()
    return tensor


def digest(path: Path) -> str:
    """SHA-256 over the hashes of the file's pieces, computed in threads."""

    def piece(start: int) -> bytes:
        with path.open("rb") as file:
            file.seek(start)
            return hashlib.sha256(file.read(PIECE)).digest()

    with ThreadPoolExecutor(8) as pool:
        return hashlib.sha256(b"".join(pool.map(piece, range(0, path.stat().st_size, PIECE)))).hexdigest()


# --- reading --------------------------------------------------------------------------------------------


@torch.no_grad()
def load_quantized(
    folder: str | Path, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> GPT:
    """The network on `device`; weights that are not quantized in `dtype`."""
    folder = Path(folder)
    check_digests(folder)
    with reading_description(folder):
        model = quantized_meta_model(folder).blank(torch.device(device), dtype)
    load_tensors(model, folder / WEIGHTS)
    return model.eval().requires_grad_(False)


class QuantizedWeights:
    """The tensors of a folder, read one at a time, for tensor-parallel ranks."""

    def __init__(self, folder: Path) -> None:
        """Digests are not checked: one rank does that for all (`check_digests`)."""
        self.path, self.meta_model = folder / WEIGHTS, quantized_meta_model(folder)
        with reading_description(folder):
            whole = self.meta_model.shape()
        with reading_safetensors(self.path):
            self.file = safe_open(self.path, framework="pt")  # stays open while weights are read
            self.names = set(self.file.keys())
            check_tensors(self.path, self.names, spans(self.path), whole.state_dict())

    def tensor(self, name: str, _shape: torch.Size | None = None) -> Tensor:
        with reading_safetensors(self.path):
            found: Tensor = self.file.get_tensor(name)
        return found

    def layer(self, name: str) -> QuantLinear:
        """A quantized layer, by its name in the network."""
        scheme = layer_scheme(get_scheme(self.meta_model.scheme), name)
        scale = self.tensor(f"{name}.scale").to(scheme.scales)  # may be stored in bf16, where that is exact
        bias = self.tensor(f"{name}.bias") if f"{name}.bias" in self.names else None
        return QuantLinear(scheme, self.tensor(f"{name}.weight"), scale, bias)


@contextmanager
def reading_description(folder: Path) -> Iterator[None]:
    try:
        yield
    except SpecError as error:
        raise CheckpointError(f"{folder}: {CONFIG} and {ABOUT} do not describe a model ({one_line(error)})") from None


@contextmanager
def reading_safetensors(path: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: not a whole safetensors file ({one_line(error)})") from None


def quantized_meta_model(folder: Path) -> MetaModel:
    about = read_about(folder)
    try:
        return MetaModel(ModelSpec.from_dict(read_json(folder / CONFIG)["model"]), about["scheme"], about["groups"])
    except (SpecError, KeyError) as error:
        raise CheckpointError(f"{folder / CONFIG}: it does not describe a model ({one_line(error)})") from None


def read_about(folder: Path) -> dict[str, Any]:
    if not is_quantized(folder):
        raise CheckpointError(f"{folder}: {ABOUT} is missing; this folder was not written by `lmworks quantize`")
    about = read_json(folder / ABOUT)
    if about.get("version") == 1:
        raise CheckpointError(
            f"{folder / ABOUT}: an earlier version wrote it, with a head as it was; quantize it again"
        )
    if about.get("version") != VERSION or about.get("scheme") not in list(SCHEMES):
        raise CheckpointError(
            f"{folder / ABOUT}: version {about.get('version')!r}, scheme {about.get('scheme')!r} is not known here; "
            "quantize the model again"
        )
    groups, vocab = about.get("groups"), about.get("vocab", 0)
    if not isinstance(about.get("digests"), dict) or not isinstance(groups, dict):
        raise CheckpointError(f"{folder / ABOUT}: digests or groups are missing; quantize the model again")
    if not all(type(size) is int and size > 0 for size in groups.values()) or type(vocab) is not int or vocab < 0:
        raise CheckpointError(f"{folder / ABOUT}: groups or vocab are not integers; quantize the model again")
    return about


def check_digests(folder: Path) -> None:
    """Detects files that were changed, truncated, or come from another folder."""
    digests: dict[str, str] = read_about(folder)["digests"]
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder / name}: the file is missing")
        if digest(folder / name) != digests.get(name):
            raise CheckpointError(
                f"{folder / name}: it is damaged, or from another model than {ABOUT}; quantize the model again"
            )


def load_tensors(model: GPT, path: Path) -> None:
    state: dict[str, Tensor] = model.state_dict()
    with reading_safetensors(path):
        with safe_open(path, framework="pt") as file:
            table: dict[str, Span] = spans(path)
            check_tensors(path, set(file.keys()), table, state)
            if model.device.type not in STAGED_DEVICES:
                for name, tensor in state.items():
                    tensor.copy_(file.get_tensor(name))
                return
        with path.open("rb") as raw:

            def read(item: tuple[str, Tensor], buffer: DoubleBuffer) -> None:
                item[1].copy_(buffer.fetch(raw.fileno(), table[item[0]]))

            upload_in_threads(state.items(), read, model.device)


def check_tensors(path: Path, names: set[str], table: dict[str, Span], state: dict[str, Tensor]) -> None:
    """The tensors of the file must be those of the network."""
    if names != state.keys():
        odd = sorted(names ^ state.keys())
        raise CheckpointError(f"{path}: {len(odd)} tensors are missing or too many, the first is '{odd[0]}'")
    for name, tensor in state.items():
        stored = table[name]
        whole = not tensor.is_floating_point() or tensor.dtype.itemsize == 1
        if stored.shape != tensor.shape or (whole and stored.dtype != tensor.dtype):
            raise CheckpointError(
                f"{path}: tensor '{name}' is {stored.dtype} {stored.shape}, "
                f"but {tensor.dtype} {tuple(tensor.shape)} belongs there"
            )


def uses_byte_tokenizer(folder: Path) -> bool:
    """Whether tokens are bytes, without a tokenizer file."""
    return read_about(folder).get("tokenizer") == "bytes"


def quantized_vocab(folder: Path) -> int:
    """Ids that may be sampled; 0: all of the model's."""
    vocab: int = read_about(folder).get("vocab", 0)
    return vocab
