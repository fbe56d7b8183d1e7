"""The model runner: sends a step to the device, runs the network over the paged KV cache, samples, copies tokens back.

`launch` only queues work and returns at once; `AsyncStepOutput.read` waits for that step alone, so the host can prepare
the next one meanwhile. A token that the host has not read yet stays on the device, in `last_token_ids`.
"""

from __future__ import annotations

from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ...model.attention import paged_options
from ...model.gpt import GPT
from ...spec import EngineSpec, LMWorksError, ModelSpec, SpecError
from ..grammars.grammar import Grammars
from ..lora.adapters import Adapters
from ..quantization.drift import DriftMonitor
from ..speculative.draft_model import DraftedTokens, DraftModel
from . import sleep
from .cuda_graphs import CUDAGraphs, capture_graphs, captured_metadata, prefill_buckets, profile_cache_memory
from .fusion import fuse
from .kv_cache import CPU_BYTES, KVCache, KVCacheShape, PagedAttention, blocks_that_fit
from .live_weights import LiveWeights
from .request import Sequence
from .sampler import Sampler, SamplerOutput, SamplingMetadata
from .scheduler import Chunk, Step
from .step_input import Batch, Layout, Packer, decode_bucket, unpack
from .step_output import (
    AsyncStepOutput,
    PoolingQuery,
    PromptLogprobsQuery,
    pooled_states,
    pooling_queries,
    prompt_logprobs,
    prompt_logprobs_queries,
)
from .token_filter import token_masks

if TYPE_CHECKING:
    from ..tensor_parallel.tp_rank import TensorParallelRank

