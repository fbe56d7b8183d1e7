"""Tiers of an engine with two ranks: equal tokens with and without them, and a block has the heads of both ranks."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_reference import reference_model
from test_kv_tiers import GREEDY, MIB, OTHERS, PREFIX, ask, fill, make_engine, on_device, records, settled, told
from test_kv_transfer import ask_from
from test_sleep import CASES, SMALL

from lmworks import LLM
from lmworks.engine.core.engine import Engine
from lmworks.engine.core.model_runner import ModelRunner
from lmworks.engine.core.request import Request
from lmworks.engine.core.request import Sequence as EngineSequence
from lmworks.engine.kv_tiers.disk import DiskStore
from lmworks.engine.kv_tiers.rank_copies import BlockLayout, CopyBlocks, RankCopies, Shard, block_layout
from lmworks.engine.kv_tiers.socket_store import BlockServer
from lmworks.engine.kv_tiers.store import block_path
from lmworks.engine.quantization.quantized_model import MetaModel
from lmworks.engine.tensor_parallel.executor import SHUTDOWN_TIMEOUT_S, CopiesUnderWay, Executor
from lmworks.engine.tensor_parallel.rank_group import GroupRank
from lmworks.model import GPT
from lmworks.parallel.local_ranks import on_ranks
from lmworks.spec import EngineSpec, ModelSpec

pytestmark = pytest.mark.usefixtures("forked_python")
LATENT, DRAFT = "latent, experts", "dense, with a draft model"
KINDS: dict[str, dict[str, Any]] = {
    "dense": {"kv_heads": 2},
    DRAFT: {"kv_heads": 2},
    "one key head": {"kv_heads": 1},
    "experts": {"experts": 4, "top_k": 2, "expert_ffn": 16},
}
OPTIONS: dict[str, Any] = {
    "device": "cpu", "dtype": "fp32", "block": 8, "blocks": 20, "max_seqs": 4, "max_batch_tokens": 128,
    "kv_host_gib": MIB,
}  # fmt: skip


def save_model(kind: str, folder: Path) -> Path:
    if kind == LATENT:
        reference_model("deepseek_v3_experts").save_pretrained(folder)
    else:
        GPT(ModelSpec(**{**SMALL, **KINDS[kind]}), seed=1).save_hf(folder)
    return folder


def two_ranks(folder: Path, **options: Any) -> LLM:
    return LLM(folder, tp=2, **{**OPTIONS, **options})


@pytest.fixture
def store(tmp_path: Path) -> Iterator[BlockServer]:
    server = BlockServer("tcp://127.0.0.1:0", DiskStore(tmp_path / "store", 2**24))
    server.start()
    yield server
    server.server_close()


def keys_of(engine: Engine, prompt: list[int]) -> list[bytes]:
    waiting = EngineSequence(Request(prompt, GREEDY), 0, 0, list(prompt), len(prompt))
    return settled(engine).keys(waiting, engine.scheduler.block_manager.prefix_hashes(waiting))


# --- exactness --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", ["dense", *(pytest.param(kind, marks=pytest.mark.slow) for kind in (*list(KINDS)[1:], LATENT))]
)
def test_blocks_of_two_ranks_come_back_bit_by_bit(kind: str, tmp_path: Path, store: BlockServer) -> None:
    """From host memory; in later processes from disk, and from a store over TCP. As from the cache of the devices."""
    folder = save_model(kind, tmp_path / "model")
    with LLM(folder, **{**OPTIONS, "kv_host_gib": 0.0}) as alone:
        tokens = ask(alone.native, PREFIX).token_ids
    options = {"kv_disk": str(tmp_path / "disk"), "kv_disk_gib": MIB, "kv_shared": store.address}
    if kind == DRAFT:  # the second rank has no part in its cache
        options |= {"speculate": "draft", "draft": str(folder)}
    with two_ranks(folder, **options) as llm:
        engine = llm.native
        assert ask(engine, PREFIX).token_ids == tokens
        want = told(ask(engine, PREFIX))
        assert want[0] == tokens
        settled(engine)
        fill(engine)
        assert on_device(engine) == 0
        found = ask(engine, PREFIX)
        assert (told(found), found.cached_tokens, engine.metrics.kv_tier_hits) == (want, 64, {"host": 8})
    for name in ("disk", "shared"):
        with two_ranks(folder, **options) as llm:
            found = ask(llm.native, PREFIX)
            assert (told(found), found.cached_tokens, llm.native.metrics.kv_tier_hits) == (want, 64, {name: 8})
        shutil.rmtree(tmp_path / "disk")


def test_lost_and_damaged_records_are_computed_by_both_ranks(tmp_path: Path) -> None:
    """One flipped bit in the second rank's part; a file that is gone. One rank does not use the blocks of two."""
    folder, options = save_model("dense", tmp_path / "model"), {"kv_disk": str(tmp_path / "disk"), "kv_disk_gib": MIB}
    with two_ranks(folder, **options) as llm:
        want = ask(llm.native, PREFIX).token_ids
        keys = keys_of(llm.native, PREFIX)
    with LLM(folder, **{**OPTIONS, **options}) as alone:
        assert (found := ask(alone.native, PREFIX)).token_ids == want
        assert found.cached_tokens == 0
    assert len(records(tmp_path / "disk")) == 2 * 9  # the prompt and a block of the answer, of either
    flipped = block_path(tmp_path / "disk", keys[5])
    data = bytearray(flipped.read_bytes())
    data[-1] ^= 1
    flipped.write_bytes(data)
    block_path(tmp_path / "disk", keys[7]).unlink()
    with two_ranks(folder, **options) as llm:
        found = ask(llm.native, PREFIX)
        assert (found.token_ids, found.cached_tokens) == (want, 40)
        assert settled(llm.native).report().errors == {"disk corrupt": 1}


