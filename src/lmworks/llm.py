"""The offline API: `LLM(folder).generate(prompts, SamplingParams(...))`.

A source is a run folder, a Hugging Face folder, a folder that `lmworks quantize` wrote, or the name of a preset, which
gets random weights. The engine is ours, or vLLM behind the same methods.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import torch

from .data import Tokenizer, load_tokenizer
from .data.tokenizer import FileTokenizer, read_tokenizer
from .engine.chat import Chat
from .engine.engine import Engine
from .engine.offline import Offline
from .engine.params import SamplingParams
from .engine.request import Answer, Piece, Result
from .engine.runner import Runner
from .engine.vllm import VLLM
from .model import GPT
from .model.hf import load_hf, read_json
from .spec import EngineSpec, LMWorksError, ModelSpec, SpecError
from .spec.presets import PRESETS
from .train.load import load_trained

Prompt = str | Sequence[int]

ENGINES = ("native", "vllm")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Backend(Protocol):
    """What serves the requests."""

    @property
    def context(self) -> int: ...
    def generate(self, prompts: Sequence[Any], params: Sequence[SamplingParams], progress: bool) -> list[Result]: ...
    def stream(self, prompt: Any, params: SamplingParams) -> Generator[Piece, None, None]: ...
    def close(self) -> None: ...


class LLM:
    """A model with its engine. Options are the fields of EngineSpec: LLM("folder", dtype="bf16", max_seqs=64)."""

    def __init__(
        self, source: str | Path, *, engine: str = "native", seed: int = 0, step: int | None = None, **options: Any
    ) -> None:
        spec = EngineSpec.from_dict(options)
        if engine not in ENGINES:
            raise SpecError(f"engine = {engine!r} is not one of: {', '.join(ENGINES)}")
        self.folder = None if is_preset(source) else Path(source)
        self.tokenizer: Tokenizer | None
        self.backend: Backend
        if engine == "vllm":
            folder = hf_folder(source, step)
            self.tokenizer = hf_tokenizer(folder)
            self.backend = VLLM(str(folder), spec, seed)
        else:
            loaded = load(source, spec, step, seed)
            self.tokenizer = loaded.tokenizer
            self.backend = Offline(make_engine(loaded, spec, seed))

    # --- requests -----------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: bool = True,
    ) -> list[Result]:
        """One result a prompt, in order; params are one for all or one each.

        A prompt that cannot be served has a result with finish_reason "error" and says why; the others go on.
        """
        many = as_prompts(prompts)
        wishes = as_params(params, len(many))
        encoded = [self.try_encode(prompt) for prompt in many]
        good = [place for place, one in enumerate(encoded) if not isinstance(one, Result)]
        served = self.backend.generate([encoded[place] for place in good], [wishes[place] for place in good], progress)
        found = dict(zip(good, served, strict=True))
        return [one if isinstance(one, Result) else found[place] for place, one in enumerate(encoded)]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Generator[Piece, None, None]:
        """Pieces of the answer as they come; the last one carries the result. Leaving the loop cancels the request."""
        return self.backend.stream(self.encode(prompt), params or SamplingParams())

    def encode(self, prompt: Prompt) -> Any:
        """Token ids of a prompt: for a Hugging Face folder as `transformers` makes them, begin-of-text included."""
        if not isinstance(prompt, str):
            return [int(token) for token in prompt]
        if self.tokenizer is None:
            if isinstance(self.backend, VLLM):
                return prompt
            raise SpecError("the prompt is a text, and this model has no tokenizer: give a list of token ids")
        if isinstance(self.tokenizer, FileTokenizer) and is_hf(self.folder):
            return self.tokenizer.inner.encode(prompt, add_special_tokens=True).ids
        return self.tokenizer.encode(prompt)

    def empty_start(self) -> list[int]:
        """What an answer to nothing begins with: a new document."""
        return [] if self.tokenizer is None else [self.tokenizer.eot]

    def try_encode(self, prompt: Prompt) -> Any:
        try:
            return self.encode(prompt)
        except (SpecError, TypeError, ValueError) as error:
            return Result([], [Answer([], "", "error", error=str(error))])

    @property
    def context(self) -> int:
        """Longest sequence, prompt and answer together."""
        return self.backend.context

    @property
    def native(self) -> Engine:
        """The engine itself, to measure it or to look into it."""
        if not isinstance(self.backend, Offline):
            raise SpecError("vLLM serves this model: it has an engine of its own")
        return self.backend.engine

    def chat(self) -> Chat:
        """How conversations become prompts of this model."""
        if self.tokenizer is None:
            raise SpecError("to chat, a model needs a tokenizer; this one has none")
        return Chat.of(self.folder, self.tokenizer, self.encode)

    # --- end ----------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Gives back the device's memory."""
        self.backend.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


