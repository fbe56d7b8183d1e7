"""Tiers of the KV cache and prefill apart from decode on a GPU: blocks cross the bus, and come back bit by bit."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

from test_kv_tiers import PREFIX, ask, fill, on_device, told
from test_kv_transfer import ANY_PORT, address, ask_from
from test_sleep_gpu import SHAPES, SMALL

from lmworks.engine.core.engine import Engine
from lmworks.engine.core.model_runner import ModelRunner
from lmworks.engine.core.request import Request
from lmworks.engine.core.sampling_params import SamplingParams
from lmworks.engine.kv_tiers import device_copies
from lmworks.engine.kv_tiers.open import open_tiers
from lmworks.model import GPT
from lmworks.spec import EngineSpec, ModelSpec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

GIB = 1 / 64  # of host memory
KINDS: dict[str, tuple[dict[str, Any], str]] = {
    **{name: (shape, "auto") for name, shape in SHAPES.items()},
    "dense fp8": (SHAPES["dense"], "fp8"),
    "latent int8": (SHAPES["latent"], "int8"),
    "sliding window": ({"kv_heads": 2, "sliding_window": 12}, "auto"),
}


def make_engine(kind: str = "dense", blocks: int = 12, tiers: bool = True, **spec: Any) -> Engine:
    """With a device that holds two prompts; PREFIX has four full blocks."""
    shape, kv_dtype = KINDS[kind]
    given = {"kv_host_gib": GIB if tiers else 0.0, "max_seqs": 4, "max_batch_tokens": 128, **spec}
    options = EngineSpec(device="cuda", dtype="fp32", kv_dtype=kv_dtype, block=16, blocks=blocks, **given)
    model = ModelSpec(**{**SMALL, **shape})
    runner = ModelRunner(GPT(model, seed=1), options, "cuda", model.vocab)
    return Engine(runner, tiers=open_tiers(runner))


def wanted(kind: str) -> list[tuple[list[int], list[float]]]:
    """Of an engine that never has to evict: computed, and with the prefix in its cache."""
    ample = make_engine(kind, blocks=200, tiers=False)
    return [told(ask(ample, PREFIX)) for _ in range(2)]


@pytest.mark.parametrize("staging_bytes", [device_copies.STAGING_BYTES, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_evicted_blocks_come_back_bit_by_bit(kind: str, staging_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a staging buffer for all blocks, and with one for each, of which there are fewer than blocks.

    Both engines get the same requests, so that both have recorded the same steps.
    """
    monkeypatch.setattr(device_copies, "STAGING_BYTES", staging_bytes)

    def answers(engine: Engine, evicts: bool) -> list[tuple[list[int], list[float]]]:
        found = [told(ask(engine, PREFIX))]
        for _ in range(3):
            fill(engine)
            assert (on_device(engine) == 0) is evicts
            result = ask(engine, PREFIX)
            assert result.cached_tokens == 64
            found.append(told(result))
        return found

    engine = make_engine(kind)
    assert answers(engine, True) == answers(make_engine(kind, blocks=200, tiers=False), False)
    assert engine.metrics.kv_tier_hits["host"] >= 12
    engine.close()


@pytest.mark.parametrize("kind", KINDS)
def test_next_engine_finds_the_blocks_on_disk(kind: str, tmp_path: Path) -> None:
    """All of them, although it was closed at once: blocks that are still on their way from the device, too."""
    options = {"kv_disk": str(tmp_path), "kv_disk_gib": GIB}
    want = wanted(kind)
    engine = make_engine(kind, **options)
    assert told(ask(engine, PREFIX)) == want[0]
    engine.close()
    again = make_engine(kind, **options)
    found = ask(again, PREFIX)
    assert (told(found), found.cached_tokens, again.metrics.kv_tier_hits) == (want[1], 64, {"disk": 4})
    again.close()


@pytest.mark.parametrize("kind", KINDS)
def test_answer_of_a_prefill_and_a_decode_engine_is_that_of_one(kind: str) -> None:
    want = wanted(kind)
    prefill = make_engine(kind, kv_listen=ANY_PORT)
    decode = make_engine(kind, kv_peers=[address(prefill)])
    assert told(ask(prefill, PREFIX)) == want[0]
    found = ask_from(decode, address(prefill))
    assert (told(found), found.cached_tokens, decode.metrics.kv_tier_hits) == (want[1], 64, {"peer": 4})
    prefill.close()
    decode.close()


def test_many_at_once_equal_those_without_tiers() -> None:
    """Blocks are saved, evicted and loaded while other steps run."""
    luck = random.Random(0)
    shared = [[luck.randrange(500) for _ in range(96)] for _ in range(6)]
    prompts = [[*luck.choice(shared)[: luck.randrange(20, 96)], luck.randrange(500)] for _ in range(60)]

    def answers(engine: Engine) -> list[list[int]]:
        requests = [Request(prompt, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)) for prompt in prompts]
        for request in requests:
            engine.add(request)
        done = {delta.request.id: delta.result for delta in engine.run()}
        return [result.token_ids for request in requests if (result := done[request.id]) is not None]

    engine = make_engine(blocks=30, batch_invariant=True)
    assert answers(engine) == answers(make_engine(blocks=600, tiers=False, batch_invariant=True))
    assert engine.metrics.kv_tier_hits["host"] > 20
    engine.close()
