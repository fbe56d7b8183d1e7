"""vLLM behind the same API, against a small stand-in with vLLM's names: what reaches it, and what becomes of it."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from lmworks.engine.core.sampling_params import SamplingParams
from lmworks.engine.vllm import VLLM, engine_options
from lmworks.spec import EngineSpec, LMWorksError, SpecError


@dataclass
class Structured:
    json: Any = None
    regex: str | None = None
    choice: list[str] | None = None


@dataclass
class TheirParams:
    """The names that vLLM 0.22 takes; another one is a TypeError, as there."""

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured_outputs: Structured | None = None


@dataclass
class TheirEngine:
    """Answers "abc…" with token ids 0, 1, 2, …, one a step; what is finished is told once."""

    model_config: Any = field(default_factory=lambda: SimpleNamespace(max_model_len=10))
    waiting: dict[str, tuple[Any, TheirParams]] = field(default_factory=dict)
    told: dict[str, int] = field(default_factory=dict)
    aborted: list[str] = field(default_factory=list)

    def add_request(self, request_id: str, prompt: Any, params: TheirParams) -> None:
        self.waiting[request_id], self.told[request_id] = (prompt, params), 0

    def step(self) -> list[Any]:
        assert self.waiting, "nothing is under way: whoever waits for more waits for ever"
        outputs = []
        for name, given in self.waiting.items():
            self.told[name] += 1
            outputs.append(output(name, *given, length=self.told[name]))
        self.waiting = {one.request_id: self.waiting[one.request_id] for one in outputs if not one.finished}
        return outputs

    def abort_request(self, request_ids: list[str]) -> None:
        self.aborted += request_ids
        self.waiting = {name: given for name, given in self.waiting.items() if name not in request_ids}


class TheirLLM:
    made: SimpleNamespace

    def __init__(self, **options: Any) -> None:
        self.options, self.llm_engine, self.seen = options, TheirEngine(), []
        TheirLLM.made = SimpleNamespace(llm=self)

    def generate(self, prompts: list[Any], sampling_params: list[TheirParams], use_tqdm: bool = True) -> list[Any]:
        self.seen = list(zip(prompts, sampling_params, strict=True))
        return [output(str(i), prompt, params) for i, (prompt, params) in enumerate(self.seen)]


def output(name: str, prompt: Any, params: TheirParams, length: int | None = None) -> Any:
    assert params.max_tokens is not None
    length = params.max_tokens if length is None else length
    ids = [1, 2] if isinstance(prompt, str) else prompt["prompt_token_ids"]
    tokens = list(range(length))

    def table(token: int) -> dict[int, Any]:
        return {token: SimpleNamespace(logprob=-2.0, rank=3), 50: SimpleNamespace(logprob=-0.5, rank=1)}

    finished = length >= params.max_tokens
    answer = {
        "token_ids": tokens,
        "text": "abcdefghij"[:length],
        "finish_reason": "length" if finished else None,
        "stop_reason": None,
        "logprobs": None if params.logprobs is None else [table(token) for token in tokens],
    }
    return SimpleNamespace(
        request_id=name,
        prompt_token_ids=ids,
        prompt_logprobs=None if params.prompt_logprobs is None else [None, *map(table, ids[1:])],
        outputs=[SimpleNamespace(index=index, **answer) for index in range(params.n)],
        num_cached_tokens=None,
        finished=finished,
    )


@pytest.fixture(autouse=True)
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    module, params = ModuleType("vllm"), ModuleType("vllm.sampling_params")
    module.LLM, module.SamplingParams = TheirLLM, TheirParams  # type: ignore[attr-defined]
    params.StructuredOutputsParams = Structured  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", params)


def test_all_sampling_params_reach_vllm() -> None:
    engine = VLLM("folder", EngineSpec(), seed=5)
    wishes = {
        "temperature": 0.5, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.1, "presence_penalty": 0.2,
        "frequency_penalty": 0.3, "seed": 7, "max_tokens": 4, "min_tokens": 2, "ignore_eos": True, "n": 2,
        "logprobs": 1,
    }  # fmt: skip
    ours = SamplingParams(
        **wishes, top_k=3, stop="x", stop_token_ids=[9], include_stop=True, logit_bias={4: 1.0}, choice=("a", "b")
    )
    engine.generate([[1, 2, 3], "text"], [ours, SamplingParams(max_tokens=2)], progress=False)
    (ids, first), (text, second) = TheirLLM.made.llm.seen
    assert ids == {"prompt_token_ids": [1, 2, 3]} and text == "text"
    changed = {
        "top_k": 3, "stop": ["x"], "stop_token_ids": [9], "include_stop_str_in_output": True, "logit_bias": {4: 1.0},
        "structured_outputs": Structured(choice=["a", "b"]),
    }  # fmt: skip
    assert first == TheirParams(**wishes, **changed)
    assert second == TheirParams(max_tokens=2, top_k=-1, stop=[], stop_token_ids=[])


def test_vllm_results_are_translated() -> None:
    engine = VLLM("folder", EngineSpec(), seed=0)
    params = SamplingParams(max_tokens=3, n=2, logprobs=1, prompt_logprobs=0)
    (result,) = engine.generate([[5, 6]], [params], progress=False)
    assert result.prompt_token_ids == [5, 6] and len(result.answers) == 2
    assert (result.token_ids, result.text, result.finish_reason) == ([0, 1, 2], "abc", "length")
    assert result.logprobs is not None and result.prompt_logprobs is not None
    assert [(one.token, one.logprob, one.top) for one in result.logprobs][:2] == [
        (0, -2.0, ((50, -0.5),)),
        (1, -2.0, ((50, -0.5),)),
    ]
    assert result.answers[0].cumulative_logprob == sum(one.logprob for one in result.logprobs)
    assert result.prompt_logprobs[0] is None
    assert (one := result.prompt_logprobs[1]) is not None and (one.token, one.top) == (6, ())


def test_bad_prompt_does_not_affect_others() -> None:
    engine = VLLM("folder", EngineSpec(), seed=0)
    results = engine.generate([[], [1], list(range(10)), ""], [SamplingParams(max_tokens=2)] * 4, progress=False)
    assert [result.finish_reason for result in results] == ["error", "length", "error", "error"]
    assert "empty" in str(results[0].error) and "only 10" in str(results[2].error)
    assert len(TheirLLM.made.llm.seen) == 1
    (twice,) = engine.generate([[]], [SamplingParams(n=2)], progress=False)
    assert [answer.finish_reason for answer in twice.answers] == ["error", "error"]


def test_stream_deltas_add_up_to_answer() -> None:
    engine = VLLM("folder", EngineSpec(), seed=0)
    pieces = list(engine.stream([1], SamplingParams(max_tokens=3, n=2)))
    assert [(piece.index, piece.token_ids, piece.text) for piece in pieces if piece.index == 1] == [
        (1, [0], "a"), (1, [1], "b"), (1, [2], "c"),
    ]  # fmt: skip
    assert [piece.result is not None for piece in pieces] == [False] * 5 + [True]
    assert pieces[-1].finish_reason == "length" and engine.inner.llm_engine.aborted == []


def test_leaving_a_stream_cancels_it() -> None:
    engine = VLLM("folder", EngineSpec(), seed=0)
    stream = engine.stream([1], SamplingParams(max_tokens=9))
    next(stream)
    under_way = list(engine.inner.llm_engine.waiting)
    stream.close()
    assert len(under_way) == 1 and engine.inner.llm_engine.aborted == under_way


@pytest.mark.parametrize("first", [0, 1])
def test_streams_share_steps(first: int) -> None:
    """The last piece of the short one comes in a step that the other asked for, or the other way round."""
    engine = VLLM("folder", EngineSpec(), seed=0)
    streams = [engine.stream([1], SamplingParams(max_tokens=length)) for length in (6, 3)]
    begun = [[next(stream)] for stream in streams]
    for place in (first, 1 - first):
        begun[place] += streams[place]
    assert ["".join(piece.text for piece in pieces) for pieces in begun] == ["abcdef", "abc"]
    results = [pieces[-1].result for pieces in begun]
    assert [None if result is None else result.text for result in results] == ["abcdef", "abc"]
    assert engine.inner.llm_engine.aborted == []


def test_closed_stream_does_not_affect_others() -> None:
    engine = VLLM("folder", EngineSpec(), seed=0)
    left, read = (engine.stream([1], SamplingParams(max_tokens=4)) for _ in range(2))
    assert (next(left).text, next(read).text, next(left).text) == ("a", "a", "b")
    left.close()
    assert "".join(piece.text for piece in read) == "bcd"


def test_generate_does_not_wait_for_streams() -> None:
    """vLLM's own call runs until nothing is under way, and would take the end of a stream for one of its results."""
    engine = VLLM("folder", EngineSpec(), seed=0)
    stream = engine.stream([1], SamplingParams(max_tokens=4))
    next(stream)
    with pytest.raises(LMWorksError, match="while a stream is open: read it to its end, or close it"):
        engine.generate([[1]], [SamplingParams(max_tokens=2)], progress=False)
    assert "".join(piece.text for piece in stream) == "bcd"
    assert engine.generate([[1]], [SamplingParams(max_tokens=2)], progress=False)[0].text == "ab"


