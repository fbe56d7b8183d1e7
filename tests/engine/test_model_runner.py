"""The runner against the network that trains: the same log-probabilities, for every shape, however steps are cut."""

from __future__ import annotations

import copy
import math
import time
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch

from lmworks.engine.core import sampler as sampler_module
from lmworks.engine.core.cuda_graphs import CUDAGraphs, prefill_buckets
from lmworks.engine.core.engine import Engine
from lmworks.engine.core.kv_cache import KVCache, KVCacheShape
from lmworks.engine.core.model_runner import ModelRunner
from lmworks.engine.core.request import PLACEHOLDER_TOKEN, Request, Result, Sequence
from lmworks.engine.core.sampling_params import SamplingParams
from lmworks.engine.core.scheduler import Chunk, Step
from lmworks.engine.core.step_input import Layout, Packer, decode_bucket, mixed_bucket, unpack
from lmworks.engine.core.step_limits import batch_tokens, context_of_token
from lmworks.engine.speculative.draft_model import DraftModel, DraftModelProposer
from lmworks.engine.speculative.ngram import NgramProposer
from lmworks.engine.speculative.verification import Speculator
from lmworks.model import GPT, generate
from lmworks.spec import EngineSpec, LMWorksError, ModelSpec, SpecError
from variations import with_slow

SHAPES: dict[str, dict[str, Any]] = {
    "gqa": {},
    "qk-norm-tied": {"qk_norm": True, "tie_embeddings": True},
    "qkv-bias": {"qkv_bias": True},
    "gpt2": {"norm": "layer", "positions": "learned", "mlp": "gelu", "bias": True, "kv_heads": 4},
    "swiglu-bias": {"bias": True},
    "geglu": {"mlp": "geglu", "out_bias": True},
    "scales": {"attention_scale": 0.1, "embed_scale": 3.0, "residual_scale": 0.4, "logit_scale": 0.5},
    "scaled scores, qk-norm": {"attention_scale": 0.5, "qk_norm": True, "rope_layers": ("rope", "none")},
    "partial rotary": {"rope_fraction": 0.5, "qk_norm": True, "rope_scaling": {"type": "yarn", "factor": 4.0}},
    "norms after": {"norm_placement": "post", "qk_norm_whole": True, "attention_scale": 0.4},
    "norms before and after": {"norm_placement": "both"},
    "dense layers among experts": {"experts": 4, "shared_experts": 1, "mlp_layers": ("dense", "experts")},
    "exact gelu": {"mlp": "gelu_erf", "norm": "layer", "mlp_bias": True},
    "alibi": {"positions": "alibi"},
    "window": {"sliding_window": 9},
    "layers": {"sliding_window": 9, "layer_types": ("full", "sliding"), "rope_local_theta": 50.0},
    "soft-cap": {"attention_softcap": 1.0, "final_softcap": 3.0},
    "sinks": {"attention_sinks": True, "sliding_window": 9},
    "no-positions": {"positions": "none"},
    "yarn": {"rope_scaling": {"type": "yarn", "factor": 4.0}},
    "llama3-scaling": {"rope_scaling": {"type": "llama3", "factor": 4.0}},
    "ntk": {"rope_scaling": {"type": "ntk", "factor": 4.0}, "rope_theta": 1e6},
    "moe": {"experts": 4, "top_k": 2, "shared_experts": 1, "balance_bias": 0.01},
    "latent attention": {"kv_lora_rank": 12, "q_lora_rank": 20, "rope_head_dim": 4, "v_head_dim": 6, "kv_heads": 4},
    "latent attention, window, moe": {
        "kv_lora_rank": 12,
        "rope_head_dim": 4,
        "kv_heads": 4,
        "sliding_window": 9,
        "experts": 4,
        "rope_interleaved": True,
    },
}
each_shape = pytest.mark.parametrize("shape", SHAPES)
# Their kernels are those of others.
OTHER_SHAPES = (
    "qk-norm-tied", "qkv-bias", "swiglu-bias", "no-positions", "yarn", "llama3-scaling", "ntk", "window",
    "latent attention", "soft-cap",
)  # fmt: skip


def lively(**shape: Any) -> GPT:
    """Random weights, biases and norms, so that every one of them counts."""
    model = GPT(ModelSpec.from_preset("tiny", **shape))
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(float(parameter.dim() == 1), 0.12, generator=draw)
        for buffer in model.buffers():
            buffer.normal_(0, 0.1, generator=draw)
    return model.eval()