# --- what was given ---------------------------------------------------------------------------------------


def as_prompts(prompts: Any) -> list[Any]:
    """A lone text, or a lone list of ids, is one prompt."""
    if isinstance(prompts, str) or (len(prompts) and isinstance(prompts[0], int)):
        return [prompts]
    return list(prompts)


def as_params(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise SpecError(f"{len(params)} SamplingParams for {count} prompts: give one for all, or one each")
    return list(params)


def is_preset(source: str | Path) -> bool:
    return str(source) in PRESETS and not Path(source).exists()


def is_hf(folder: Path | None) -> bool:
    return folder is not None and (folder / "config.json").is_file() and not (folder / "spec.toml").exists()


def hf_folder(source: str | Path, step: int | None) -> Path:
    """What vLLM can read."""
    folder = Path(source)
    if step is not None or not is_hf(folder):
        raise SpecError(f"vLLM reads Hugging Face folders: write one with `lmworks export {source} OUT`")
    return folder


# --- loading ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Loaded:
    model: GPT
    tokenizer: Tokenizer | None
    eos: tuple[int, ...] = ()
    vocab: int = 0  # ids that may be picked (0: all of the model's)


def load(source: str | Path, spec: EngineSpec, step: int | None, seed: int) -> Loaded:
    """On the engine's device, in its precision."""
    device, folder = pick_device(spec), Path(source)
    dtype = pick_dtype(spec, device)
    if is_preset(source):
        return Loaded(random_model(ModelSpec.from_preset(str(source)), device, dtype, seed), None)
    if is_hf(folder):
        if step is not None:
            raise SpecError(f"{folder} is a Hugging Face folder: it has no steps to choose from")
        model = load_hf(GPT, folder, dtype=dtype, device=device)
        return Loaded(model.eval(), hf_tokenizer(folder), hf_eos(folder))
    trained = load_trained(folder, step)
    return Loaded(trained.model, trained.tokenizer, vocab=trained.tokenizer.vocab_size)


def pick_device(spec: EngineSpec) -> torch.device:
    if spec.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(spec.device)
    except RuntimeError:
        raise SpecError(f"engine.device = {spec.device!r} is no device; use cpu, cuda or auto") from None
    if device.type not in ("cpu", "cuda"):
        raise SpecError(f"engine.device = {spec.device!r}: the engine runs on cpu and cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise LMWorksError(f"engine.device = {spec.device!r}, but no CUDA device is there; use 'cpu' or 'auto'")
    return device


def pick_dtype(spec: EngineSpec, device: torch.device) -> torch.dtype:
    if spec.dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return DTYPES[spec.dtype]


@torch.no_grad()
def random_model(spec: ModelSpec, device: torch.device, dtype: torch.dtype, seed: int) -> GPT:
    """On a CPU the weights that training begins with; on a GPU drawn there, in a fraction of the time."""
    with torch.device("meta"):
        model = GPT(spec).to(dtype)
    model.to_empty(device=device)
    if device.type == "cpu":
        model.init_weights(seed)
        return model.eval()
    luck = torch.Generator(device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            parameter.normal_(0.0, spec.init_std, generator=luck)
        else:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
    for buffer in model.buffers():
        buffer.zero_()
    return model.eval()


def hf_eos(folder: Path) -> tuple[int, ...]:
    """Tokens at which `transformers` would stop."""
    for name in ("generation_config.json", "config.json"):
        found = read_json(folder / name).get("eos_token_id") if (folder / name).is_file() else None
        if found is not None:
            return tuple(found) if isinstance(found, list) else (int(found),)
    return ()


def hf_tokenizer(folder: Path) -> Tokenizer | None:
    """None where there is no tokenizer.json: prompts are then lists of ids."""
    if not (folder / "tokenizer.json").is_file():
        return None
    eos = hf_eos(folder)
    return read_tokenizer(folder / "tokenizer.json", eos[0]) if eos else load_tokenizer(folder)


def make_engine(loaded: Loaded, spec: EngineSpec, seed: int) -> Engine:
    runner = Runner(loaded.model, spec, loaded.model.device, loaded.vocab or loaded.model.spec.vocab)
    return Engine(runner, loaded.tokenizer, loaded.eos, seed)
