"""Tiers below the device's cache: equal tokens with and without them, whatever is killed, damaged, full or foreign."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from test_sleep import CASES, SMALL

from lmworks.engine.core.engine import Engine
from lmworks.engine.core.model_runner import ModelRunner
from lmworks.engine.core.request import Request, Result
from lmworks.engine.core.request import Sequence as EngineSequence
from lmworks.engine.core.sampling_params import SamplingParams
from lmworks.engine.kv_tiers.device_copies import DeviceCopies
from lmworks.engine.kv_tiers.disk import DiskStore
from lmworks.engine.kv_tiers.fingerprint import fingerprint
from lmworks.engine.kv_tiers.host_memory import HostMemory
from lmworks.engine.kv_tiers.open import open_tiers
from lmworks.engine.kv_tiers.shared_folder import SharedFolder
from lmworks.engine.kv_tiers.store import CorruptBlock, block_path
from lmworks.engine.kv_tiers.tiers import WRITERS, KVTiers
from lmworks.model import GPT
from lmworks.spec import EngineSpec, LMWorksError, ModelSpec, SpecError

MIB = 1 / 1024  # of a GiB
SLIDING: dict[str, Any] = {"kv_heads": 2, "sliding_window": 12}
KINDS = {**CASES, "sliding window": (SLIDING, "auto")}
BLOCK = 8
PREFIX = [(7 * i * i + 3 * i) % 61 for i in range(70)]
OTHERS = [[(5 * i + 11 * j) % 64 for i in range(64)] for j in range(6)]
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=0)


def make_engine(kind: str = "dense", blocks: int = 20, seed: int = 1, tiers: bool = True, **spec: Any) -> Engine:
    """With a device that holds two prompts."""
    shape, kv_dtype = KINDS[kind]
    given = {"dtype": "fp32", "block": BLOCK, "max_seqs": 4, "max_batch_tokens": 128, "kv_dtype": kv_dtype}
    if tiers:
        given["kv_host_gib"] = MIB
    model = ModelSpec(**{**SMALL, **shape})
    options = EngineSpec(device="cpu", blocks=blocks, **{**given, **spec})
    runner = ModelRunner(GPT(model, seed=seed), options, "cpu", model.vocab)
    return Engine(runner, tiers=open_tiers(runner))


def tiers_of(engine: Engine) -> KVTiers:
    assert isinstance(engine.tiers, KVTiers)
    return engine.tiers


def ask(engine: Engine, prompt: Sequence[int], params: SamplingParams = GREEDY, tenant: str = "") -> Result:
    engine.add(request := Request(list(prompt), params, tenant=tenant))
    found = next(delta.result for delta in engine.run() if delta.request is request and delta.result)
    assert found.error is None
    return found


def told(result: Result) -> tuple[list[int], list[float]]:
    """Tokens and log-probabilities."""
    return result.token_ids, [each.logprob for each in result.logprobs or ()]


def fill(engine: Engine) -> None:
    """Evict everything from the device."""
    for prompt in OTHERS:
        ask(engine, prompt)


def settled(engine: Engine) -> KVTiers:
    tiers_of(engine).settle()
    assert tiers_of(engine).flush(10)
    return tiers_of(engine)


def on_device(engine: Engine, prompt: list[int] = PREFIX) -> int:
    """Blocks of it that the device's cache has."""
    waiting = EngineSequence(Request(prompt, GREEDY), 0, 0, list(prompt), len(prompt))
    return len(engine.scheduler.block_manager.find_cached_prefix(waiting))


def records(folder: Path) -> list[Path]:
    return sorted(folder.glob("??/*.kv"))


