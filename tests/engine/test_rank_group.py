"""A tensor-parallel engine in a process group that exists already: answers, new weights, sleep, errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_live_weights import SHAPES, SMALL, answer, copy_of, engine_of
from test_live_weights import runner as runner_of

from lmworks.engine.core.engine import Engine
from lmworks.engine.core.model_runner import ModelRunner
from lmworks.engine.quantization.quantized_model import MetaModel
from lmworks.engine.tensor_parallel.rank_group import GroupRank
from lmworks.model import GPT
from lmworks.parallel.inference_shards import inference_shard
from lmworks.parallel.local_ranks import on_ranks
from lmworks.spec import EngineSpec, LMWorksError, ModelSpec

ENGINE = EngineSpec(device="cpu", dtype="fp32", blocks=64, max_seqs=4, context=64)
MODELS = {name: ModelSpec(**{**SMALL, **shape}) for name, shape in SHAPES.items()}
MODELS["one key head"] = ModelSpec(**SMALL, kv_heads=1, qkv_bias=True)
CPU = torch.device("cpu")
TOKENS = 5


def engine_over_group(group: GroupRank, spec: ModelSpec) -> tuple[ModelRunner, Engine]:
    zeros = group.load_shards(MetaModel(spec), torch.float32, lambda _name, shape: torch.zeros(()).expand(shape))
    runner = ModelRunner(zeros, ENGINE, CPU, spec.vocab, tp_rank=group, sleepable=True)
    group.workers_ready = True
    return runner, Engine(runner)


def trained(spec: ModelSpec, seed: int) -> GPT:
    model = GPT(spec, seed=seed)
    for name, buffer in model.named_buffers():
        buffer.copy_(torch.randn(buffer.shape, generator=torch.Generator().manual_seed(len(name))))
    return model


def answers_of_two_ranks(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    mesh = GroupRank(2, CPU).mesh
    for name, spec in MODELS.items():
        group = GroupRank(2, CPU, mesh)
        runner, engine = engine_over_group(group, spec)
        weights, seen = runner.live_weights(), []

        def lead(ranks: list[int], engine: Engine = engine) -> list[Any]:
            return [(each, answer(engine, TOKENS)) for each in ranks]

        for seed in (2, 3):  # one after the other, with a sleep between
            model = trained(spec, seed)
            whole = [*model.named_parameters(), *model.named_buffers()]
            shards = ((key, inference_shard(spec, key, tensor.detach(), 2, rank)) for key, tensor in whole)
            written = weights.load(shards)
            engine.weights_changed()
            seen.append(group.together(runner, rank, lead))
            released = engine.sleep()
            assert runner.cache.store.numel() == 0 and released == 64 * runner.cache.shape.block_bytes
            engine.wake()
        found[name] = seen, written, released
    return found


def test_two_ranks_answer_as_one_after_every_hand_over() -> None:
    """Every shape of attention, MLP and experts; each rank gets the answer to its own request."""
    ranks = on_ranks(2, answers_of_two_ranks)
    for name, spec in MODELS.items():
        for place, seed in enumerate((2, 3)):
            engine = engine_of(copy_of(trained(spec, seed)))
            tokens, logps = answer(engine, TOKENS)
            for rank, found in enumerate(ranks):
                owner, (own_tokens, own_logps) = found[name][0][place]
                assert (owner, own_tokens) == (rank, tokens), name
                assert own_logps == pytest.approx(logps, abs=1e-5), name
        total = sum(tensor.nbytes for tensor in trained(spec, 2).parameters())
        block_bytes = runner_of(engine).cache.shape.block_bytes
        for _, written, cache in (found[name] for found in ranks):
            assert total / 2 < written < 0.75 * total  # norms, routers and latent projections are on both
            # One key head, or one latent vector for all heads: every rank keeps it.
            assert cache == 64 * block_bytes // (1 if name in ("one key head", "latent") else 2)


def failing_leader(rank: int) -> str:
    group = GroupRank(2, CPU)
    runner, engine = engine_over_group(group, MODELS["llama"])

    def lead(_shares: list[int]) -> list[int]:
        answer(engine)
        raise LMWorksError("no room for the answers")

    try:
        group.together(runner, rank, lead)
    except LMWorksError as error:
        return f"{error} {error.reported}"
    return ""


def test_an_error_of_the_leader_is_raised_on_all_ranks_and_reported_once() -> None:
    assert on_ranks(2, failing_leader) == ["no room for the answers False", "no room for the answers True"]
