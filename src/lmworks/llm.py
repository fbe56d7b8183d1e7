"""The offline API: `LLM(folder).generate(prompts, SamplingParams(...))`.

A source is a run folder, a Hugging Face folder, a folder that `lmworks quantize` wrote, or the name of a preset, which
gets random weights. The engine is ours, or vLLM behind the same methods.
"""

from __future__ import annotations

import operator
from collections.abc import Generator, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from .data import Tokenizer
from .data.chat_template import Chat
from .data.tokenizer import FileTokenizer
from .engine.beam_search import Beam, beam_search
from .engine.core.engine import Engine
from .engine.core.request import OutputDelta, Result, ResultCallback, ignore_result
from .engine.core.sampling_params import SamplingParams, index
from .engine.offline import CLOSED, OfflineEngine
from .engine.quantization.drift import DriftMonitor
from .engine.quantization.folder import is_quantized
from .engine.vllm import VLLM
from .loading import adds_special_tokens, hf_tokenizer, is_hf, is_preset, load_engine
from .spec import EngineSpec, LMWorksError, SpecError

Prompt = str | Sequence[int]

ENGINES = ("native", "vllm")


class Backend(Protocol):
    """Our engine, or vLLM."""

    @property
    def context(self) -> int: ...
    def generate(
        self,
        prompts: Sequence[Any],
        params: Sequence[SamplingParams],
        progress: bool,
        on_result: ResultCallback = ignore_result,
    ) -> list[Result]: ...
    def stream(self, prompt: Any, params: SamplingParams) -> Generator[OutputDelta, None, None]: ...
    def close(self) -> None: ...


class LLM:
    """A model with its engine. Options are the fields of EngineSpec: LLM("folder", dtype="bf16", max_seqs=64)."""

    def __init__(
        self, source: str | Path, *, engine: str = "native", seed: int = 0, step: int | None = None, **options: Any
    ) -> None:
        spec = EngineSpec.from_dict(options)
        if engine not in ENGINES:
            raise SpecError(f"engine = {engine!r} is not one of: {', '.join(ENGINES)}")
        self.closed = False
        if not isinstance(source, str | Path):
            raise SpecError(f"a model is named by a folder or a preset, not by {source!r:.60}")
        self.folder = None if is_preset(source) else Path(source)
        self.tokenizer: Tokenizer | None
        self.backend: Backend
        if engine == "vllm":
            folder = hf_folder(source, step)
            self.tokenizer = hf_tokenizer(folder)
            self.backend = VLLM(str(folder), spec, seed)
        else:
            loaded, served = load_engine(source, spec, step, seed)
            self.tokenizer = loaded.tokenizer
            self.backend = OfflineEngine(served)

    # --- requests -----------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: bool = True,
        on_result: ResultCallback = ignore_result,
        told: ResultCallback | None = None,
    ) -> list[Result]:
        """One result per prompt, in order; params are one for all or one each.

        A prompt that cannot be served has a result with finish_reason "error" and an error message; the others run.
        `on_result(index, result)` is called for every prompt as soon as its result is complete (with vLLM all at the
        end), so that an interrupt loses only the rest. `told` is its earlier name.
        """
        on_result = told or on_result
        many = as_prompts(prompts)
        request_params = as_params(params, len(many))
        self.check_open()
        encoded = [self.try_encode(prompt, one.n) for prompt, one in zip(many, request_params, strict=True)]
        good = []
        for place, one in enumerate(encoded):
            if isinstance(one, Result):
                on_result(place, one)
            else:
                good.append(place)
        served = self.backend.generate(
            [encoded[place] for place in good],
            [request_params[place] for place in good],
            progress,
            lambda index, result: on_result(good[index], result),
        )
        found = dict(zip(good, served, strict=True))
        return [one if isinstance(one, Result) else found[place] for place, one in enumerate(encoded)]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Generator[OutputDelta, None, None]:
        """Output deltas; the last one carries the result. Closing the generator cancels the request."""
        self.check_open()
        return self.backend.stream(self.encode(prompt), as_params(params, 1)[0])

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        beam_width: int,
        max_tokens: int,
        length_penalty: float = 1.0,
        early_stopping: bool = False,
        ignore_eos: bool = False,
    ) -> list[list[Beam]]:
        """Of each prompt the `beam_width` best answers with their scores, the best first; as in `transformers`."""
        engine = self.offline
        ends = () if ignore_eos else self.native.eos

        def generate(asked: list[list[int]], params: SamplingParams) -> list[Result]:
            return engine.generate(asked, [params] * len(asked), progress=False)

        found = []
        for prompt in as_prompts(prompts):
            ids = self.encode(prompt)
            most = min(max_tokens, self.context - len(ids))
            found.append(beam_search(generate, ids, ends, beam_width, most, length_penalty, early_stopping))
        return found

    def encode(self, prompt: Prompt) -> Any:
        """Token ids of a prompt: for a Hugging Face folder those of `transformers`, begin-of-text included.

        Except that text that spells a special token ("a<|endoftext|>b") stays text, as a protection against prompt
        injection. Pass ids to use the token itself.
        """
        if not isinstance(prompt, str):
            return as_ids(prompt)
        if self.tokenizer is None:
            if isinstance(self.backend, VLLM):
                return prompt
            raise SpecError("the prompt is a text, and this model has no tokenizer: give a list of token ids")
        try:
            if isinstance(self.tokenizer, FileTokenizer) and adds_special_tokens(self.folder):
                return self.tokenizer.inner.encode(prompt, add_special_tokens=True).ids
            return self.tokenizer.encode(prompt)
        except (UnicodeEncodeError, TypeError):  # the latter is raised by `tokenizers`
            raise SpecError("the prompt is not a valid text: it holds half of a surrogate pair") from None

    def empty_prompt(self) -> list[int]:
        """The prompt that replaces an empty one: end-of-text, which begins a document."""
        return [] if self.tokenizer is None else [self.tokenizer.eot]

    def try_encode(self, prompt: Prompt, n: int) -> Any:
        try:
            return self.encode(prompt)
        except SpecError as error:
            return Result.failed([], str(error), n)

    @property
    def context(self) -> int:
        """Longest sequence, prompt and answer together."""
        self.check_open()
        return self.backend.context

    @property
    def offline(self) -> OfflineEngine:
        self.check_open()
        if not isinstance(self.backend, OfflineEngine):
            raise SpecError("vLLM serves this model: it has an engine of its own")
        return self.backend

    @property
    def native(self) -> Engine:
        """The engine itself, for benchmarks and inspection."""
        return self.offline.engine

    def add_adapter(self, name: str, folder: str | Path) -> None:
        """Load a LoRA adapter in PEFT's format; requests select it with SamplingParams(adapter=name)."""
        self.offline.add_adapter(name, Path(folder))

    def watch_drift(self) -> DriftMonitor:
        """Compares activations of a quantized model with those of its calibration."""
        engine = self.offline
        if self.folder is None or not is_quantized(self.folder):
            raise SpecError("only a model that `lmworks quantize` made has a calibration to drift from")
        return engine.watch_drift(self.folder)

    def chat(self, chat_template_kwargs: Mapping[str, Any] | None = None) -> Chat:
        """The chat template of this model; `chat_template_kwargs`: its further variables, e.g. enable_thinking."""
        if self.tokenizer is None:
            raise SpecError("to chat, a model needs a tokenizer; this one has none")
        chat = Chat.of(self.folder, self.tokenizer, self.encode)
        return chat.with_variables(chat_template_kwargs or {})

    # --- lifetime -----------------------------------------------------------------------------------------

    def close(self) -> None:
        """Free device memory. Idempotent."""
        if not self.closed:
            self.closed = True
            self.backend.close()

    def check_open(self) -> None:
        if self.closed:
            raise LMWorksError(CLOSED)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