def prompts_of(lengths: list[int]) -> list[list[int]]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randint(0, 320, (length,), generator=draw).tolist() for length in lengths]


def runner_of(model: GPT, **spec: Any) -> ModelRunner:
    given = {"block": 4, "max_seqs": 4, "max_batch_tokens": 24, **spec}
    return ModelRunner(copy.deepcopy(model), EngineSpec(**given), "cpu", 320)


def answered(
    runner: ModelRunner, prompts: list[list[int]], *params: SamplingParams, speculator: Speculator | None = None
) -> list[Result]:
    engine = Engine(runner, None, speculator=speculator)
    requests = [Request(prompt, each) for prompt, each in zip(prompts, params, strict=True)]
    for request in requests:
        engine.add(request)
    done = {piece.request.id: piece.result for piece in engine.run() if piece.result is not None}
    return [done[request.id] for request in requests]


def log_probabilities(model: GPT, tokens: list[int]) -> torch.Tensor:
    """As the trainer computes them: row t is the distribution of token t + 1."""
    with torch.no_grad():
        return model(torch.tensor([tokens]))[0].double().log_softmax(dim=-1)


@each_shape
def test_logprobs_equal_training_model(shape: str) -> None:
    """Within 1e-5, of every token sampled, with prompts in chunks beside sequences that decode."""
    model = lively(**SHAPES[shape])
    prompts = prompts_of([30, 3, 50, 11])
    params = [SamplingParams(temperature=1.0, max_tokens=12, logprobs=3, seed=7, ignore_eos=True)] * 4
    for result in answered(runner_of(model), prompts, *params):
        expected = log_probabilities(model, result.prompt_token_ids + result.token_ids)
        assert result.logprobs is not None and len(result.logprobs) == 12
        for place, found in enumerate(result.logprobs):
            row = expected[len(result.prompt_token_ids) - 1 + place]
            assert found.logprob == pytest.approx(row[found.token].item(), abs=1e-5)
            best = row.topk(3)
            assert [token for token, _ in found.top] == best.indices.tolist()
            np.testing.assert_allclose([value for _, value in found.top], best.values, atol=1e-5)


@each_shape
def test_greedy_tokens_equal_generation(shape: str) -> None:
    model = lively(**SHAPES[shape])
    prompts = prompts_of([9, 41])
    params = [SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)] * 2
    for prompt, result in zip(prompts, answered(runner_of(model), prompts, *params), strict=True):
        assert prompt + result.token_ids == generate(model, torch.tensor([prompt]), 20)[0].tolist()


def sequence_of(runner: ModelRunner, prompt: list[int], slot: int, blocks: list[int], **params: Any) -> Sequence:
    given = {"temperature": 0.0, "max_tokens": 40, **params}
    sequence = Sequence(Request(prompt, SamplingParams(**given)), 0, 0, list(prompt), len(prompt), slot=slot)
    sequence.blocks = blocks
    runner.admit(sequence)
    return sequence


def test_tokens_unknown_to_host() -> None:
    """Ten steps are launched before the first is read; each takes its token from the device's table, by slot."""
    model = lively()
    prompts = prompts_of([9, 14])
    runner = runner_of(model)
    sequences = [
        sequence_of(runner, prompt, slot, list(range(20 * slot, 20 * slot + 20)))
        for slot, prompt in ((3, prompts[0]), (1, prompts[1]))
    ]
    launched = [runner.launch(Step([Chunk(each, 0, each.num_prompt_tokens, 1) for each in sequences]))]
    for _ in range(10):
        for each in sequences:
            each.tokens.append(PLACEHOLDER_TOKEN)
        sequences.reverse()
        launched.append(runner.launch(Step([Chunk(each, len(each.tokens) - 1, 1, 1) for each in sequences])))
    for each in sequences:
        expected = generate(model, torch.tensor([each.tokens[: each.num_prompt_tokens]]), 11)[
            0, each.num_prompt_tokens :
        ].tolist()
        rows = [next(i for i, chunk in enumerate(one.chunks) if chunk.sequence is each) for one in launched]
        assert [one.read().tokens[row] for one, row in zip(launched, rows, strict=True)] == expected