PREFILL = """
import sys
from pathlib import Path
from test_kv_tiers import PREFIX, ask
from test_kv_tiers_tp import two_ranks
with two_ranks(Path(sys.argv[1]), kv_listen="tcp://127.0.0.1:0") as llm:
    ask(llm.native, PREFIX)
    print(llm.native.tiers.address, flush=True)
    sys.stdin.readline()
"""


@pytest.mark.slow
def test_two_ranks_answer_with_the_blocks_of_two_others(tmp_path: Path) -> None:
    """Prefill apart from decode, each an engine with two ranks. Then the prefill server is killed."""
    folder = save_model("dense", tmp_path / "model")
    with LLM(folder, **{**OPTIONS, "kv_host_gib": 0.0}) as alone:
        want = [ask(alone.native, prompt).token_ids for prompt in (PREFIX, OTHERS[0])]
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", PREFILL, str(folder)], stdin=pipe, stdout=pipe, text=True) as prefill:
        assert prefill.stdout is not None
        remote = prefill.stdout.readline().strip()
        with two_ranks(folder, kv_peers=[remote]) as llm:
            found = ask_from(llm.native, remote)
            assert (found.token_ids, found.cached_tokens) == (want[0], 64)
            assert llm.native.metrics.kv_tier_hits == {"peer": 8}
            prefill.kill()
            prefill.wait()
            llm.native.add(request := Request(list(OTHERS[0]), GREEDY, kv_remote=remote))
            [result] = [delta.result for delta in llm.native.run() if delta.request is request]
            assert result is not None and (result.token_ids, result.cached_tokens) == (want[1], 0)


@pytest.mark.slow
def test_random_requests_of_two_ranks_equal_those_without_tiers(tmp_path: Path) -> None:
    """Evictions in all tiers: blocks are loaded, saved and fetched into the slots of others."""
    folder, block = save_model("dense", tmp_path / "model"), 4096 / 2**30
    options = {"kv_disk": str(tmp_path / "disk"), "kv_disk_gib": 40 * block, "kv_host_gib": 20 * block, "blocks": 14}
    chance = torch.Generator().manual_seed(0)
    starts = [each[:length] for each in OTHERS for length in (16, 40, 56)]
    with LLM(folder, **{**OPTIONS, "kv_host_gib": 0.0}) as alone, two_ranks(folder, **options) as llm:
        for turn in range(30):
            prompts = [starts[int(torch.randint(18, (1,), generator=chance))] + [turn, i] for i in range(4)]
            requests = [Request(list(prompt), GREEDY) for prompt in prompts]
            for request in requests:
                llm.native.add(request)
            llm.native.step()
            llm.native.cancel(requests[-1].id)
            found = {delta.request.id: delta.result for delta in llm.native.run()}
            for prompt, request in zip(prompts[:-1], requests[:-1], strict=True):
                result = found[request.id]
                assert result is not None and result.token_ids == ask(alone.native, prompt).token_ids
        tiers = settled(llm.native)
        assert set(tiers.report().hits) == {"host", "disk"}
        assert not any(slot.pins for slot in tiers.host.slots.values()) and not tiers.fetches


