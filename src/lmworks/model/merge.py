"""An adapter in PEFT's format merged into a Hugging Face folder, a tensor at a time."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from torch import Tensor

from ..spec import CheckpointError, SpecError
from ..spec.components import SCORE
from .gpt import GPT
from .hf import CONFIG, HFWeights, one_line, read_config, read_json
from .hf_layout import named_tensors
from .hf_write import SHARD_BYTES, ProgressCallback, write_hf
from .lora import merged_weight
from .peft import read_peft

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# What of the base's folder goes with its weights.
BESIDE = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
    "generation_config.json",
)  # fmt: skip


def merge_peft(
    base: Path,
    adapter: Path,
    out: Path,
    shard_bytes: int = SHARD_BYTES,
    progress: ProgressCallback = lambda done, total: None,
) -> list[Path]:
    """Write W + scale · B·A (or DoRA's weight) in the precision of the base; returns the files of weights."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise SpecError(f"{out} exists and is not empty; name a new folder")
    spec = read_config(base)[1]
    weights, found = HFWeights(base, spec), read_peft(adapter, spec)
    config = read_json(base / CONFIG)
    name = config.get("dtype") or config.get("torch_dtype") or "float32"
    if name not in DTYPES:
        raise SpecError(f"{base / CONFIG}: dtype = {name!r} is not supported; use {', '.join(DTYPES)}")
    with torch.device("meta"):
        parameters = named_tensors(GPT(spec), DTYPES[name])

    def read(key: str) -> Tensor:
        if key == SCORE and found.score is not None:
            return found.score.to(DTYPES[name])
        weight = weights.weight(key, parameters[key].shape)
        if layer := found.layers.get(key):
            weight = merged_weight(weight, layer.lora_A, layer.lora_B, layer.scale, layer.magnitude)
        return weight.to(parameters[key].dtype)

    eos = config.get("eos_token_id")
    written = write_hf(spec, parameters, read, out, eos=eos, shard_bytes=shard_bytes, progress=progress)
    try:
        for file in BESIDE:
            if (base / file).is_file():
                shutil.copyfile(base / file, out / file)
    except OSError as error:
        raise CheckpointError(f"{out}: cannot be written ({one_line(error)})") from None
    return written