# --- exactness --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_evicted_blocks_come_back_bit_by_bit(kind: str) -> None:
    """From host memory a prompt is answered as by a device that never had to evict it, which computes as much."""
    ample = make_engine(kind, blocks=200, tiers=False)
    first = told(ask(ample, PREFIX))
    want = ask(ample, PREFIX)
    assert want.cached_tokens == 64
    engine = make_engine(kind)
    assert told(ask(engine, PREFIX)) == first
    fill(engine)
    assert on_device(engine) == 0
    found = ask(engine, PREFIX)
    assert told(found) == told(want)
    assert found.cached_tokens == 64
    assert engine.metrics.external_prefix_cache_hits == 64
    assert engine.metrics.kv_tier_hits == {"host": 8}


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_of_an_earlier_process_are_bit_by_bit_the_same(kind: str, tmp_path: Path) -> None:
    """From disk, and from a store that both share."""
    options = {"kv_disk": str(tmp_path / "disk"), "kv_disk_gib": MIB, "kv_shared": str(tmp_path / "shared")}
    want = told(ask(ample := make_engine(kind, blocks=200, tiers=False), PREFIX)), told(ask(ample, PREFIX))
    engine = make_engine(kind, **options)
    assert told(ask(engine, PREFIX)) == want[0]
    engine.close()
    for name in ("disk", "shared"):
        again = make_engine(kind, **options)
        found = ask(again, PREFIX)
        assert told(found) == want[1]
        assert (found.cached_tokens, again.metrics.kv_tier_hits) == (64, {name: 8})
        again.close()
        shutil.rmtree(tmp_path / "disk")


def test_random_requests_equal_those_without_tiers(tmp_path: Path) -> None:
    """Shared prefixes, preemptions, cancelled requests, several at once: every answer is that of an engine alone."""
    block = 2048 / 2**30
    options = {"kv_disk": str(tmp_path / "disk"), "kv_disk_gib": 40 * block, "kv_host_gib": 20 * block}
    chance = torch.Generator().manual_seed(0)
    engine, plain = make_engine(blocks=14, **options), make_engine(blocks=400, tiers=False)
    starts = [each[:length] for each in OTHERS for length in (16, 40, 56)]
    for turn in range(10):
        prompts = [starts[int(torch.randint(18, (1,), generator=chance))] + [turn, i] for i in range(4)]
        requests = [Request(list(prompt), GREEDY) for prompt in prompts]
        for request in requests:
            engine.add(request)
        engine.step()
        engine.cancel(requests[-1].id)
        found = {delta.request.id: delta.result for delta in engine.run()}
        for prompt, request in zip(prompts[:-1], requests[:-1], strict=True):
            result = found[request.id]
            assert result is not None and result.token_ids == ask(plain, prompt).token_ids
    tiers = settled(engine)
    assert set(tiers.report().hits) == {"host", "disk"}
    errors = {name for name, count in tiers.report().errors.items() if count}
    assert errors <= {"host memory busy", "writes behind"}  # there is room for 20 blocks
    assert not any(slot.pins for slot in tiers.host.slots.values()) and not tiers.fetches
    assert len(tiers.host.free) + len(tiers.host) == tiers.host.num_slots
    engine.close()


def test_prompt_logprobs_and_answers_of_one_request_are_as_without_tiers() -> None:
    engine, plain = make_engine(), make_engine(tiers=False)
    scored = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, prompt_logprobs=1)
    several = SamplingParams(temperature=1.0, n=3, max_tokens=6, ignore_eos=True, seed=4)
    for params in (GREEDY, scored, several):
        fill(engine)
        found, want = ask(engine, PREFIX, params), ask(plain, PREFIX, params)
        assert [each.token_ids for each in found.answers] == [each.token_ids for each in want.answers]
        assert (found.prompt_logprobs or [])[1:] == (want.prompt_logprobs or [])[1:]


def test_draft_model_has_its_blocks_back() -> None:
    from lmworks.engine.speculative.draft_model import DraftModel, DraftModelProposer
    from lmworks.engine.speculative.verification import Speculator

    model = ModelSpec(**{**SMALL, **KINDS["dense"][0]})
    spec = EngineSpec(
        device="cpu",
        dtype="fp32",
        block=BLOCK,
        blocks=20,
        max_seqs=4,
        speculate="draft",
        draft="given",
        kv_host_gib=MIB,
    )
    runner = ModelRunner(GPT(model, seed=1), spec, "cpu", model.vocab, DraftModel(GPT(model, seed=1)))
    engine = Engine(runner, speculator=Speculator(runner.spec, DraftModelProposer()), tiers=open_tiers(runner))
    first = ask(engine, PREFIX).token_ids
    fill(engine)
    before = engine.metrics.accepted_guesses, engine.metrics.proposed_guesses
    assert ask(engine, PREFIX).token_ids == first
    accepted, proposed = engine.metrics.accepted_guesses - before[0], engine.metrics.proposed_guesses - before[1]
    assert engine.metrics.kv_tier_hits == {"host": 8}
    assert accepted == proposed > 0  # the draft model is the model itself: with its own cache it is never wrong


# --- whose blocks they are --------------------------------------------------------------------------------


