"""Hugging Face checkpoints, read: a folder with config.json and safetensors, as `transformers` writes them.

One tensor is handled at a time, so reading needs the model once plus its largest tensor. `hf_config` translates the
shape, `hf_layout` the names; `hf_write` writes.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..spec import CheckpointError, ModelSpec, SpecError
from ..spec.files import read_json_object, unsafe_name
from ..spec.hf_config import family_of_config, spec_of_config
from ..spec.model import MUP_KEYS
from .hf_layout import Stored, layout, named_tensors
from .tensor_files import STAGED_DEVICES, DoubleBuffer, Span, spans, to_empty, upload_in_threads

if TYPE_CHECKING:
    from .gpt import GPT

Model = TypeVar("Model", bound="GPT")

HEAD, COMPARED_ROWS = "lm_head.weight", 4096
CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
# Tensors that some checkpoints hold and no network needs: causal masks and rotary frequencies, kept as buffers once.
BUFFERS = re.compile(r"\.attn\.(bias|masked_bias)$|rotary_emb\.inv_freq$")
# DeepSeek's module for further tokens, stored as layers behind the last: the network computes the same without.
FURTHER_TOKENS = re.compile(r"model\.layers\.(\d+)\.(enorm|eh_proj)\.")

# What may differ between a spec and the config of the weights that it starts from: rotary frequencies to stretch the
# context and the like, which change what is computed (`changes` names them), and what only acts in training. All else
# must be equal for the weights to mean the same.
COMPUTED = ("norm_eps", "rope_theta", "rope_scaling", "sliding_window", "layer_types", "rope_local_theta", "top_k")
CHANGEABLE = (
    *COMPUTED, "preset", "context", "capacity", "balance_loss", "balance_bias", "attention", "init_std", *MUP_KEYS,
)  # fmt: skip


class Checkpoint:
    """The tensors of a folder by name, over all its files."""

    def __init__(self, folder: Path, files: ExitStack) -> None:
        self.folder = folder
        self.file_of: dict[str, Path] = {}
        self.open: dict[Path, Any] = {}
        for path in weight_files(folder):
            try:
                self.open[path] = files.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{path}: not a whole safetensors file ({one_line(error)})") from None
            self.file_of |= dict.fromkeys(self.open[path].keys(), path)

    def check_layer_count(self, layers: int) -> None:
        """Before any layer is made: a config.json may ask for a billion of them."""
        if layers > len(self.file_of):
            raise CheckpointError(
                f"{self.folder}: config.json asks for {layers:,} layers, but its files hold only "
                f"{len(self.file_of):,} tensors"
            )

    def find(self, name: str) -> str:
        """The name under which the checkpoint holds it. Published GPT-2 leaves out 'transformer.' in front."""
        for candidate in (name, name.split(".", 1)[1]):
            if candidate in self.file_of:
                return candidate
        raise CheckpointError(f"{self.folder}: tensor '{name}' is missing")

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        where = self.file_of[name]
        found = self.open[where].get_slice(name)
        stored, kind = tuple(found.get_shape()), found.get_dtype()
        if stored != shape:
            raise CheckpointError(f"{where}: tensor '{name}' has shape {stored}, but config.json asks for {shape}")
        if not kind.startswith(("F", "BF")):  # integers mean nothing without scales, which no weight here has
            raise CheckpointError(f"{where}: tensor '{name}' is of type {kind}, which no weight of this network has")

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        self.check(name, shape)
        return self.open[self.file_of[name]].get_tensor(name)

    def equal(self, first: str, second: str) -> bool:
        """Whether two matrices hold the same numbers; some rows at a time."""
        one, other = (self.open[self.file_of[name]].get_slice(name) for name in (first, second))
        if one.get_shape() != other.get_shape():
            return False
        starts = range(0, one.get_shape()[0], COMPARED_ROWS)
        return all(torch.equal(one[at : at + COMPARED_ROWS], other[at : at + COMPARED_ROWS]) for at in starts)

    def open_files(self, files: ExitStack) -> None:
        """For `where`: files that are read directly, not memory-mapped."""
        self.spans: dict[Path, dict[str, Span]] = {path: spans(path) for path in self.open}
        self.files = {path: files.enter_context(path.open("rb")).fileno() for path in self.open}

    def where(self, name: str, shape: tuple[int, ...]) -> tuple[int, Span]:
        """An open file, and the location of the tensor in it."""
        self.check(name, shape)
        path = self.file_of[name]
        if name not in self.spans[path]:
            kind = self.open[path].get_slice(name).get_dtype()
            raise CheckpointError(f"{path}: tensor '{name}' is of type {kind}, which no weight of this network has")
        return self.files[path], self.spans[path][name]


def weight_files(folder: Path) -> list[Path]:
    if (folder / SINGLE).exists():
        return [folder / SINGLE]
    if not (folder / INDEX).exists():
        raise CheckpointError(f"{folder}: neither {SINGLE} nor {INDEX} is there (other formats are not read)")
    table = read_json(folder / INDEX).get("weight_map")
    if not isinstance(table, dict) or not all(isinstance(name, str) for name in table.values()):
        raise CheckpointError(f"{folder / INDEX}: its weight_map does not say which file holds each tensor")
    files = sorted(set(table.values()))
    for name in files:
        if why := unsafe_name(name):
            raise CheckpointError(f"{folder / INDEX}: its weight_map names a file {name!r:.200}: {why}")
    if missing := [name for name in files if not (folder / name).exists()]:
        raise CheckpointError(f"{folder / missing[0]}: {INDEX} names this file, but it is not there")
    return [folder / name for name in files]


def read_json(path: Path) -> dict[str, Any]:
    return read_json_object(path, CheckpointError)


def read_config(folder: Path) -> tuple[str, ModelSpec]:
    """Family and spec of config.json."""
    config = read_json(folder / CONFIG)
    try:
        family, spec = family_of_config(config), spec_of_config(config)
        check_dimensions(spec)
        return family, spec
    except SpecError as error:
        raise SpecError(f"{folder / CONFIG}: {error}") from None


LARGEST = 2**24  # of any one dimension: products of two, in bytes, are numbers that PyTorch can count to


def check_dimensions(spec: ModelSpec) -> None:
    """Of a damaged or hostile config: tensors of such shapes cannot be made, even on `meta`."""
    for name in (
        "layers",
        "hidden",
        "heads",
        "kv_heads",
        "head_dim",
        "ffn",
        "vocab",
        "experts",
        "expert_ffn",
        "kv_lora_rank",
        "q_lora_rank",
        "rope_head_dim",
        "v_head_dim",
    ):
        value = getattr(spec, name)
        if value > LARGEST:
            raise SpecError(f"model.{name} would be {value:,}, more than any model has (at most {LARGEST:,})")


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())


@torch.no_grad()
def load_hf(
    cls: type[Model], folder: Path, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> Model:
    """The model of a Hugging Face folder, in `dtype` whatever the precision of its files, straight on `device`."""
    family, spec = read_config(folder)
    device = torch.device(device)
    with ExitStack() as files:
        checkpoint = Checkpoint(folder, files)
        checkpoint.check_layer_count(spec.layers)
        with torch.device("meta"):
            model = cls(spec)
        plan = {checkpoint.find(stored.name): stored for stored in layout(spec, family, checkpoint.file_of)}
        check_unused_tensors(checkpoint, plan, spec.layers)
        check_tied(checkpoint, spec, plan)
        to_empty(model, device, dtype)
        parameters = named_tensors(model)

        def read(item: tuple[str, Stored], buffer: DoubleBuffer) -> None:
            name, stored = item
            stored.scatter(buffer.fetch(*checkpoint.where(name, stored.shape(parameters))), parameters)

        if device.type in STAGED_DEVICES:
            checkpoint.open_files(files)
            upload_in_threads(plan.items(), read, device)
            torch.cuda.empty_cache()  # tensors as they were stored
        else:
            for name, stored in plan.items():
                stored.scatter(checkpoint.read(name, stored.shape(parameters)), parameters)
    return model


class HFWeights:
    """The weights of a Hugging Face folder by our names, one whole tensor at a time: what a sharded start reads."""

    def __init__(self, folder: Path, spec: ModelSpec) -> None:
        self.folder, self.spec = folder, spec
        family, there = read_config(folder)
        check_same_network(there, spec, str(folder), "its config.json says")
        self.checkpoint = Checkpoint(folder, ExitStack())  # files stay open for as long as the weights are read
        self.checkpoint.check_layer_count(spec.layers)
        plan = {self.checkpoint.find(one.name): one for one in layout(spec, family, self.checkpoint.file_of)}
        check_unused_tensors(self.checkpoint, plan, spec.layers)
        check_tied(self.checkpoint, there, plan)
        self.stored: dict[str, list[tuple[str, Stored]]] = {}
        for name, stored in plan.items():
            for part in stored.parts:
                self.stored.setdefault(part, []).append((name, stored))
        from .gpt import GPT

        with torch.device("meta"):
            parameters = named_tensors(GPT(spec))
        self.shapes = {name: parameter.shape for name, parameter in parameters.items()}
        for name, stored in plan.items():  # all of them now: a start that is half read is refused too late
            self.checkpoint.check(name, stored.shape(parameters))

    @torch.no_grad()
    def weight(self, name: str, shape: torch.Size) -> Tensor:
        """One weight in fp32. A tensor that holds several (GPT-2's q, k, v) is read for each of them."""
        if name not in self.stored and name.endswith(".choice_bias"):  # which the run begins with
            return torch.zeros(shape)
        names = {part for _, stored in self.stored[name] for part in stored.parts}
        buffers: dict[str, Tensor] = {part: torch.empty(self.shapes[part]) for part in names}
        for there, stored in self.stored[name]:
            stored.scatter(self.checkpoint.read(there, stored.shape(buffers)), buffers)
        return buffers[name].view(shape)


def check_same_network(there: ModelSpec, spec: ModelSpec, where: str, says: str) -> None:
    """Whether weights of the one mean the same in the other."""
    for key in (field.name for field in dataclasses.fields(spec) if field.name not in CHANGEABLE):
        if getattr(there, key) != getattr(spec, key) and not (key == "ffn" and spec.experts):
            raise SpecError(f"{where}: {says} {key} = {getattr(there, key)}, but model.{key} = {getattr(spec, key)}")


def changes(there: ModelSpec, spec: ModelSpec) -> list[str]:
    """Keys by which the spec computes something else with the weights than the model that they come from."""
    return [key for key in COMPUTED if getattr(there, key) != getattr(spec, key)]


def check_tied(checkpoint: Checkpoint, spec: ModelSpec, plan: dict[str, Stored]) -> None:
    """A head of its own beside tie_word_embeddings = true: `transformers` takes it, and we would not."""
    if not spec.tie_embeddings or HEAD not in checkpoint.file_of:
        return
    embedding = next(name for name, stored in plan.items() if stored.parts == ("embed.weight",))
    if not checkpoint.equal(embedding, HEAD):
        raise CheckpointError(
            f"{checkpoint.folder}: tensor '{HEAD}' differs from '{embedding}', but config.json says "
            "tie_word_embeddings = true; make that false if the head is the model's own; otherwise drop the tensor"
        )


def check_unused_tensors(checkpoint: Checkpoint, plan: Iterable[str], layers: int) -> None:
    """A tensor that nothing uses: the config does not describe the whole network, and the logits would be wrong."""
    surplus = sorted(name for name in checkpoint.file_of.keys() - set(plan) if not BUFFERS.search(name))
    further = {found[1] for name in surplus if (found := FURTHER_TOKENS.match(name)) and int(found[1]) >= layers}
    surplus = [name for name in surplus if not name.startswith(tuple(f"model.layers.{layer}." for layer in further))]
    if surplus := [name for name in surplus if name != HEAD]:  # of a tied model: see `check_tied`
        raise CheckpointError(
            f"{checkpoint.folder}: {len(surplus)} tensors belong to nothing that config.json describes, "
            f"the first is '{surplus[0]}'"
        )