# --- layouts ----------------------------------------------------------------------------------------------


def layouts_of_a_rank(rank: int, models: dict[str, GPT]) -> dict[str, BlockLayout]:
    device, found = torch.device("cpu"), {}
    mesh = GroupRank(2, device).mesh
    spec = EngineSpec(device="cpu", dtype="fp32", block=8, blocks=4, max_seqs=4)
    for name, model in models.items():
        group, whole = GroupRank(2, device, mesh), dict(model.named_parameters())
        shard = group.load_shards(MetaModel(model.spec), torch.float32, lambda key, _, of=whole: of[key].detach())
        found[name] = block_layout(ModelRunner(shard, spec, device, model.spec.vocab, tp_rank=group))
    return found


def test_layout_of_a_block_and_whose_weights_it_depends_on() -> None:
    """A changed weight of one rank changes what all have computed; heads that both ranks have are kept once."""
    specs = {kind: ModelSpec(**{**SMALL, **KINDS[kind]}) for kind in ("dense", "one key head")}
    specs["latent"] = ModelSpec(**{**SMALL, **CASES["latent"][0]})
    models = {kind: GPT(spec, seed=1) for kind, spec in specs.items()}
    for name, row in (("first rank", 0), ("second rank", -1)):
        models[name] = GPT(specs["dense"], seed=1)
        query = models[name].get_parameter("blocks.1.attention.q.weight").data
        query[row, 0] += 1.0
    first, second = on_ranks(2, layouts_of_a_rank, models)
    assert first == second
    assert len({layout.fingerprint for layout in first.values()}) == len(models)
    for kind, spec in specs.items():
        whole = block_bytes_of_one_rank(spec)
        assert first[kind].block_bytes == whole
        both = [Shard(0, whole // 2, True), Shard(whole // 2, whole, True)]
        assert first[kind].shards == (both if kind == "dense" else [Shard(0, whole, True), Shard(0, whole, False)])


def block_bytes_of_one_rank(spec: ModelSpec) -> int:
    engine = EngineSpec(device="cpu", dtype="fp32", block=8, blocks=4, max_seqs=4)
    return ModelRunner(GPT(spec, seed=1), engine, "cpu", spec.vocab).cache.shape.block_bytes


# --- copies on both ranks ---------------------------------------------------------------------------------


def test_blocks_are_used_once_every_rank_has_copied_them(tmp_path: Path) -> None:
    """The second rank is late: what it has not saved is not written, and what it has not loaded is not evicted."""
    engine, sent = make_engine(kv_disk=str(tmp_path), kv_disk_gib=MIB), list[CopyBlocks]()
    executor = Executor.__new__(Executor)
    executor.copies = CopiesUnderWay(2)
    executor.send_to_workers = sent.append  # type: ignore[method-assign]
    tiers = settled(engine)
    tiers.copies = RankCopies(tiers.copies, executor)  # type: ignore[arg-type]
    want = ask(engine, PREFIX).token_ids
    assert not tiers.flush(0.2) and not records(tmp_path)
    assert sum(len(message.blocks) for message in sent) == 9 and not any(message.load for message in sent)
    for message in sent:
        executor.copies.finished(message.number)
    keys = keys_of(engine, PREFIX)
    assert len(records(tmp_path)) == 9
    fill(engine)
    sent.clear()
    assert ask(engine, PREFIX).token_ids == want
    [load] = [message for message in sent if message.load]
    assert len(load.slots) == 8
    assert [tiers.host.slots[key].pins for key in keys] == [1] * 8
    executor.copies.finished(load.number)
    assert [tiers.host.slots[key].pins for key in keys] == [0] * 8
    executor.copies.fail()
    began = time.monotonic()
    engine.close()  # it does not wait for copies of a rank that is gone
    assert time.monotonic() - began < SHUTDOWN_TIMEOUT_S