def test_foreign_blocks_are_not_used(tmp_path: Path) -> None:
    """Of other weights, another precision, another layout, another tenant or salt."""
    shared = {"kv_shared": str(tmp_path)}
    engine = make_engine(**shared)
    ask(engine, PREFIX)
    settled(engine)
    for other in ({"seed": 2}, {"dtype": "bf16"}, {"kv_dtype": "fp8"}, {"block": 16}, {"kind": "latent"}):
        options: dict[str, Any] = {**shared, **other}
        stranger = make_engine(**options)
        assert ask(stranger, PREFIX).cached_tokens == 0, other
        settled(stranger)
    same = make_engine(**shared)
    salted = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=0, cache_salt="mine")
    assert ask(same, PREFIX, tenant="other").cached_tokens == 0
    assert ask(same, PREFIX, salted).cached_tokens == 0
    assert ask(same, PREFIX).cached_tokens == 64


def test_fingerprint_notices_one_changed_or_moved_number() -> None:
    engine = make_engine(tiers=False)
    assert isinstance(engine.runner, ModelRunner)
    before = fingerprint(engine.runner)
    assert fingerprint(engine.runner) == before
    weight = next(parameter for parameter in engine.runner.model.parameters() if parameter.dim() == 2).data
    weight[3, 5] = torch.nextafter(weight[3, 5], torch.tensor(9.0))
    assert fingerprint(engine.runner) != before
    weight[3, 5] = torch.nextafter(weight[3, 5], torch.tensor(-9.0))
    assert fingerprint(engine.runner) == before
    weight[[1, 2]] = weight[[2, 1]]
    assert fingerprint(engine.runner) != before


@pytest.mark.parametrize("damage", ["flipped", "cut", "longer", "empty", "exchanged", "other magic"])
def test_damaged_files_are_never_used(damage: str, tmp_path: Path) -> None:
    options = {"kv_disk": str(tmp_path), "kv_disk_gib": MIB}
    engine = make_engine(**options)
    want = ask(engine, PREFIX).token_ids
    engine.close()
    files = records(tmp_path)
    assert len(files) == 9  # the prompt, and a block that the answer filled
    for number, path in enumerate(files):
        data = bytearray(path.read_bytes())
        if damage == "flipped":
            data[-1 - number] ^= 1
        elif damage == "other magic":
            data[0] ^= 1
        elif damage == "exchanged":
            data = bytearray(files[number - 1].read_bytes()) if number else data[:-1]
        else:
            data = {"cut": data[:-7], "longer": data + b"x", "empty": bytearray()}[damage]
        path.write_bytes(data)
    again = make_engine(**options)
    found = ask(again, PREFIX)
    assert (found.token_ids, found.cached_tokens) == (want, 0)
    assert settled(again).report().errors == {"disk corrupt": 1}
    assert ask(again, PREFIX).token_ids == want
    again.close()
    last = make_engine(**options)  # the damaged one was written again
    assert ask(last, PREFIX).cached_tokens == 8
    last.close()


def test_corrupted_prefix_is_forgotten_everywhere(tmp_path: Path) -> None:
    engine = make_engine(kv_disk=str(tmp_path), kv_disk_gib=MIB)
    engine.add(request := Request(list(PREFIX), GREEDY))
    engine.step()
    settled(engine)
    assert len(records(tmp_path)) == 8
    engine.scheduler.block_manager.uncache(request.sequences[0])
    engine.cancel(request.id)
    engine.run()
    for writer in settled(engine).writers:
        writer.queue.put(None)
        writer.thread.join(5)
    assert not records(tmp_path) and not len(tiers_of(engine).host)


def test_reset_forgets_own_tiers_and_sleep_keeps_them(tmp_path: Path) -> None:
    engine = make_engine(kv_disk=str(tmp_path), kv_disk_gib=MIB)
    want = ask(engine, PREFIX).token_ids
    engine.sleep()
    engine.wake()
    assert on_device(engine) == 0
    found = ask(engine, PREFIX)
    assert (found.token_ids, found.cached_tokens) == (want, 64)
    settled(engine)
    engine.reset_prefix_cache()
    assert not records(tmp_path)
    assert ask(engine, PREFIX).cached_tokens == 0
    engine.close()


# --- limits and failures ----------------------------------------------------------------------------------


def block_of(number: int, size: int = 1000) -> bytes:
    return bytes([number]) * size


