"""vLLM as the engine behind the same API: requests and results are translated.

An option that vLLM does not support is an error that names it.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..spec import EngineSpec, LMWorksError, SpecError
from .core.request import Answer, Logprob, OutputDelta, Request, Result, ResultCallback, ignore_result
from .core.sampling_params import SamplingParams

Prompt = str | list[int]

DTYPES = {"auto": "auto", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
FINISHED = {"stop": "stop", "length": "length", "abort": "cancelled"}
LOOKUP = 4  # longest n-gram


@dataclass(frozen=True)
class Stream:
    """An open stream."""

    request: Request
    sent: dict[int, tuple[int, int]] = field(default_factory=dict)  # tokens and characters so far, by answer
    queue: list[OutputDelta] = field(default_factory=list)


class VLLM:
    """A Hugging Face folder, served by vLLM."""

    def __init__(self, folder: str, spec: EngineSpec, seed: int) -> None:
        try:
            vllm: Any = importlib.import_module("vllm")
        except ImportError as error:
            raise LMWorksError(f'engine "vllm" needs vLLM ({error}): pip install vllm') from None
        self.module = vllm
        self.inner = vllm.LLM(model=folder, seed=seed, **engine_options(spec))
        self.context: int = self.inner.llm_engine.model_config.max_model_len
        self.requests = 0
        self.streams: dict[str, Stream] = {}  # open ones, by request id

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        progress: bool,
        on_result: ResultCallback = ignore_result,
    ) -> list[Result]:
        """Results in order. Bad prompts are filtered out, as vLLM rejects a whole call for one."""
        if self.streams:  # vLLM would mix their outputs with this call's
            raise LMWorksError("vLLM cannot generate while a stream is open: read it to its end, or close it")
        given = enumerate(zip(prompts, params, strict=True))
        results = {
            place: Result.failed(ids(prompt), error, one.n)
            for place, (prompt, one) in given
            if (error := self.prompt_error(prompt))
        }
        good = [place for place in range(len(prompts)) if place not in results]
        outputs = self.inner.generate(
            [inputs(prompts[place]) for place in good],
            [self.sampling(params[place]) for place in good],
            use_tqdm=progress,
        )
        results |= {place: to_result(output, params[place]) for place, output in zip(good, outputs, strict=True)}
        for place, result in results.items():
            on_result(place, result)
        return [results[place] for place in range(len(prompts))]

    def stream(self, prompt: Prompt, params: SamplingParams) -> Generator[OutputDelta, None, None]:
        """Deltas as they come; closing the generator cancels the request."""
        request = Request(ids(prompt), params, stream=True)
        if error := self.prompt_error(prompt):
            yield OutputDelta(request, 0, [], finish_reason="error", result=Result.failed(ids(prompt), error, params.n))
            return
        engine, name, stream = self.inner.llm_engine, f"lmworks-{self.requests}", Stream(request)
        self.requests += 1
        engine.add_request(name, inputs(prompt), self.sampling(params))
        self.streams[name] = stream
        finished = False
        try:
            while not finished:
                if not stream.queue:
                    self.step(engine)
                while stream.queue:
                    delta = stream.queue.pop(0)
                    finished = delta.result is not None
                    yield delta
        finally:
            del self.streams[name]
            if not finished:
                engine.abort_request([name])

    def step(self, engine: Any) -> None:
        """Step the engine and queue the deltas of all streams."""
        for output in engine.step():
            if (stream := self.streams.get(output.request_id)) is not None:
                stream.queue.extend(self.deltas(stream, output))

    def deltas(self, stream: Stream, output: Any) -> Iterator[OutputDelta]:
        """New output of each answer since the last call; vLLM returns all of it every time."""
        result = to_result(output, stream.request.params) if output.finished else None
        for place, one in enumerate(output.outputs):
            tokens, characters = stream.sent.get(one.index, (0, 0))
            stream.sent[one.index] = len(one.token_ids), len(one.text)
            last = place == len(output.outputs) - 1
            yield OutputDelta(
                stream.request,
                one.index,
                list(one.token_ids[tokens:]),
                one.text[characters:],
                finish_reason=FINISHED.get(one.finish_reason or "", one.finish_reason),
                result=result if last else None,
            )

    def close(self) -> None:
        """vLLM stops its processes when its engine is deleted."""
        del self.inner

    def prompt_error(self, prompt: Prompt) -> str | None:
        if len(prompt) == 0:
            return "the prompt is empty: give at least one token"
        if not isinstance(prompt, str) and len(prompt) >= self.context:
            return f"the prompt has {len(prompt)} tokens, and the model's context only {self.context}; shorten it"
        return None

    def sampling(self, params: SamplingParams) -> Any:
        return self.module.SamplingParams(**sampling_options(params), **self.structured_outputs(params))

    def structured_outputs(self, params: SamplingParams) -> dict[str, Any]:
        if not params.structured:
            return {}
        module: Any = importlib.import_module("vllm.sampling_params")
        newer = {"grammar": params.grammar, "structural_tag": tag_text(params.structural_tag)}
        shape = module.StructuredOutputsParams(
            json=params.json_schema,
            regex=params.regex,
            choice=None if params.choice is None else list(params.choice),
            **{name: value for name, value in newer.items() if value is not None},
        )
        return {"structured_outputs": shape}


# --- options for vLLM --------------------------------------------------------------------------------------


def engine_options(spec: EngineSpec) -> dict[str, Any]:
    """Arguments of vllm.LLM. Values of 0 or auto are left to vLLM's defaults."""
    if spec.kv_dtype == "int8":
        raise SpecError('engine.kv_dtype = "int8": vLLM has no such cache; it has fp8')
    if spec.batch_invariant:
        raise SpecError("engine.batch_invariant is a setting of vLLM's process: start it with VLLM_BATCH_INVARIANT=1")
    if spec.device == "cpu":
        raise SpecError('engine.device = "cpu": vLLM runs on the device it was built for, which cannot be chosen here')
    options: dict[str, Any] = {
        "dtype": DTYPES[spec.dtype],
        "kv_cache_dtype": spec.kv_dtype,
        "block_size": spec.block,
        "gpu_memory_utilization": spec.memory,
        "max_num_seqs": spec.max_seqs,
        "enable_prefix_caching": spec.prefix_cache,
        "enforce_eager": not spec.graphs,
        "tensor_parallel_size": spec.tp,
    }
    given = {
        "num_gpu_blocks_override": spec.blocks,
        "max_model_len": spec.context,
        "max_num_batched_tokens": spec.max_batch_tokens,
    }
    options |= {name: value for name, value in given.items() if value}
    draft_tokens = {"num_speculative_tokens": spec.guesses}
    if spec.speculate == "ngram":
        options["speculative_config"] = {"method": "ngram", "prompt_lookup_max": LOOKUP, **draft_tokens}
    elif spec.speculate == "draft":
        options["speculative_config"] = {"model": spec.draft, **draft_tokens}
    return options


