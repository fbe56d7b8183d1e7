"""Draft tokens from a smaller model that reads the same text.

Its KV cache has a pool of its own under the same block tables: a block that is shared, copied, cached or freed is so
for both models. The draft model computes every token that the target model computes; where a chunk speculates it
decodes ahead, and writes its draft tokens into the step's batch on the device, without host synchronisation. A block
with unexpected content can only lower the acceptance rate: the target model verifies every token
(`engine.speculative.verification`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...model.attention import paged_options
from ...model.gpt import GPT
from ...spec import SpecError
from ..core.cuda_graphs import CUDAGraphs
from ..core.fusion import fuse
from ..core.kv_cache import KVCache, KVCacheShape, PagedAttention
from ..core.request import PLACEHOLDER_TOKEN, Sequence
from ..core.sampler import SamplerOutput, SamplingMetadata
from ..core.scheduler import Chunk, Step
from ..core.step_input import Batch, decode_bucket, unpack
from ..core.step_output import to_device_async
from .verification import pick, rejection_sample, sample_draft_token

if TYPE_CHECKING:
    from ..core.model_runner import ModelRunner


class DraftModelProposer:
    """Reserves draft tokens that the draft model will fill in on the device."""

    def propose(self, sequence: Sequence, count: int) -> list[int]:
        return [PLACEHOLDER_TOKEN] * count


@dataclass(frozen=True)
class DraftedTokens:
    """The draft tokens of a step."""

    rows: Tensor  # (draft tokens) int64: the row of logits that verifies each
    tokens: Tensor  # (draft tokens) int64
    q: Tensor | None  # (draft tokens, vocab): draft distributions; None: exact match with the sampled token


class DraftModel:
    """A draft model. It owns its network; the runner of the target model attaches it (`join`, `allocate_cache`)."""

    def __init__(self, model: GPT) -> None:
        self.model = model
        self.graphs: CUDAGraphs[Tensor] | None = None

    def join(self, runner: ModelRunner, dtype: torch.dtype) -> None:
        """Attach to the runner of the target model, before caches are allocated."""
        spec, shape = runner.spec, self.model.spec
        if shape.vocab < runner.valid_vocab:
            raise SpecError(
                f"engine.draft: the smaller model has {shape.vocab} tokens, and the model {runner.valid_vocab}: "
                "both must have the same tokenizer"
            )
        if shape.context < spec.context:
            raise SpecError(
                f"engine.draft: the smaller model was made for {shape.context} tokens; "
                f"set engine.context = {shape.context} or less (now {spec.context})"
            )
        self.runner = runner
        fuse(self.model, spec.context, spec.batch_invariant)
        self.attention_options = paged_options(shape, runner.device)
        self.shape = KVCacheShape.of(shape, spec, dtype)

    def allocate_cache(self, blocks: int, graphs: bool) -> None:
        """Allocate as many blocks as the target model has; capture graphs if it does."""
        runner = self.runner
        self.cache = KVCache(self.shape, blocks, runner.device, runner.sleepable)
        if graphs:
            seqs = runner.spec.max_seqs
            self.graphs = CUDAGraphs(self.work, decode_bucket(seqs), runner.packer.max_blocks_per_seq, runner.device)

    def states(self, batch: Batch) -> Tensor:
        runner = self.runner
        attend = PagedAttention.of(self.cache, batch, self.attention_options, runner.spec.batch_invariant)
        return self.model.states(runner.token_lookup[batch.tokens], batch.positions, attend)

    def work(self, batch: Batch, _wants: SamplingMetadata | None) -> Tensor:
        return self.model.logits(self.states(batch))

    def compute_same_tokens(self, step: Step) -> None:
        """Compute the same tokens as the target model, to fill the draft model's KV cache."""
        if self.graphs and all(chunk.count == chunk.num_logits == 1 for chunk in step.chunks):
            self.graphs.run(*self.runner.packer.pack(step, self.graphs.padded(len(step.chunks))), None)
            return
        buffer, layout = self.runner.packer.pack(step)
        self.states(unpack(buffer.to(self.runner.device, non_blocking=True), layout))

    def propose(self, step: Step, batch: Batch, sampling_metadata: SamplingMetadata) -> DraftedTokens | None:
        """Fill in the draft tokens of a step's batch; None if it has none."""
        drafting = [chunk for chunk in step.chunks if chunk.num_logits > 1]
        if others := [chunk for chunk in step.chunks if chunk.num_logits <= 1]:
            self.compute_same_tokens(Step(others))
        if not drafting:
            return None
        tokens, q = self.generate_drafts(drafting, sampling_metadata)
        assert batch.logits_indices is not None, "a step with draft tokens has more tokens than sequences"
        rows, source = to_device_async(verification_rows(step.chunks), self.runner.device)
        found = tokens.flatten()[source]
        batch.tokens[batch.logits_indices[rows] + 1] = found
        return DraftedTokens(rows, found, None if q is None else q.flatten(0, 1)[source])

    def generate_drafts(self, chunks: list[Chunk], sampling_metadata: SamplingMetadata) -> tuple[Tensor, Tensor | None]:
        """Draft tokens (seqs, most) and, for rejection sampling, their distributions (seqs, most, vocab).

        A chunk with fewer draft tokens takes the first. The last one is computed too, for its entry in the KV cache.
        """
        runner, count = self.runner, len(chunks)
        sampler = runner.sampler
        step = Step([Chunk(chunk.sequence, chunk.start, 1, 1) for chunk in chunks])
        buffer, layout = runner.packer.pack(step, self.graphs.padded(count) if self.graphs else None)
        if self.graphs:
            buffer = self.graphs.buffer[: layout.size].copy_(buffer, non_blocking=True)
        else:
            buffer = buffer.to(runner.device, non_blocking=True)
        batch = unpack(buffer, layout)
        room = to_device_async([chunk.num_logits - 1 for chunk in chunks], runner.device)
        most = max(chunk.num_logits for chunk in chunks) - 1
        rows, output_positions = batch.rows[:count], batch.output_positions[:count]
        rejecting = sampling_metadata.noise and not runner.spec.batch_invariant
        tokens: list[Tensor] = []
        drawn_from: list[Tensor] = []
        for made in range(most + 1):
            logits = self.graphs.run(buffer, layout, None) if self.graphs else self.work(batch, None)
            if made == most:
                break
            if sampling_metadata.noise:
                q = sampler.distribution(logits[:count], rows, output_positions, None, sampling_metadata)
                tokens.append((sample_draft_token if rejecting else pick)(q, sampler.seeds[rows], output_positions))
                drawn_from += [q] * rejecting
            else:
                tokens.append(
                    sampler.truncated_logits(logits[:count], rows, output_positions, None, sampling_metadata).argmax(
                        dim=1
                    )
                )
            self.advance_batch(batch, tokens[-1], room > made)
        return torch.stack(tokens, dim=1), torch.stack(drawn_from, dim=1) if drawn_from else None

    def advance_batch(self, batch: Batch, tokens: Tensor, room: Tensor) -> None:
        """Advance the batch by one token, in place; a sequence without room stays and writes nothing."""
        (metadata,) = batch.attention_metadata
        size, count = self.runner.spec.block, len(tokens)
        batch.tokens[:count] = tokens
        batch.output_positions[:count] += 1
        batch.positions[:count] += room
        metadata.seq_lens[:count] += room
        positions = batch.positions[:count]
        block = metadata.block_tables[:count].gather(1, (positions // size).unsqueeze(1)).squeeze(1).long()
        batch.slot_mapping[:count] = torch.where(room, block * size + positions % size, -1)

    def verify(
        self,
        sampled: SamplerOutput,
        logits: Tensor,
        batch: Batch,
        drafted: DraftedTokens,
        sampling_metadata: SamplingMetadata,
    ) -> SamplerOutput:
        """The sampler output, with rows that verify a draft token replaced by rejection sampling."""
        if drafted.q is None:
            return sampled  # exact match
        sampler, rows = self.runner.sampler, drafted.rows
        slots, output_positions = batch.rows[rows], batch.output_positions[rows]
        p = sampler.distribution(logits[rows], slots, output_positions, None, sampling_metadata)
        settled = rejection_sample(p, drafted.q, drafted.tokens, sampler.seeds[slots], output_positions)
        tokens = sampled.tokens.index_copy(0, rows, settled)
        logprob = sampled.logprob
        if logprob is not None:
            wide = logits.float()
            logprob = wide.gather(1, tokens.unsqueeze(1)).squeeze(1) - wide.logsumexp(dim=1)
        return sampled._replace(tokens=tokens, logprob=logprob)


def verification_rows(chunks: list[Chunk]) -> list[list[int]]:
    """For every draft token of a step, the row of logits that verifies it, and its index in (seqs, most)."""
    most = max(chunk.num_logits for chunk in chunks) - 1
    rows, source = [], []
    row = drafting = 0
    for chunk in chunks:
        for index in range(chunk.num_logits - 1):
            rows.append(row + index)
            source.append(drafting * most + index)
        row += chunk.num_logits
        drafting += chunk.num_logits > 1
    return [rows, source]