class Unrecorded(CUDAGraphs[Any]):
    """What surrounds a CUDA graph, without one: padding, and one buffer that all steps are written to."""

    def __init__(self, runner: ModelRunner) -> None:
        self.work, self.sizes, self.mixed_buckets = runner.forward_and_sample, [1, 3, 8], set()
        self.prompts = prefill_buckets(runner.model.spec, runner.spec)
        self.buffer = torch.full((8192,), -7, dtype=torch.int64)
        self.kinds: list[str] = []
        self.given_back = 0

    def drop_prefill_graphs(self) -> bool:
        self.given_back += 1
        return self.given_back == 1

    def run(self, buffer: torch.Tensor, layout: Layout, sampling_metadata: Any) -> Any:
        self.kinds.append("decoding" if layout.rows == layout.tokens else "mixed")
        self.buffer[: layout.size].copy_(buffer)
        return self.work(unpack(self.buffer, layout), sampling_metadata)


@pytest.mark.parametrize(
    ("shape", "cut"),
    [
        pytest.param("gqa", {}, marks=pytest.mark.slow),
        ("gqa", {"top_k": 5}),
        pytest.param("gqa", {"repetition_penalty": 1.3}, marks=pytest.mark.slow),
        pytest.param("gpt2", {"top_k": 5}, marks=pytest.mark.slow),
        ("alibi", {}),
        ("window", {"repetition_penalty": 1.3}),
    ],
)
def test_padded_steps_equal_unpadded(shape: str, cut: dict[str, Any]) -> None:
    """With the sampler in the graph, and (for a penalty) behind it."""
    model = lively(**SHAPES[shape])
    prompts = prompts_of([30, 3, 50, 11, 20])
    params = [SamplingParams(temperature=0.7, max_tokens=4 + 5 * i, seed=i, ignore_eos=True, **cut) for i in range(5)]
    plain, padded = runner_of(model, max_seqs=8), runner_of(model, max_seqs=8)
    padded.graphs = Unrecorded(padded)
    for _ in range(2):  # prompts beside answers are taken up by a graph when their kind comes again
        expected = [result.token_ids for result in answered(plain, prompts, *params)]
        assert [result.token_ids for result in answered(padded, prompts, *params)] == expected
    assert {"decoding", "mixed"} == set(padded.graphs.kinds)


