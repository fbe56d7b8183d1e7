"""The engine that samples from the weights that are trained, in the same process.

Where one rank holds the whole model in the engine's dtype, both use the same tensors: a hand-over moves nothing. Else
every rank gathers the weights, one at a time, from the trainer's layout into an engine of its own, and samples its
share of the prompts.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..data import Tokenizer
from ..engine.core.engine import Engine
from ..engine.core.model_runner import DTYPES, ModelRunner
from ..engine.core.request import Request
from ..engine.core.sampling_params import SEEDS, SamplingParams
from ..engine.quantization.quantized_model import MetaModel
from ..model.lora import split_adapter_name
from ..parallel.parallel_model import ParallelModel
from ..parallel.single_rank import SingleRank
from ..spec import EngineSpec, LMWorksError, RunSpec
from ..spec.lora import DEFAULT_ADAPTER

MAX_SEQS = 1024  # sequences that run at once on a GPU
MAX_SEQS_CPU = 64


@dataclass(frozen=True)
class Completion:
    """A sampled answer."""

    token_ids: list[int]  # end-of-text included
    logps: list[float]  # under the sampling temperature
    text: str
    ended: bool  # by end-of-text, not by its length


@dataclass(frozen=True)
class HandOver:
    """What bringing new weights to the engine took."""

    seconds: float
    copied_bytes: int  # written to the engine's weights


class RolloutEngine:
    def __init__(
        self,
        spec: RunSpec,
        parallel_model: ParallelModel,
        tokenizer: Tokenizer,
        eos: Sequence[int],
        device: torch.device,
    ) -> None:
        self.spec, self.parallel_model = spec, parallel_model
        dtype = "fp32" if spec.precision.dtype == "fp32" else "bf16"
        answers = -(-spec.align.prompts * spec.align.samples // spec.parallel.world)
        engine = EngineSpec(
            device=device.type,
            dtype=dtype,
            context=spec.data.seq,
            max_seqs=min(answers, MAX_SEQS if device.type == "cuda" else MAX_SEQS_CPU),
            memory=spec.align.engine_memory,
        )
        model = MetaModel(spec.model).blank(device, DTYPES[dtype])
        for parameter in model.parameters():  # graphs are captured over finite numbers
            parameter.data.zero_()
        runner = ModelRunner(
            model, engine, device, tokenizer.vocab_size, sleepable=True, logit_scale=1 / spec.align.temperature
        )
        self.engine = Engine(runner, tokenizer, eos)
        self.weights = runner.live_weights()
        self.adapted = {f"{layer}.weight" for name in parallel_model.names() if (layer := layer_of(name))}
        self.shared: set[str] = set()
        self.loaded: set[str] = set()  # frozen weights that the engine has a copy of
        if isinstance(parallel_model.strategies[0], SingleRank) and parallel_model.mesh is None:
            self.shared = self.weights.share(parallel_model.parts[0], self.adapted)

    @torch.no_grad()
    def hand_over(self) -> HandOver:
        """Bring the trainer's weights to the engine; collective where they are sharded."""
        began = time.perf_counter()
        copied = self.weights.load(self.changed_weights(), self.shared | self.loaded)
        self.engine.weights_changed()
        if self.parallel_model.device.type == "cuda":
            torch.cuda.synchronize(self.parallel_model.device)
        return HandOver(time.perf_counter() - began, copied)

    def changed_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Weights that the engine does not share and that may have changed, whole, in the same order on all ranks.

        With adapters: once those that are frozen, and every time the products of the layers that have one.
        """
        model = self.parallel_model
        if not self.adapted:
            yield from model.whole_weights(self.weights.slots.keys() - self.shared)
            yield from model.buffers().items()
            return
        buffers = model.buffers()
        frozen = self.weights.slots.keys() - self.shared - self.adapted - self.loaded - buffers.keys()
        yield from model.whole_weights(frozen)
        yield from buffers.items()  # the choice bias of experts is no weight, and changes
        self.loaded |= frozen
        base: Tensor | None = None
        matrices: dict[str, Tensor] = {}
        for name, whole in model.whole_weights({*self.adapted, *(name for name in model.names() if layer_of(name))}):
            if name in self.adapted:
                base, matrices = whole, {}
                continue
            matrices[name.rpartition(".")[2]] = whole
            assert base is not None  # a layer's adapters come after its weight
            if len(matrices) == (3 if self.spec.lora.dora else 2):
                yield f"{layer_of(name)}.weight", merged(base, matrices, self.spec.lora.scale)

    def generate(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int]) -> list[list[Completion]]:
        """align.samples answers to each prompt; the same seeds give the same answers."""
        align = self.spec.align
        requests = [
            Request(
                list(prompt),
                SamplingParams(
                    n=align.samples,
                    max_tokens=align.max_tokens,
                    top_p=align.top_p,
                    top_k=align.top_k,
                    logprobs=0,
                    seed=seed,
                ),
            )
            for prompt, seed in zip(prompts, seeds, strict=True)
        ]
        for request in requests:
            self.engine.add(request)
        results = {delta.request.id: delta.result for delta in self.engine.run()}
        found = []
        for request in requests:
            result = results[request.id]
            assert result is not None
            if result.error is not None:
                raise LMWorksError(f"no answer to a prompt of {len(request.prompt)} tokens: {result.error}")
            found.append(
                [
                    Completion(
                        answer.token_ids,
                        [one.logprob for one in answer.logprobs or ()],
                        answer.text,
                        answer.finish_reason == "stop",
                    )
                    for answer in result.answers
                ]
            )
        return found

    def sleep(self) -> None:
        """Release the memory of the KV cache for the update."""
        self.engine.sleep()

    def wake(self) -> None:
        if self.engine.asleep:
            self.engine.wake()

    def close(self) -> None:
        self.engine.close()


def layer_of(name: str) -> str:
    """The layer of an adapter's weight, of the adapter that is trained; empty for other weights."""
    place = split_adapter_name(name)
    return place[0] if place is not None and place[1] == DEFAULT_ADAPTER else ""


def merged(weight: Tensor, matrices: dict[str, Tensor], scale: float) -> Tensor:
    """W + scale · B·A; with DoRA's magnitudes, its rows scaled to those norms."""
    updated = torch.addmm(weight.float(), matrices["lora_B"].float(), matrices["lora_A"].float(), alpha=scale)
    if "magnitude" not in matrices:
        return updated
    return updated * (matrices["magnitude"].float() / updated.norm(dim=1)).unsqueeze(1)


def rollout_seed(run: str, draw: int, prompt: int) -> int:
    """Of the answers to one prompt of a draw; `run`: the seed of the run."""
    digest = hashlib.blake2b(f"{run}/{draw}/{prompt}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % SEEDS