def test_disk_keeps_its_limit_and_the_order_of_use_over_restarts(tmp_path: Path) -> None:
    size = 1000 + 48
    disk = DiskStore(tmp_path, 4 * size)
    keys = [bytes([number]) * 16 for number in range(6)]
    into = memoryview(bytearray(1000))
    for number, key in enumerate(keys[:4]):
        assert disk.write(key, block_of(number))
        os.utime(block_path(tmp_path, key), (number, number))
    assert disk.read(keys[:1], [into]) == 1 and bytes(into) == block_of(0)
    disk.close()
    again = DiskStore(tmp_path, 4 * size)
    assert again.used == 4 * size
    assert again.write(keys[4], block_of(4)) and again.write(keys[5], block_of(5))
    assert [again.may_have(key) for key in keys] == [True, False, False, True, True, True]
    assert len(records(tmp_path)) == 4
    again.close()
    smaller = DiskStore(tmp_path, 2 * size)
    assert smaller.used == 2 * size and len(records(tmp_path)) == 2
    smaller.close()


def test_disk_of_another_process_is_refused(tmp_path: Path) -> None:
    disk = DiskStore(tmp_path, 1000)
    with pytest.raises(SpecError, match="another server keeps its blocks there"):
        DiskStore(tmp_path, 1000)
    disk.close()
    DiskStore(tmp_path, 1000).close()


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """The kernel refuses longer files, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_full_disk_fails_no_request(tmp_path: Path) -> None:
    engine = make_engine(kv_disk=str(tmp_path / "disk"), kv_disk_gib=MIB, kv_shared=str(tmp_path / "shared"))
    with file_size_limit(200):
        want = ask(engine, PREFIX).token_ids
        settled(engine)
    assert not records(tmp_path / "disk") and not list((tmp_path / "disk").glob("??/*"))
    errors = tiers_of(engine).report().errors
    assert 1 <= errors["disk failed"] <= WRITERS  # those under way at once; no other is tried for a while
    assert errors["shared failed"] == 9
    fill(engine)
    found = ask(engine, PREFIX)
    assert (found.token_ids, found.cached_tokens) == (want, 64)  # from host memory
    engine.close()


class LateEvent:
    """A copy that has come over the bus, which the thread that waits for it notices a little later."""

    def synchronize(self) -> None:
        time.sleep(0.05)


def test_closing_waits_until_copies_on_a_gpu_are_known_to_be_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the blocks of the last steps are not written to the disk of a server that is ended."""
    monkeypatch.setattr(torch.cuda, "current_stream", mock.Mock())
    copies, done = DeviceCopies.__new__(DeviceCopies), mock.Mock()
    copies.device, copies.stream = torch.device("cuda"), mock.Mock()
    copies.start_waiting()
    copies.pending.put((LateEvent(), done))  # type: ignore[arg-type]
    copies.close()
    done.assert_called_once()


def test_unreadable_store_fails_no_request(tmp_path: Path) -> None:
    """Files that are folders now: every read of one is an error of the operating system."""
    engine = make_engine(kv_shared=str(tmp_path))
    want = ask(engine, PREFIX).token_ids
    engine.close()
    for path in records(tmp_path):
        path.unlink()
        path.mkdir()
    again = make_engine(kv_shared=str(tmp_path))
    assert ask(again, PREFIX).token_ids == want
    assert settled(again).report().errors["shared failed"] >= 1
    again.close()


def test_store_that_never_answers_delays_its_request_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmworks.engine.kv_tiers.tiers.FETCH_TIMEOUT_S", 0.4)
    engine = make_engine(kv_shared=str(tmp_path))
    want = ask(engine, PREFIX).token_ids
    engine.close()
    again, held = make_engine(kv_shared=str(tmp_path)), threading.Event()
    [(_, store)] = tiers_of(again).stores
    read = store.read
    monkeypatch.setattr(store, "read", lambda keys, into: held.wait(20) and read(keys, into))
    slow = Request(list(PREFIX), GREEDY)
    again.add(slow)
    [[_, fetch]] = tiers_of(again).fetches.items()
    tiers_of(again).begin_fetch = lambda *_: None  # type: ignore[method-assign]
    again.add(Request([1, 2, 3], GREEDY))
    while len(again.requests) > 1:  # it is answered while the other one waits
        again.step()
    assert list(again.requests) == [slow.id] and not slow.first_token_time
    results = {delta.request.id: delta.result for delta in again.run()}
    result = results[slow.id]
    assert result is not None and (result.token_ids, result.cached_tokens) == (want, 0)
    assert tiers_of(again).report().errors == {"shared corrupt": 0, "fetch timeout": 1}
    held.set()
    until_over(fetch)
    assert not any(slot.pins for slot in settled(again).host.slots.values())
    again.close()