POOLING = attrgetter("sequence.request.pooling")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class ModelRunner:
    """Owns the network: its weights are moved, cast and merged in place."""

    def __init__(
        self,
        model: GPT,
        spec: EngineSpec,
        device: torch.device | str,
        valid_vocab: int,  # ids of the tokenizer; logits beyond are never sampled
        draft: DraftModel | None = None,  # of speculative decoding
        tp_rank: TensorParallelRank | None = None,  # with tensor parallelism: `model` is this rank's shard
        logit_scale: float = 1.0,  # of all logits: 1 / temperature of rollouts, whose log-probabilities contain it
        sleepable: bool = False,  # the KV cache keeps its addresses when it sleeps, so CUDA graphs stay valid
    ) -> None:
        self.device = torch.device(device)
        self.spec = resolve_spec(spec, model.spec, self.device)
        self.synchronous = self.device.type == "cpu"  # launch returns when the step is done
        self.model, self.valid_vocab, self.logit_scale = model, valid_vocab, logit_scale
        self.hidden, self.scalar_head = model.spec.hidden, model.spec.scalar_head
        self.sleepable = sleepable
        dtype = DTYPES[self.spec.dtype]
        move(model, self.device, dtype)
        self.tp_rank = tp_rank
        fuse(model, self.spec.context, self.spec.batch_invariant)
        if tp_rank is not None:
            model.project = tp_rank.gather_logits(model.project)
        local_heads = slice(None) if tp_rank is None else tp_rank.local_heads(model.spec)
        self.attention_options = paged_options(model.spec, self.device, local_heads)
        vocab, seqs = model.spec.vocab, self.spec.max_seqs
        # Index id gives id itself; index vocab + slot gives the last token sampled for that slot.
        self.token_lookup = torch.cat((torch.arange(vocab), torch.zeros(seqs + 1, dtype=torch.int64))).to(self.device)
        self.last_token_ids = self.token_lookup[vocab:]
        self.sampler = Sampler(vocab, valid_vocab, seqs, self.device)
        self.packer = Packer(self.spec, vocab, pinned=not self.synchronous)
        self.graphs: CUDAGraphs[Tensor | SamplerOutput] | None = None
        self.max_decode_tokens = 1 if self.spec.speculate == "none" else 1 + self.spec.guesses  # of one sequence
        self.grammars: Grammars | None = None  # set by the engine, where it has a tokenizer
        shape = KVCacheShape.of(model.spec, self.spec, dtype, 1 if tp_rank is None else tp_rank.tp)
        self.adapters: Adapters | None = None
        self.draft = draft
        if draft is not None:
            move(draft.model, self.device, dtype)
            draft.join(self, dtype)
        if not self.spec.blocks:
            blocks = self.blocks_for(shape)
            self.spec = self.spec.replace(blocks=blocks if tp_rank is None else tp_rank.min_over_ranks(blocks))
        self.blocks = self.spec.blocks
        self.cache = KVCache(shape, self.blocks, self.device, sleepable)
        if self.device.type == "cuda" and self.spec.graphs and tp_rank is None:
            largest, prompts = decode_bucket(seqs, self.max_decode_tokens), prefill_buckets(model.spec, self.spec)
            self.graphs = CUDAGraphs(
                self.forward_and_sample, largest, self.packer.max_blocks_per_seq, self.device, prompts
            )
            capture_graphs(self)
        if draft is not None:
            draft.allocate_cache(self.blocks, self.graphs is not None)

    def blocks_for(self, shape: KVCacheShape) -> int:
        room = CPU_BYTES
        if not self.synchronous:
            self.cache = KVCache(shape, 1, self.device)
            if self.draft is not None:
                self.draft.allocate_cache(1, graphs=False)
            room = profile_cache_memory(self)
        if self.draft is not None:  # its cache has as many blocks
            room = room * shape.block_bytes // (shape.block_bytes + self.draft.shape.block_bytes)
        return blocks_that_fit(shape, room, self.spec)

    def admit(self, sequence: Sequence) -> None:
        """Write the tables of a sequence that was given a slot, before its first step."""
        self.packer.admit(sequence)
        self.sampler.admit(sequence.slot, sequence)

    def live_weights(self) -> LiveWeights:
        """The network's weights on this rank, to be replaced while it runs."""
        served = self.tp_rank is not None and not self.tp_rank.called_on_all_ranks
        if served or self.draft is not None or self.spec.kv_host_gib:
            raise SpecError(
                "weights can be replaced with engine.tp = 1, without a draft model, and without tiers of the KV cache, "
                "whose blocks are of other weights (engine.kv_host_gib = 0)"
            )
        return LiveWeights(self.model)

    def sleep(self) -> int:
        """Release the memory of the KV cache; returns its bytes."""
        return sleep.sleep(self)

    def wake(self) -> int:
        """Take it again; returns how many CUDA graphs were dropped, for they had other addresses."""
        return sleep.wake(self)

    def add_adapter(self, name: str, folder: Path) -> None:
        """Load a LoRA adapter on all ranks, or on none."""
        self.load_adapter(name, folder)
        if self.tp_rank is not None:
            try:
                self.tp_rank.add_adapter(name, folder)
            except Exception:
                self.unload_adapter(name)
                raise

    def load_adapter(self, name: str, folder: Path) -> None:
        """On this rank."""
        tokens = max(self.spec.max_batch_tokens, self.spec.max_seqs * self.max_decode_tokens)
        if self.graphs is not None:
            tokens = max(tokens, self.graphs.max_mixed_tokens)
        shards = {} if self.tp_rank is None else self.tp_rank.shards
        slots = self.spec.warm_adapters if self.spec.adapter_store else 0
        adapters = self.adapters or Adapters(self.model, tokens, shards, slots)
        replaced = adapters.add(name, folder)
        self.adapters = adapters
        if replaced and self.graphs is not None:
            self.graphs.reset()  # captured with other layers

    def remove_adapter(self, name: str) -> None:
        """Unload an adapter on all ranks; no sequence uses it."""
        self.unload_adapter(name)
        if self.tp_rank is not None:
            self.tp_rank.remove_adapter(name)

    def unload_adapter(self, name: str) -> None:
        """On this rank."""
        assert self.adapters is not None
        if self.adapters.remove(name) and self.graphs is not None:
            self.graphs.reset()  # captured with other layers

    def watch_drift(self, folder: Path) -> DriftMonitor:
        """Attach a drift monitor to a network loaded from the quantized `folder`."""
        if self.tp_rank is not None:
            raise SpecError(
                f"drift is watched where a layer sees its whole input: use engine.tp = 1, not {self.tp_rank.tp}"
            )
        monitor = DriftMonitor.of_folder(self.model, folder)
        monitor.attach()
        if self.graphs is not None:
            self.graphs.reset()  # captured without the hooks
        return monitor

    def failed_worker(self) -> str:
        """Which worker has exited, and why."""
        return "" if self.tp_rank is None else self.tp_rank.failed_worker()

    def close(self) -> None:
        """Stop the workers of other ranks, and release the pages of a sleepable cache."""
        if self.sleepable:
            for cache in sleep.caches(self):
                cache.sleep()
        if self.tp_rank is not None:
            self.tp_rank.close()

    @torch.no_grad()
    def launch(self, step: Step) -> AsyncStepOutput:
        if self.cache.asleep:
            raise LMWorksError(sleep.ASLEEP)
        try:
            return self.execute(step)
        except torch.OutOfMemoryError:
            # Free the graphs of mixed steps and retry: what the step has written already is overwritten.
            if self.graphs is None or not self.graphs.drop_prefill_graphs():
                raise
        except (RuntimeError, OSError) as error:
            if self.tp_rank is None:
                raise
            raise self.tp_rank.root_cause(error) from error
        return self.execute(step)

    def execute(self, step: Step) -> AsyncStepOutput:
        self.cache.copy(step.copies)
        sampling_chunks = step.sampling_chunks
        sampling_metadata = self.sampler.sampling_metadata(step.sampling_slots)
        mask = token_masks(sampling_chunks, self.grammars, self.valid_vocab, self.device)
        if self.draft is not None:
            self.draft.cache.copy(step.copies)
        # A prompt of one token, or its last one behind cached ones, is a chunk like those of decoding.
        pooling = pooling_queries(step.chunks) if any(map(POOLING, step.chunks)) else []
        prompt_queries = [] if step.decode_only else prompt_logprobs_queries(step.chunks)
        eager = bool(prompt_queries or pooling)
        bucket = None if self.graphs is None or eager else self.bucket(self.graphs, step)
        adapters = None if self.adapters is None else self.adapters.adapter_indices(step, bucket)
        self.set_adapter_indices(adapters)
        if self.graphs is not None and bucket is not None:
            found, batch = self.replay(self.graphs, bucket, step, sampling_metadata, mask)
            return self.async_output(sampling_chunks, found, [], None, draft_tokens_of(batch, step))
        buffer, layout = self.packer.pack(step)
        if self.tp_rank is not None:
            self.tp_rank.broadcast_step(step, buffer, layout, prompt_queries, self.draft is not None, adapters)
        batch = unpack(buffer.to(self.device, non_blocking=True), layout)
        drafted = None if self.draft is None else self.draft.propose(step, batch, sampling_metadata)
        if self.tp_rank is not None and drafted is not None:
            self.tp_rank.broadcast(batch.tokens)
        states = self.states(batch)
        invariant = self.spec.batch_invariant
        prompt = (
            prompt_logprobs(self.model, self.valid_vocab, states, prompt_queries, invariant) if prompt_queries else None
        )
        pooled = pooled_states(self.model, states, pooling) if pooling else None
        sampled = None
        if sampling_chunks:
            logits = self.logits(states, batch)
            sampled = self.sample(logits, batch.rows, batch.output_positions, sampling_metadata, mask)
            sampled = self.verify(sampled, logits, batch, drafted, sampling_metadata)
        drafts = draft_tokens_of(batch, step)
        return self.async_output(sampling_chunks, sampled, prompt_queries, prompt, drafts, pooling, pooled)

    def set_adapter_indices(self, adapters: np.ndarray | None) -> None:
        """Set the adapter of each token of a step, if there are adapters."""
        if self.adapters is not None and adapters is not None:
            self.adapters.set_adapter_indices(adapters)

    def bucket(self, graphs: CUDAGraphs[Tensor | SamplerOutput], step: Step) -> Layout | None:
        """The bucket of a step; None if it runs without a graph."""
        if step.decode_only:
            return graphs.padded(len(step.chunks), 1 if step.single_tokens else self.max_decode_tokens)
        # A draft model needs contiguous tokens; a mixed bucket has padding between them.
        return graphs.mixed(step) if self.draft is None else None

    def replay(
        self,
        graphs: CUDAGraphs[Tensor | SamplerOutput],
        bucket: Layout,
        step: Step,
        sampling_metadata: SamplingMetadata,
        mask: Tensor | None,
    ) -> tuple[SamplerOutput, Batch]:
        """Replay a graph. It includes the sampler where that only makes passes over the logits."""
        rows = step.rows
        buffer, layout = self.packer.pack(step, bucket)
        buffer = graphs.buffer[: layout.size].copy_(buffer, non_blocking=True)
        batch = unpack(buffer, layout)
        drafted = None if self.draft is None else self.draft.propose(step, batch, sampling_metadata)
        whole = sampling_metadata.plain and mask is None and drafted is None
        result = graphs.run(buffer, layout, captured_metadata(sampling_metadata) if whole else None)
        if isinstance(result, SamplerOutput):
            return result, batch
        sampled = self.sample(result[:rows], batch.rows[:rows], batch.output_positions[:rows], sampling_metadata, mask)
        return self.verify(sampled, result[:rows], batch, drafted, sampling_metadata), batch

    def forward_and_sample(self, batch: Batch, sampling_metadata: SamplingMetadata | None) -> Tensor | SamplerOutput:
        """The captured part of a step: up to the logits, or with `sampling_metadata` up to the tokens."""
        logits = self.logits(self.states(batch), batch)
        return (
            logits
            if sampling_metadata is None
            else self.sample(logits, batch.rows, batch.output_positions, sampling_metadata, None)
        )

    def logits(self, states: Tensor, batch: Batch) -> Tensor:
        """Of the tokens that need them: (rows, vocab)."""
        logits = self.model.logits(states if batch.logits_indices is None else states[batch.logits_indices])
        return logits if self.logit_scale == 1.0 else logits * self.logit_scale

    def states(self, batch: Batch) -> Tensor:
        """Hidden states of the last block: (tokens, hidden)."""
        attend = PagedAttention.of(self.cache, batch, self.attention_options, self.spec.batch_invariant)
        return self.model.states(self.token_lookup[batch.tokens], batch.positions, attend)

    def verify(
        self,
        sampled: SamplerOutput,
        logits: Tensor,
        batch: Batch,
        drafted: DraftedTokens | None,
        sampling_metadata: SamplingMetadata,
    ) -> SamplerOutput:
        if self.draft is None or drafted is None:
            return sampled
        return self.draft.verify(sampled, logits, batch, drafted, sampling_metadata)

    def sample(
        self,
        logits: Tensor,
        rows: Tensor,
        output_positions: Tensor,
        sampling_metadata: SamplingMetadata,
        mask: Tensor | None,
    ) -> SamplerOutput:
        if self.spec.batch_invariant and self.synchronous:
            sampled = sample_row_by_row(self.sampler, logits, rows, output_positions, mask, sampling_metadata)
        else:
            sampled = self.sampler(logits, rows, output_positions, mask, sampling_metadata)
        self.last_token_ids.index_copy_(0, rows, sampled.tokens)
        if self.tp_rank is not None:
            self.tp_rank.broadcast(sampled.tokens)
        return sampled

    def async_output(
        self,
        sampling_chunks: list[Chunk],
        sampled: SamplerOutput | None,
        prompt_queries: list[PromptLogprobsQuery],
        prompt: tuple[Tensor, Tensor | None, Tensor | None] | None,
        draft_tokens: Tensor | None,
        pooling: list[PoolingQuery] | None = None,
        pooled: Tensor | None = None,
    ) -> AsyncStepOutput:
        """Copy the results to pinned host memory, asynchronously and before all later steps."""
        arrived = None if self.synchronous else torch.cuda.Event()
        if arrived is not None:
            sampled, prompt, draft_tokens, pooled = map(to_host, (sampled, prompt, draft_tokens, pooled))
        output = AsyncStepOutput(
            sampling_chunks, sampled, prompt_queries, prompt, draft_tokens, pooling or [], pooled, arrived
        )
        if arrived is None:
            return output
        arrived.record()
        return output


