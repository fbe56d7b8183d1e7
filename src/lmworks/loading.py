"""Loads models for inference: a run, a Hugging Face folder or a preset, with its tokenizer and engine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from .data import Tokenizer, load_tokenizer
from .data.chat_template import template_folder
from .data.chat_tokenizer import end_token_ids
from .data.fim import vocab_with_sentinels
from .data.index import TOKENIZER_FILE
from .data.tokenizer import read_tokenizer
from .engine.core.engine import Engine
from .engine.core.kernel_warmup import warm_up_kernels
from .engine.core.model_runner import DTYPES, ModelRunner
from .engine.kv_tiers.open import open_tiers
from .engine.quantization.folder import (
    QuantizedWeights,
    check_digests,
    is_quantized,
    load_quantized,
    quantized_meta_model,
    quantized_vocab,
    uses_byte_tokenizer,
)
from .engine.quantization.quantized_model import MetaModel
from .engine.speculative.draft_model import DraftModel, DraftModelProposer
from .engine.speculative.ngram import NgramProposer
from .engine.speculative.verification import Speculator
from .model import GPT
from .model.gpt import initial_weight
from .model.hf import HFWeights, load_hf, read_config
from .model.hf_layout import named_tensors
from .plan.memory.host import available_bytes
from .record import RunFolder
from .spec import EngineSpec, LMWorksError, ModelSpec, SpecError
from .spec.errors import did_you_mean
from .spec.fim import FimSpec
from .spec.presets import PRESETS

if TYPE_CHECKING:
    from .engine.tensor_parallel.tp_rank import TensorParallelRank


@dataclass(frozen=True)
class LoadedModel:
    model: GPT
    tokenizer: Tokenizer | None
    eos: tuple[int, ...] = ()
    vocab: int = 0  # ids that may be sampled (0: all of the model's)


def trained_fim(source: str | Path) -> FimSpec | None:
    """Infilling as a run was trained with it; None where there is no run."""
    run = RunFolder(Path(source))
    return run.spec().data.fim if run.spec_path.is_file() else None


def load(source: str | Path, spec: EngineSpec, step: int | None, seed: int) -> LoadedModel:
    """On the engine's device, in its dtype."""
    device, folder = pick_device(spec), Path(source)
    dtype = pick_dtype(spec, device)
    check_step(source, step)
    if is_preset(source):
        return LoadedModel(random_model(ModelSpec.from_preset(str(source)), device, dtype, seed), None)
    if is_hf(folder):
        if is_quantized(folder):
            model = load_quantized(folder, dtype=dtype, device=device)
            return LoadedModel(model, hf_tokenizer(folder), end_token_ids(folder), quantized_vocab(folder))
        model = load_hf(GPT, folder, dtype=dtype, device=device)
        return LoadedModel(model.eval(), hf_tokenizer(folder), end_token_ids(folder))
    check_source(folder)
    from .train.load_run import load_trained  # imported here: the trainer takes seconds to load

    trained = load_trained(folder, step)
    # Loaded on the training device.
    eos = end_token_ids(template_folder(folder))
    vocab = vocab_with_sentinels(trained.tokenizer, trained.spec.data.fim)
    return LoadedModel(trained.model.to(device), trained.tokenizer, eos, vocab)