def until_over(fetch: Any) -> None:
    limit = time.monotonic() + 10
    while not fetch.over and time.monotonic() < limit:
        time.sleep(0.01)
    assert fetch.over


WRITER = """
import sys
from pathlib import Path
from lmworks.engine.kv_tiers.disk import DiskStore
disk = DiskStore(Path(sys.argv[1]), 2**40)
print("begin", flush=True)
for number in range(10**6):
    disk.write(number.to_bytes(16, "big"), bytes([number % 251]) * 300_000)
"""


def test_kill_while_writing_loses_no_more_than_the_block(tmp_path: Path) -> None:
    """Killed at five moments, each time over what was left before: every block that is found is whole."""
    into = bytearray(300_000)
    for turn in range(5):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE)
        assert writer.stdout is not None and writer.stdout.readline() == b"begin\n"
        time.sleep(0.05 + 0.013 * turn)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        left = list(tmp_path.glob("??/*.part"))
        disk = DiskStore(tmp_path, 2**40)
        assert len(left) <= 1 and not list(tmp_path.glob("??/*.part"))
        keys = sorted(disk.sizes)
        assert keys == [number.to_bytes(16, "big") for number in range(len(keys))] and len(keys) > turn
        for number, key in enumerate(keys):
            assert disk.read([key], [memoryview(into)]) == 1
            assert into == bytes([number % 251]) * 300_000
        disk.close()


def test_shared_folder_is_trimmed_by_those_who_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmworks.engine.kv_tiers.shared_folder.TRIM_EVERY", 4)
    stores = [SharedFolder(tmp_path, 5 * 1048) for _ in range(2)]
    keys = [bytes([number]) * 16 for number in range(8)]
    stale = tmp_path / "00" / "left.99999.part"
    for number, key in enumerate(keys):
        assert stores[number % 2].write(key, block_of(number))
        assert not stores[1 - number % 2].write(key, block_of(number))  # the other one finds it
        os.utime(block_path(tmp_path, key), (number + 1, number + 1))
        if number == 4:
            stale.parent.mkdir(exist_ok=True)
            stale.touch()
            os.utime(stale, (1, 1))
    kept = [store.read([key], [memoryview(bytearray(1000))]) for key in keys for store in stores[:1]]
    assert kept == [0, 0, 0, 1, 1, 1, 1, 1] and not stale.exists()
    with pytest.raises(CorruptBlock, match="it holds another block"):
        block_path(tmp_path, keys[0]).parent.mkdir(exist_ok=True)
        shutil.copy(block_path(tmp_path, keys[7]), block_path(tmp_path, keys[0]))
        stores[0].read(keys[:1], [memoryview(bytearray(1000))])
    assert not block_path(tmp_path, keys[0]).exists()


def test_host_memory_evicts_what_nobody_reads() -> None:
    host = HostMemory(300, 100, pinned=False)
    names = [bytes([number]) for number in range(5)]
    slots = []
    for name in names[:3]:
        slot = host.reserve(name)
        assert slot is not None
        slots.append(slot)
    assert host.reserve(names[3]) is None  # all are being filled
    host.fill(slots)
    host.unpin(slots)
    [held] = host.pin_prefix(names[:1])
    assert host.reserve(names[0]) is None and host.reserve(names[3]) is not None and names[1] not in host
    host.drop(names[0])
    assert names[0] not in host
    fourth = host.reserve(names[4])
    assert fourth is not None and fourth.index != held.index and names[2] not in host
    host.unpin([held])
    assert host.free == [held.index]
    with pytest.raises(LMWorksError, match="so none fits"):
        HostMemory(99, 100, pinned=False)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"kv_disk": "x", "kv_disk_gib": 1.0}, "set engine.kv_host_gib"),
        ({"kv_host_gib": 1.0, "kv_disk": "x"}, "go together"),
        ({"kv_host_gib": 1.0, "prefix_cache": False}, "engine.prefix_cache = true"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        EngineSpec(**options)


def test_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SpecError, match="blocks cannot be kept there"):
        make_engine(kv_disk=str(tmp_path / "file" / "disk"), kv_disk_gib=MIB)
