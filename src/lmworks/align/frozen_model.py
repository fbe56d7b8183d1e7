"""Models that are evaluated and not trained: the reference of a policy, a reward model, a teacher."""

from __future__ import annotations

from pathlib import Path

import torch

from ..model.hf import read_config
from ..model.peft import CONFIG as ADAPTER_CONFIG
from ..parallel.initial_weights import is_hf, source_of
from ..parallel.mesh import Mesh
from ..parallel.parallel_model import ParallelModel
from ..parallel.parallelize import parallelize
from ..parallel.state_dict import as_dtensor
from ..parallel.world import run_on_all_ranks
from ..plan.passes import frozen_run
from ..record import RunFolder
from ..spec import ModelSpec, RunSpec, SpecError
from ..train.saved_weights import RefusalLog, load_weights


def load_frozen(spec: RunSpec, folder: str, key: str, mesh: Mesh | None, device: torch.device) -> ParallelModel:
    """The model of a Hugging Face or run folder, laid over the ranks like the policy; `key` names it in errors.

    Without a folder: the weights that the seed gives, from which the run itself starts.
    """
    model = run_on_all_ranks(lambda: model_of(folder, key)) if folder else spec.model
    try:
        frozen = frozen_run(spec, model, folder)
    except SpecError as error:  # the layout does not suit its shape
        raise SpecError(f"{key} = {folder!r}: {error}") from None
    parallel_model = parallelize(frozen, mesh, device, run_on_all_ranks(lambda: source_of(frozen)), frozen=True)
    if folder and not is_hf(Path(folder)):
        load_run_weights(parallel_model, folder, key)
    for part in parallel_model.parts.values():
        part.requires_grad_(False)
    return parallel_model


def model_of(folder: str, key: str) -> ModelSpec:
    path = Path(folder)
    if not path.is_dir():
        raise SpecError(f"{key} = {folder!r}: there is no such folder")
    if is_hf(path):
        return read_config(path)[1]
    if not (path / "spec.toml").is_file():
        if (path / ADAPTER_CONFIG).is_file():
            raise SpecError(
                f"{key} = {folder!r} is an adapter: make a whole model of it with `lmworks checkpoint merge BASE "
                f"{folder} OUT`"
            )
        raise SpecError(f"{key} = {folder!r} holds no model: neither spec.toml (a run) nor config.json (Hugging Face)")
    run = RunFolder.open(path).spec()
    if run.adapters:
        raise SpecError(
            f"{key} = {folder!r} has adapters over another model; name what `lmworks checkpoint export {folder} OUT` "
            "writes"
        )
    return run.model


def load_run_weights(parallel_model: ParallelModel, folder: str, key: str) -> None:
    """Of the newest intact checkpoint of a run, straight into the shards."""
    sharding, mesh = parallel_model.sharding, parallel_model.mesh
    weights = {shard.name: as_dtensor(shard, shard.leaf.detach(), sharding, mesh) for shard in parallel_model.shards}
    if not load_weights(RunFolder.open(folder), weights | parallel_model.buffers(), RefusalLog()):
        raise SpecError(f"{key} = {folder!r} has no checkpoint")
    parallel_model.after_load()