@pytest.mark.parametrize("at", ["the network", "the likeliest tokens"])
def test_oom_step_retries_without_prefill_graphs(at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the first try is left: not a token is counted twice."""
    model, prompts = lively(), prompts_of([30, 3])
    ask = SamplingParams(temperature=0.7, max_tokens=9, seed=1, ignore_eos=True, logprobs=2, frequency_penalty=2)
    expected = answered(runner_of(model), prompts, ask, ask)
    runner = runner_of(model)
    graphs = runner.graphs = Unrecorded(runner)
    owner, name = (ModelRunner, "states") if at == "the network" else (sampler_module, "top_k_logprobs")
    usual, calls = getattr(owner, name), count(1)

    def sometimes_short(*given: Any) -> Any:
        if next(calls) == 3:
            raise torch.OutOfMemoryError("for the test")
        return usual(*given)

    monkeypatch.setattr(owner, name, sometimes_short)
    found = answered(runner, prompts, ask, ask)
    assert [each.token_ids for each in found] == [each.token_ids for each in expected]
    assert graphs.given_back == 1
    calls = count(3)
    with pytest.raises(torch.OutOfMemoryError):  # there is nothing left to give back
        answered(runner, prompts, ask, ask)


@pytest.mark.parametrize(
    ("temperature", "source"),
    [
        (0.0, "ngram"),
        (0.7, "draft"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((0.0, "draft"), (0.7, "ngram"))),
    ],
)
def test_padded_draft_steps_equal_unpadded(source: str, temperature: float) -> None:
    """Sequences with and without guesses in one padded step, judged as in a step that is not padded."""
    model = lively()
    prompts = [prompt * 4 for prompt in prompts_of([7, 3, 12, 5])]
    params = [
        SamplingParams(temperature=temperature, max_tokens=8 + 7 * i, seed=i, ignore_eos=True, logprobs=i % 2 or None)
        for i in range(4)
    ]
    results = []
    for graphs in (False, True):
        spec = EngineSpec(
            block=4, max_seqs=8, speculate=source, draft="given below" * (source == "draft"), guesses=3, blocks=200
        )
        draft = DraftModel(lively(layers=1)) if source == "draft" else None
        runner = ModelRunner(copy.deepcopy(model), spec, "cpu", 320, draft)
        if graphs:
            runner.graphs = Unrecorded(runner)
        speculator = Speculator(runner.spec, NgramProposer() if draft is None else DraftModelProposer())
        results.append(answered(runner, prompts, *params, speculator=speculator))
    for plain, padded in zip(*results, strict=True):
        assert padded.token_ids == plain.token_ids
        mine, theirs = ([each.logprob for each in result.logprobs or ()] for result in (padded, plain))
        assert mine == pytest.approx(theirs, abs=1e-5)


def test_log_probabilities_of_prompts() -> None:
    model = lively()
    prompts = prompts_of([30, 5, 1])
    runner = runner_of(model)
    found: dict[int, dict[int, Any]] = {0: {}, 1: {}, 2: {}}
    sequences = [
        sequence_of(runner, prompt, slot, list(range(10 * slot, 10 * slot + 10)), prompt_logprobs=2 * (slot == 0))
        for slot, prompt in enumerate(prompts)
    ]
    steps = [
        [Chunk(sequences[2], 0, 1, 1), Chunk(sequences[0], 0, 11, 0)],
        [Chunk(sequences[0], 11, 12, 0), Chunk(sequences[1], 0, 5, 1)],
        [Chunk(sequences[0], 23, 7, 1)],
    ]
    for chunks in steps:
        for part in runner.launch(Step(chunks)).prompt_logprobs():
            found[sequences.index(part.sequence)] |= dict(enumerate(part.logprobs, part.first))
    for index, prompt in enumerate(prompts):
        assert sorted(found[index]) == list(range(1, len(prompt)))
        expected = log_probabilities(model, prompt)
        for place, logprob in found[index].items():
            assert logprob.token == prompt[place]
            assert logprob.logprob == pytest.approx(expected[place - 1, prompt[place]].item(), abs=1e-5)
            best = expected[place - 1].topk(2).indices.tolist() if index == 0 else []
            assert [token for token, _ in logprob.top] == best


def test_blocks_are_copied_in_every_layer() -> None:
    """A sequence goes on from copies of another's blocks, and its table follows."""
    model = lively()
    prompt = prompts_of([10])[0]
    runner = runner_of(model)
    one = sequence_of(runner, prompt, 0, [0, 1, 2])
    first = runner.launch(Step([Chunk(one, 0, 10, 1)])).read().tokens
    other = sequence_of(runner, prompt, 1, [0, 1, 2])
    runner.launch(Step([Chunk(other, 9, 1, 1)]))  # its table now names the blocks of the first
    other.blocks = [0, 7, 8]
    other.tokens += first
    one.tokens += [5]
    runner.launch(Step([Chunk(one, 10, 1, 1)]))
    copied = Step([Chunk(other, 10, 1, 1)], [(1, 7), (2, 8)])
    assert first + runner.launch(copied).read().tokens == generate(model, torch.tensor([prompt]), 2)[0, 10:].tolist()
    for cache in runner.cache.layers:
        assert torch.equal(cache.keys[7], cache.keys[1]) and not torch.equal(cache.keys[8], cache.keys[2])


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_quantized_cache_is_close(kind: str) -> None:
    """Not the same, and near: a scale that is forgotten or misplaced would be far off."""
    model = lively()
    prompts = prompts_of([40])
    ask = SamplingParams(temperature=0, max_tokens=6, logprobs=1, ignore_eos=True)
    (exact,) = answered(runner_of(model), prompts, ask)
    (rough,) = answered(runner_of(model, kv_dtype=kind), prompts, ask)
    assert exact.logprobs is not None and rough.logprobs is not None
    off = abs(exact.logprobs[0].logprob - rough.logprobs[0].logprob)
    assert 1e-6 < off < 0.05


@pytest.mark.parametrize("shape", with_slow(SHAPES, (*OTHER_SHAPES, "moe")))  # experts: with the latent attention
def test_batch_invariance(shape: str) -> None:
    """Bitwise the same log-probabilities alone, in any batch, and however the prompt is cut."""
    model = lively(**SHAPES[shape])
    prompts = prompts_of([30, 3, 50, 11])
    ask = {"temperature": 0.8, "max_tokens": 8, "logprobs": 0, "prompt_logprobs": 0, "ignore_eos": True}
    params = [SamplingParams(**ask, seed=i) for i in range(4)]

    def bits(results: list[Result]) -> list[list[tuple[int, float]]]:
        both = [[*(result.prompt_logprobs or ())[1:], *(result.logprobs or ())] for result in results]
        return [[(each.token, each.logprob) for each in one if each is not None] for one in both]

    invariant = {"batch_invariant": True}
    alone = [
        bits(answered(runner_of(model, **invariant, max_batch_tokens=100), [p], each))[0]
        for p, each in zip(prompts, params, strict=True)
    ]
    assert bits(answered(runner_of(model, **invariant), prompts, *params)) == alone
    assert (
        bits(answered(runner_of(model, **invariant, max_batch_tokens=13), prompts[::-1], *params[::-1])) == alone[::-1]
    )


@pytest.mark.parametrize(
    ("card", "model", "tp", "tokens"),
    [
        ("NVIDIA H200", "qwen3-0.6b", 1, 8192),
        ("NVIDIA H200", "llama3-8b", 1, 8192),
        ("NVIDIA H200", "llama3-70b", 1, 2048),
        ("NVIDIA H200", "llama3-70b", 4, 4096),
        ("NVIDIA A100-SXM4-80GB", "llama3-8b", 1, 2048),
        ("a card of tomorrow", "llama3-70b", 1, 8192),
    ],
)
def test_tokens_of_a_step_by_card(card: str, model: str, tp: int, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarter of a second at 60 % of the peak: 148 TFLOP on an H200, where a token of 8B takes 14 GFLOP."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: card)
    assert batch_tokens(ModelSpec.from_preset(model), torch.device("cuda"), tp) == tokens


def test_context_that_takes_as_long_as_the_products_of_a_token() -> None:
    """Llama 3 8B multiplies a token with 218,103,808 weights of a block, and a key with 32 queries of 128 numbers."""
    llama = ModelSpec.from_preset("llama3-8b")
    assert context_of_token(llama) == pytest.approx(0.7 * 218_103_808 / (2 * 32 * 128))
    assert context_of_token(llama.replace(sliding_window=4096)) == math.inf
    latent = ModelSpec.from_preset("tiny", hidden=64, heads=4, kv_heads=4, kv_lora_rank=32, rope_head_dim=16)
    # scores over 48 numbers of a cached vector, and a sum of as many
    assert context_of_token(latent) == pytest.approx(0.7 * 2 * latent.block_matmul_params / (4 * 4 * 48))


def test_defaults_are_resolved() -> None:
    model = lively()
    spec = runner_of(model, max_batch_tokens=0).spec
    assert (spec.dtype, spec.context, spec.max_batch_tokens) == ("fp32", 128, 512)
    assert spec.blocks == 4 * 32  # more than all sequences at their longest need nobody
    assert runner_of(model, blocks=9).blocks == 9
    with pytest.raises(SpecError, match=r"engine.context = 129 is more than the model's context of 128"):
        runner_of(model, context=129)


def test_dynamic_scaling_is_served_within_the_original_context() -> None:
    """Where it does nothing: keys in a cache would keep the angles of a shorter sequence."""
    model = lively(rope_scaling={"type": "dynamic", "factor": 4.0})
    with pytest.raises(SpecError, match=r"use engine.context of at most 32, or 'ntk' with a factor"):
        runner_of(model)
    assert runner_of(model, context=32).spec.context == 32


def test_too_little_memory_for_kv_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmworks.engine.core.model_runner.CPU_BYTES", 1000)
    with pytest.raises(LMWorksError, match=r"no memory is left for the cache: one block of 4 tokens takes 2,048 bytes"):
        runner_of(lively())


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_odd_head_dim_rejects_8_bit_cache(kind: str) -> None:
    """Kernels read it in pairs."""
    model = lively(hidden=60, heads=4, kv_heads=4, positions="alibi")
    with pytest.raises(SpecError, match=rf"kv_dtype = '{kind}'.*even.*head_dim.* 15; use.*'auto'"):
        runner_of(model, kv_dtype=kind)
    runner_of(model)


@pytest.mark.parametrize("kind", ["auto", "fp8"])
def test_block_bytes_match_allocation(kind: str) -> None:
    shape = KVCacheShape.of(ModelSpec.from_preset("tiny"), EngineSpec(kv_dtype=kind), torch.bfloat16)
    cache = KVCache(shape, 3, torch.device("cpu"))
    held = cache.store.nbytes + (0 if cache.scales is None else cache.scales.nbytes)
    assert held == 3 * shape.block_bytes


def decoding(packer: Packer, count: int, length: int) -> Step:
    blocks = -(-(length + 50) // 16)
    chunks = []
    for slot in range(count):
        request = Request([1] * length, SamplingParams(max_tokens=50))
        sequence = Sequence(request, 0, 0, [1] * length + [PLACEHOLDER_TOKEN], length, slot=slot)
        sequence.blocks = list(range(slot * blocks, (slot + 1) * blocks))
        packer.admit(sequence)
        chunks.append(Chunk(sequence, length, 1, 1))
    return Step(chunks)


def test_step_packing_is_fast() -> None:
    """256 sequences of a thousand tokens: half a millisecond on the host, at best: the machine may be busy."""
    packer = Packer(EngineSpec(context=4096, max_batch_tokens=8192), vocab=1000, pinned=False)
    step = decoding(packer, 256, 1000)
    times = [math.inf]
    while min(times) >= 1.5e-3 and len(times) < 500:  # seen: 0.4 ms
        begin = time.thread_time()
        packer.pack(step, decode_bucket(256))
        times.append(time.thread_time() - begin)
    assert min(times) < 1.5e-3


def test_a_padded_step_adds_padding_rows() -> None:
    packer = Packer(EngineSpec(context=256, max_seqs=8, max_batch_tokens=64), vocab=1000, pinned=False)
    step = decoding(packer, 3, 20)
    buffer, layout = packer.pack(step, decode_bucket(8))
    batch = unpack(buffer, layout)
    assert batch.tokens.tolist() == [1000, 1001, 1002, 0, 0, 0, 0, 0]
    assert batch.slot_mapping[:3].tolist() == [1 * 16 + 4, 6 * 16 + 4, 11 * 16 + 4] and set(
        batch.slot_mapping[3:].tolist()
    ) == {-1}
    assert batch.rows.tolist() == [0, 1, 2, 8, 8, 8, 8, 8]
    (metadata,) = batch.attention_metadata
    assert metadata.seq_lens.tolist() == [21, 21, 21, 0, 0, 0, 0, 0] and metadata.query_start_loc.tolist() == list(
        range(9)
    )
    assert batch.logits_indices is None
    dummy_decode = unpack(*packer.dummy_step(decode_bucket(4)))
    assert dummy_decode.slot_mapping.tolist() == [-1] * 4 and dummy_decode.rows.tolist() == [8] * 4
    assert dummy_decode.attention_metadata[0].seq_lens.tolist() == [0] * 4 and dummy_decode.attention_metadata[
        0
    ].query_start_loc.tolist() == list(range(5))


def test_mixed_prefill_decode_bucket() -> None:
    """Longer chunks lie behind all the places for single tokens, and late tables count from there."""
    packer = Packer(EngineSpec(context=256, max_seqs=8, max_batch_tokens=64), vocab=1000, pinned=False)
    singles = decoding(packer, 3, 20).chunks
    prompts = [Chunk(chunk.sequence, 5, 4, int(i == 1)) for i, chunk in enumerate(decoding(packer, 5, 30).chunks[3:])]
    batch = unpack(*packer.pack(Step(singles + prompts), mixed_bucket(4, 4, 12, 8)))
    assert batch.tokens.tolist() == [1000, 1001, 1002, 0, *[1] * 8, *[0] * 4]
    assert batch.positions.tolist() == [20, 20, 20, 0, 5, 6, 7, 8, 5, 6, 7, 8, 0, 0, 0, 0]
    assert batch.logits_indices is not None and batch.logits_indices[:4].tolist() == [0, 1, 2, 11]
    assert batch.rows.tolist() == [0, 1, 2, 4, 8, 8, 8, 8] and (batch.slot_mapping < 0).tolist() == [
        *[False] * 3, True, *[False] * 8, *[True] * 4
    ]  # fmt: skip
    decode, prefill = batch.attention_metadata
    assert (decode.query_start_loc.tolist(), decode.seq_lens.tolist()) == ([0, 1, 2, 3, 4], [21, 21, 21, 0])
    assert (prefill.query_start_loc.tolist(), prefill.seq_lens.tolist()) == ([0, 4, 8, 8, 8], [9, 9, 0, 0])
    assert prefill.max_query_len == 8 and prefill.block_tables[0, :2].tolist() == [15, 16]