# --- arguments --------------------------------------------------------------------------------------------


def as_prompts(prompts: Any) -> list[Any]:
    """A single text, or a single list (or array) of ids, is one prompt."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, Mapping | bytes) or not isinstance(prompts, Iterable):
        raise SpecError(f"prompts are texts and lists of token ids, not {prompts!r:.60}")
    many = list(prompts)
    return [many] if many and is_id(many[0]) else many


def is_id(value: Any) -> bool:
    """An array of one id is a prompt, not an id, though it converts to an integer."""
    try:
        operator.index(value)
    except TypeError:
        return False
    return getattr(value, "ndim", 0) == 0


def as_ids(prompt: Any) -> list[int]:
    """Integers of any type, numpy's too; no rounding, no booleans, no bytes."""
    try:
        ids = [None] if isinstance(prompt, bytes) else [index(token) for token in prompt]
    except TypeError:
        ids = [None]
    whole = [token for token in ids if token is not None]
    if len(whole) < len(ids):
        raise SpecError(f"a prompt is a text or a list of token ids, not {prompt!r:.60}")
    return whole


def as_params(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if not isinstance(params, list | tuple) or not all(isinstance(one, SamplingParams) for one in params):
        raise SpecError(f"params are SamplingParams(…), one for all or one each, not {params!r:.60}")
    if len(params) != count:
        raise SpecError(f"{len(params)} SamplingParams for {count} prompts: give one for all, or one each")
    return list(params)


def hf_folder(source: str | Path, step: int | None) -> Path:
    """A folder that vLLM can read."""
    folder = Path(source)
    if step is not None or not is_hf(folder) or is_quantized(folder):
        raise SpecError(f"vLLM reads Hugging Face folders: write one with `lmworks checkpoint export {source} OUT`")
    return folder
