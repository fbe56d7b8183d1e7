"""The engine that samples from the weights that are trained, in the same processes.

Every group of align.engine_tp consecutive ranks is one engine (by default each rank), with its share of the prompts and
on each rank a tensor-parallel shard of weights and KV cache. Where a rank of the trainer holds the same shards in the
engine's dtype, both use the same tensors: a hand-over moves nothing. Else weights are brought one at a time from the
trainer's layout to the engine's (`parallel/inference_shards.py`).
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from ..data import Tokenizer
from ..engine.core.cuda_graphs import paused_gc
from ..engine.core.engine import Engine
from ..engine.core.model_runner import DTYPES, ModelRunner
from ..engine.core.request import Request, Result
from ..engine.core.sampling_params import SEEDS, SamplingParams
from ..engine.quantization.quantized_model import MetaModel
from ..engine.tensor_parallel.rank_group import GroupRank
from ..model import GPT
from ..parallel.comm_counter import CommCounter
from ..parallel.inference_shards import InferenceShards, inference_shard
from ..parallel.mesh import Mesh
from ..parallel.parallel_model import ParallelModel
from ..parallel.single_rank import SingleRank
from ..parallel.world import group_timeout, set_group_timeouts
from ..spec import EngineSpec, LMWorksError, RunSpec
from .weight_updates import WeightUpdates

MAX_SEQS = 1024  # sequences that run at once on a GPU
MAX_SEQS_CPU = 64
GATHER = "all-gather"


@dataclass(frozen=True)
class PromptRequest:
    prompt: list[int]
    seed: int
    samples: int
    max_tokens: int
    group: int = 0  # answers that finish together, for `generate_until`


@dataclass(frozen=True)
class Completion:
    """A sampled answer."""

    token_ids: list[int]  # end-of-text included
    logps: list[float]  # under the sampling temperature
    text: str
    ended: bool  # by end-of-text, not by its length
    unfinished: bool = False  # it was cut before either


@dataclass(frozen=True)
class HandOver:
    """What bringing new weights to the engine took."""

    seconds: float
    copied_bytes: int  # written to the engine's weights, on this rank; to rollout ranks: sent
    received_bytes: int = 0  # from other ranks, padding of uneven shards included

    def metrics(self) -> dict[str, float]:
        sizes = {"hand_over_bytes": self.copied_bytes, "hand_over_received_bytes": self.received_bytes}
        return {"hand_over_s": self.seconds, **{name: float(size) for name, size in sizes.items()}}


class RolloutEngine:
    """The engine of a rank, or its part of one."""

    def __init__(
        self, spec: RunSpec, tokenizer: Tokenizer, eos: Sequence[int], device: torch.device, mesh: Mesh | None = None
    ) -> None:
        self.spec, self.device = spec, device
        dtype, tp = engine_dtype(spec), spec.align.engine_tp
        answers = -(-spec.align.prompts * spec.align.samples * tp // spec.sampling_ranks)
        engine = EngineSpec(
            device=device.type,
            dtype=dtype,
            context=spec.data.seq,
            max_seqs=min(answers, MAX_SEQS if device.type == "cuda" else MAX_SEQS_CPU),
            memory=spec.align.engine_memory,
        )
        self.group: GroupRank | None = None
        if tp > 1:
            self.group = GroupRank(tp, device, mesh)
            set_group_timeouts(group_timeout(spec.watch.timeout_s))
        runner = ModelRunner(
            zeros(spec, device, DTYPES[dtype], self.group),
            engine,
            device,
            tokenizer.vocab_size,
            tp_rank=self.group,
            sleepable=True,
            logit_scale=1 / spec.align.temperature,
        )
        self.runner, self.engine = runner, Engine(runner, tokenizer, eos)  # followers have one, and do not step it
        if self.group is not None:
            self.group.workers_ready = True
        self.weights = runner.live_weights()

    @torch.no_grad()
    def load(self, weights: Iterable[tuple[str, Tensor]], known: Collection[str], whole: bool = True) -> int:
        """Copy new weights; all must come but those that are `known`. Returns the bytes written on this rank.

        `whole`: a tensor-parallel rank takes its shard of them.
        """
        if whole and (group := self.group) is not None:
            model = self.spec.model
            weights = ((name, inference_shard(model, name, each, group.tp, group.rank)) for name, each in weights)
        copied = self.weights.load(weights, known)
        self.engine.weights_changed()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return copied

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        samples: int = 0,
        max_tokens: Sequence[int] | None = None,
    ) -> list[list[Completion]]:
        """`samples` (0: align.samples) answers to each prompt, of at most so many tokens (None: align.max_tokens each);
        the same seeds give the same answers.

        Called by all ranks of a group, each with prompts of its own.
        """
        limits = [self.spec.align.max_tokens] * len(prompts) if max_tokens is None else max_tokens
        asked = [
            PromptRequest(list(prompt), seed, samples or self.spec.align.samples, limit)
            for prompt, seed, limit in zip(prompts, seeds, limits, strict=True)
        ]
        return self.generate_until(asked)

    def generate_until(self, asked: Sequence[PromptRequest], groups: int = 0) -> list[list[Completion]]:
        """Answers to each request. With `groups`, all are cut once so many groups of requests have finished."""
        if self.group is None:
            return self.sample(asked, groups)
        return self.group.together(self.runner, (asked, groups), self.sample_shares)

    def sample_shares(self, shares: Sequence[tuple[Sequence[PromptRequest], int]]) -> list[list[list[Completion]]]:
        """Answers to the prompts of every rank of a group, all at once."""
        asked = [one for share, _ in shares for one in share]
        answers = iter(self.sample(asked, sum(groups for _, groups in shares)))
        return [list(islice(answers, len(share))) for share, _ in shares]

    def sample(self, asked: Sequence[PromptRequest], groups: int = 0) -> list[list[Completion]]:
        align = self.spec.align
        requests = [
            Request(
                one.prompt,
                SamplingParams(
                    n=one.samples,
                    max_tokens=one.max_tokens,
                    top_p=align.top_p,
                    top_k=align.top_k,
                    logprobs=0,
                    seed=one.seed,
                ),
            )
            for one in asked
        ]
        for request in requests:
            self.engine.add(request)
        with paused_gc():
            results = self.run(requests, [one.group for one in asked], groups)
        found = []
        for request in requests:
            result = results[request.id]
            if result.error is not None:
                raise LMWorksError(f"no answer to a prompt of {len(request.prompt)} tokens: {result.error}")
            found.append(
                [
                    Completion(
                        answer.token_ids,
                        [one.logprob for one in answer.logprobs or ()],
                        answer.text,
                        answer.finish_reason == "stop",
                        answer.finish_reason == "cancelled",
                    )
                    for answer in result.answers
                ]
            )
        return found

    def run(self, requests: Sequence[Request], groups: Sequence[int], limit: int) -> dict[int, Result]:
        """Results by request, cut when `limit` groups of requests have finished (0: when all have)."""
        results: dict[int, Result] = {}
        group_of = {request.id: group for request, group in zip(requests, groups, strict=True)}
        left, finished = Counter(groups), 0
        while self.engine.busy:
            for delta in self.engine.step():
                if delta.result is not None:
                    results[delta.request.id] = delta.result
                    left[group_of[delta.request.id]] -= 1
                    finished += not left[group_of[delta.request.id]]
            if limit and finished >= limit:
                for request in requests:
                    self.engine.cancel(request.id)
        return results

    def sleep(self) -> None:
        """Release the memory of the KV cache for the update."""
        self.engine.sleep()

    def wake(self) -> None:
        if self.engine.asleep:
            self.engine.wake()

    def close(self) -> None:
        self.engine.close()


class ColocatedEngine(RolloutEngine):
    """In the processes of the trainer."""

    def __init__(
        self,
        spec: RunSpec,
        parallel_model: ParallelModel,
        tokenizer: Tokenizer,
        eos: Sequence[int],
        device: torch.device,
    ) -> None:
        super().__init__(spec, tokenizer, eos, device, parallel_model.mesh)
        self.updates = WeightUpdates(spec, parallel_model)
        self.shared: set[str] = set()
        self.shards: InferenceShards | None = None
        if self.group is not None and not spec.lora.dora:  # it scales whole rows, of which a rank may have a part
            self.shards = InferenceShards(parallel_model, self.group.tp)
        same_tp = parallel_model.size("tp") == spec.align.engine_tp
        if isinstance(parallel_model.strategies[0], SingleRank) and same_tp:
            self.shared = self.weights.share(parallel_model.parts[0], self.updates.adapted)

    def hand_over(self) -> HandOver:
        """Bring the trainer's weights to the engine; collective where they are sharded."""
        began, shards = time.perf_counter(), self.shards
        before = 0 if shards is None else shards.received
        with CommCounter() as counter:
            changed = self.updates.changed(self.shared, None if shards is None else shards.weights)
            copied = self.load(changed, self.shared | self.updates.sent, whole=shards is None)
        received = gathered_bytes(counter) + (0 if shards is None else shards.received - before)
        return HandOver(time.perf_counter() - began, copied, received)


def gathered_bytes(counter: CommCounter) -> int:
    """That this rank received from others."""
    return sum(call.bytes // call.ranks * (call.ranks - 1) for call in counter.calls if call.kind == GATHER)


def engine_dtype(spec: RunSpec) -> str:
    return "fp32" if spec.precision.dtype == "fp32" else "bf16"


def zeros(spec: RunSpec, device: torch.device, dtype: torch.dtype, group: GroupRank | None) -> GPT:
    """The engine's network before its first weights: graphs are captured over finite numbers."""
    if group is not None:
        return group.load_shards(MetaModel(spec.model), dtype, lambda _name, shape: torch.zeros(()).expand(shape))
    model = MetaModel(spec.model).blank(device, dtype)
    for parameter in model.parameters():
        parameter.data.zero_()
    return model


def rollout_seed(run: str, draw: int, prompt: int) -> int:
    """Of the answers to one prompt of a draw; `run`: the seed of the run."""
    digest = hashlib.blake2b(f"{run}/{draw}/{prompt}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % SEEDS