def load_shard(
    source: str | Path, spec: EngineSpec, step: int | None, seed: int, tp_rank: TensorParallelRank
) -> LoadedModel:
    """The shards of one tensor-parallel rank, on its device."""
    folder, dtype = Path(source), pick_dtype(spec, tp_rank.device)
    check_step(source, step)
    if is_preset(source):
        model = ModelSpec.from_preset(str(source))
        drawn = tp_rank.load_shards(
            MetaModel(model), dtype, lambda name, shape: initial_weight(model, seed, name, shape)
        )
        return LoadedModel(drawn, None)
    if is_hf(folder):
        if is_quantized(folder):
            if tp_rank.rank == 0:  # once for all ranks: it reads every byte
                check_digests(folder)
            stored = QuantizedWeights(folder)
            part = tp_rank.load_shards(stored.meta_model, dtype, stored.tensor, stored.layer)
            return LoadedModel(part, hf_tokenizer(folder), end_token_ids(folder), quantized_vocab(folder))
        model = read_config(folder)[1]
        part = tp_rank.load_shards(MetaModel(model), dtype, HFWeights(folder, model).weight)
        return LoadedModel(part, hf_tokenizer(folder), end_token_ids(folder))
    whole = load(source, spec.replace(device="cpu"), step, seed)
    tensors = named_tensors(whole.model)
    part = tp_rank.load_shards(MetaModel(whole.model.spec), dtype, lambda name, _shape: tensors[name].detach())
    return replace(whole, model=part)


def check_step(source: str | Path, step: int | None) -> None:
    """Only runs have checkpoints of several steps."""
    if step is not None and (is_preset(source) or is_hf(Path(source))):
        raise SpecError(f"{source} is not a run folder: it has no checkpoints by step")


def check_source(folder: Path) -> None:
    """Raise if it is neither a preset nor a folder with a model."""
    if len(folder.parts) == 1 and not folder.exists():
        raise SpecError(f"{folder} is neither a folder nor a preset{did_you_mean(str(folder), PRESETS)}")
    if folder.is_dir() and not (folder / "spec.toml").exists():
        raise SpecError(f"{folder} holds no model: neither spec.toml (a run) nor config.json (a Hugging Face folder)")


def is_preset(source: str | Path) -> bool:
    return str(source) in PRESETS and not Path(source).exists()


def is_hf(folder: Path | None) -> bool:
    """Also true for a folder that `lmworks quantize` wrote."""
    return folder is not None and (folder / "config.json").is_file() and not (folder / "spec.toml").exists()


def adds_special_tokens(folder: Path | None) -> bool:
    """Whether text prompts begin as `transformers` has them: of Hugging Face folders, and of runs post-trained so."""
    if folder is None or is_hf(folder):
        return folder is not None
    kept = template_folder(folder)
    return kept != folder and (kept / TOKENIZER_FILE).is_file()


def pick_device(spec: EngineSpec) -> torch.device:
    if spec.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(spec.device)
    except RuntimeError:
        raise SpecError(f"engine.device = {spec.device!r} is not a device; use cpu, cuda or auto") from None
    if device.type not in ("cpu", "cuda"):
        raise SpecError(f"engine.device = {spec.device!r}: the engine runs on cpu and cuda")
    if device.index:  # kernels are launched on a thread's current device, which is the first for new threads
        raise SpecError(f"engine.device = {spec.device!r}: choose a GPU with CUDA_VISIBLE_DEVICES, and use 'cuda'")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SpecError(f"engine.device = {spec.device!r}, but there is no CUDA device; use 'cpu' or 'auto'")
    return device


def pick_dtype(spec: EngineSpec, device: torch.device) -> torch.dtype:
    if spec.dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return DTYPES[spec.dtype]