def test_engine_options_are_passed() -> None:
    VLLM("folder", EngineSpec(dtype="bf16", kv_dtype="fp8", tp=2, context=2048, graphs=False, memory=0.5), seed=5)
    options = TheirLLM.made.llm.options
    assert options == {
        "model": "folder", "seed": 5, "dtype": "bfloat16", "kv_cache_dtype": "fp8", "tensor_parallel_size": 2,
        "max_model_len": 2048, "enforce_eager": True, "gpu_memory_utilization": 0.5, "block_size": 16,
        "max_num_seqs": 256, "enable_prefix_caching": True,
    }  # fmt: skip
    assert engine_options(EngineSpec(speculate="ngram", guesses=3))["speculative_config"] == {
        "method": "ngram", "prompt_lookup_max": 4, "num_speculative_tokens": 3,
    }  # fmt: skip
    draft = engine_options(EngineSpec(speculate="draft", draft="small"))["speculative_config"]
    assert draft == {"model": "small", "num_speculative_tokens": 4}


@pytest.mark.parametrize(
    ("spec", "params", "said"),
    [
        (EngineSpec(kv_dtype="int8"), SamplingParams(), "kv_dtype"),
        (EngineSpec(batch_invariant=True), SamplingParams(), "VLLM_BATCH_INVARIANT"),
        (EngineSpec(device="cpu"), SamplingParams(), "device"),
        (EngineSpec(), SamplingParams(best_of=3), "best_of"),
        (EngineSpec(), SamplingParams(adapter="mine"), "adapter = 'mine'"),
    ],
)
def test_options_without_vllm_support_are_rejected_by_name(spec: EngineSpec, params: SamplingParams, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        VLLM("folder", spec, seed=0).generate([[1]], [params], progress=False)


def test_missing_vllm_names_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(LMWorksError, match="pip install vllm"):
        VLLM("folder", EngineSpec(), seed=0)