def sampling_options(params: SamplingParams) -> dict[str, Any]:
    """Arguments of vllm.SamplingParams, except structured output."""
    if params.best_of not in (None, params.n):
        raise SpecError("vLLM does not support best_of any more; request n answers with logprobs and choose")
    if params.cache_salt is not None:
        raise SpecError("cache_salt is not passed on to vLLM; use the native engine")
    if params.adapter is not None:
        raise SpecError(f"adapter = {params.adapter!r}: adapters are not passed on to vLLM; use the native engine")
    newer = {
        "allowed_token_ids": None if params.allowed_token_ids is None else list(params.allowed_token_ids),
        "bad_words": list(params.bad_words) or None,
        "skip_special_tokens": None if params.skip_special_tokens else False,
        "truncate_prompt_tokens": params.truncate_prompt_tokens,
    }
    return {name: value for name, value in newer.items() if value is not None} | {
        "n": params.n,
        "temperature": params.temperature,
        "top_k": params.top_k or -1,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "repetition_penalty": params.repetition_penalty,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "logit_bias": dict(params.logit_bias) or None,
        "seed": params.seed,
        "max_tokens": params.max_tokens,
        "min_tokens": params.min_tokens,
        "stop": list(params.stop),
        "stop_token_ids": list(params.stop_token_ids),
        "ignore_eos": params.ignore_eos,
        "include_stop_str_in_output": params.include_stop,
        "logprobs": params.logprobs,
        "prompt_logprobs": params.prompt_logprobs,
    }


def tag_text(tag: Mapping[str, Any] | str | None) -> str | None:
    """vLLM takes structural tags as JSON."""
    return json.dumps(tag, default=dict) if isinstance(tag, Mapping) else tag


def inputs(prompt: Prompt) -> Any:
    return prompt if isinstance(prompt, str) else {"prompt_token_ids": list(prompt)}


def ids(prompt: Prompt) -> list[int]:
    return [] if isinstance(prompt, str) else list(prompt)


# --- results -----------------------------------------------------------------------------------------------


def to_result(output: Any, params: SamplingParams) -> Result:
    prompt = list(output.prompt_token_ids)
    return Result(
        prompt_token_ids=prompt,
        answers=[to_answer(one, params) for one in output.outputs],
        prompt_logprobs=to_logprobs(prompt, output.prompt_logprobs, params.prompt_logprobs),
        cached_tokens=output.num_cached_tokens or 0,
    )


def to_answer(one: Any, params: SamplingParams) -> Answer:
    logprobs = to_logprobs(one.token_ids, one.logprobs, params.logprobs)
    return Answer(
        token_ids=list(one.token_ids),
        text=one.text,
        finish_reason=FINISHED.get(one.finish_reason, one.finish_reason),
        logprobs=logprobs,
        stop_reason=one.stop_reason,
        cumulative_logprob=None if logprobs is None else sum(each.logprob for each in logprobs),
    )


def to_logprobs(tokens: Sequence[int], places: Sequence[Any] | None, most: int | None) -> Any:
    """vLLM's tables (token → log-probability and rank) hold the token itself and the likeliest ones."""
    if places is None or most is None:
        return None
    return [
        None if table is None else to_logprob(token, table, most) for token, table in zip(tokens, places, strict=True)
    ]


def to_logprob(token: int, table: Mapping[int, Any], most: int) -> Logprob:
    ordered = sorted(table.items(), key=lambda item: -item[1].logprob)
    return Logprob(token, table[token].logprob, tuple((other, one.logprob) for other, one in ordered[:most]))