@torch.no_grad()
def random_model(spec: ModelSpec, device: torch.device, dtype: torch.dtype, seed: int) -> GPT:
    """Initial weights of training on a CPU; on a GPU drawn there, which is faster."""
    model = MetaModel(spec).blank(device, dtype)
    if device.type == "cpu":
        model.init_weights(seed)
        return model.eval()
    generator = torch.Generator(device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            parameter.normal_(0.0, spec.init_std, generator=generator)
        else:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
    for buffer in model.buffers():
        buffer.zero_()
    return model.eval()


def hf_tokenizer(folder: Path) -> Tokenizer | None:
    """None where there is no tokenizer.json: prompts are then lists of ids."""
    if is_quantized(folder) and uses_byte_tokenizer(folder):
        return load_tokenizer("bytes")
    if not (folder / "tokenizer.json").is_file():
        return None
    eos = end_token_ids(folder)
    return read_tokenizer(folder / "tokenizer.json", eos[0]) if eos else load_tokenizer(folder)


def load_engine(source: str | Path, spec: EngineSpec, step: int | None, seed: int) -> tuple[LoadedModel, Engine]:
    """Load a model and its engine; with engine.tp > 1, one process per rank."""
    check_host_memory(source, spec)
    if spec.tp == 1:
        with warm_up_kernels(meta_model_of(source), spec, pick_device(spec)):
            loaded = load(source, spec, step, seed)
        return loaded, make_engine(loaded, spec, seed)
    from .engine.tensor_parallel.executor import Executor  # imported here: torch.distributed takes seconds to load
    from .engine.tensor_parallel.tp_shards import check_tp_divides

    if (meta_model := meta_model_of(source)) is not None:
        check_tp_divides(meta_model, spec.tp)  # before ranks are started, each of which would fail
    executor = Executor(source, spec, step, seed, pick_device(spec))
    try:
        loaded = load_shard(source, spec, step, seed, executor)
        engine = make_engine(loaded, spec, seed, executor)
    except LMWorksError:
        executor.close()
        raise
    except Exception as error:
        cause = executor.root_cause(error)
        executor.close()
        raise cause from error
    executor.workers_ready = True
    return loaded, engine


def check_host_memory(source: str | Path, spec: EngineSpec) -> None:
    """On a CPU, where memory is overcommitted and the OOM killer would end the process."""
    device, there = pick_device(spec), available_bytes()
    if device.type != "cpu" or there is None or (meta_model := meta_model_of(source)) is None:
        return
    model, width = meta_model.shape(), pick_dtype(spec, device).itemsize
    need = sum(width * p.numel() for p in model.parameters()) + sum(b.nbytes for b in model.buffers())
    if need > there:
        smaller = ", engine.dtype = 'bf16' takes half" if width == 4 else ""
        raise LMWorksError(
            f"the weights of {source} take {need / 2**30:.1f} GiB, and this machine has {there / 2**30:.1f} GiB of "
            f"memory left: a quantized folder is smaller{smaller}"
        )


def meta_model_of(source: str | Path) -> MetaModel | None:
    """None for a run: its shape is in a checkpoint."""
    folder = Path(source)
    if is_preset(source):
        return MetaModel(ModelSpec.from_preset(str(source)))
    if is_hf(folder):
        return quantized_meta_model(folder) if is_quantized(folder) else MetaModel(read_config(folder)[1])
    check_source(folder)
    return None


def make_engine(loaded: LoadedModel, spec: EngineSpec, seed: int, tp_rank: TensorParallelRank | None = None) -> Engine:
    """Takes ownership of the model, and loads the draft model."""
    draft = load_draft(spec, seed) if spec.speculate == "draft" else None
    runner = make_runner(loaded, spec, draft, tp_rank)
    return Engine(runner, loaded.tokenizer, loaded.eos, seed, make_speculator(runner.spec), open_tiers(runner))


def load_draft(spec: EngineSpec, seed: int) -> DraftModel:
    try:
        return DraftModel(load(spec.draft, spec, None, seed).model)
    except LMWorksError as error:
        raise SpecError(f"engine.draft: {error}") from None


def make_runner(
    loaded: LoadedModel, spec: EngineSpec, draft: DraftModel | None, tp_rank: TensorParallelRank | None
) -> ModelRunner:
    return ModelRunner(loaded.model, spec, loaded.model.device, loaded.vocab or loaded.model.spec.vocab, draft, tp_rank)


def make_speculator(spec: EngineSpec) -> Speculator | None:
    if spec.speculate == "none":
        return None
    return Speculator(spec, DraftModelProposer() if spec.speculate == "draft" else NgramProposer())