def to_host(results: Any) -> Any:
    """Asynchronous copy of a tensor, or of a tuple of tensors and Nones."""
    if isinstance(results, Tensor):
        return results.to("cpu", non_blocking=True)
    if results is None:
        return None
    parts = map(to_host, results)
    return SamplerOutput(*parts) if isinstance(results, SamplerOutput) else tuple(parts)


def draft_tokens_of(batch: Batch, step: Step) -> Tensor | None:
    """(rows): the token after each row's own: the draft token that the row verifies, if any."""
    if batch.logits_indices is None or step.rows == len(step.sampling_chunks):
        return None
    return batch.tokens[(batch.logits_indices + 1).clamp(max=len(batch.tokens) - 1)]


def sample_row_by_row(
    sampler: Sampler,
    logits: Tensor,
    rows: Tensor,
    output_positions: Tensor,
    mask: Tensor | None,
    sampling_metadata: SamplingMetadata,
) -> SamplerOutput:
    """For batch invariance on a CPU, where the order of a reduction may depend on the number of rows."""
    masks = [None] * len(rows) if mask is None else mask.split(1)
    parts = [
        sampler(*each, sampling_metadata)
        for each in zip(logits.split(1), rows.split(1), output_positions.split(1), masks, strict=True)
    ]
    columns: Any = (None if column[0] is None else torch.cat(column) for column in zip(*parts, strict=True))
    return SamplerOutput(*columns)


def resolve_spec(spec: EngineSpec, model: ModelSpec, device: torch.device) -> EngineSpec:
    """The spec with zeros and "auto" replaced by actual values, except `blocks`."""
    gpu = device.type == "cuda"
    if spec.context > model.context:
        raise SpecError(f"engine.context = {spec.context} is more than the model's context of {model.context}")
    scaling = model.rope_scaling
    if scaling.type == "dynamic" and (spec.context or model.context) > scaling.original_context:
        raise SpecError(
            "model.rope_scaling.type = 'dynamic' turns keys by the length of the sequence, and those in a KV cache "
            f"stay as they were: use engine.context of at most {scaling.original_context}, or 'ntk' with a factor"
        )
    return spec.replace(
        dtype=("bf16" if gpu else "fp32") if spec.dtype == "auto" else spec.dtype,
        context=spec.context or model.context,
        max_batch_tokens=spec.max_batch_tokens or (8192 if gpu else 512),
    )


@torch.no_grad()
def move(model: GPT, device: torch.device, dtype: torch.dtype) -> None:
    """Move and cast weights one by one; buffers keep their dtype (router bias: fp32, quantized weights: integers)."""
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            parameter.data = parameter.data.to(device, dtype)
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
