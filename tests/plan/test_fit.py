"""What does not fit on a machine is refused with its largest rows, and what is said to fit does; what ended ranks."""

from __future__ import annotations

import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from lmworks.parallel.preflight import ranks_here
from lmworks.plan.memory import host
from lmworks.plan.memory.fit import Limits, peak_rows, refusal, total
from lmworks.plan.memory.peak_memory import Row
from lmworks.plan.memory.sheet import memory, run_phases
from lmworks.plan.passes import UPDATE_CRITIC
from lmworks.spec import RunSpec, load_run

GIB, MIB = 2**30, 2**20
DENSE = ("cpu-10m", "data.seq=256", "data.micro_batch=24", "data.global_batch=96")
EXPERTS = (*DENSE, "model.mlp=swiglu", "model.bias=false", "model.experts=8", "model.expert_ffn=512")
SHARED = ("parallel.dp=2", "data.micro_batch=8")


def peaks(spec: RunSpec, device: str = "cpu") -> list[int]:
    return [total(peak_rows(spec, rank, device)) for rank in range(spec.parallel.world)]


def refused(words: tuple[str, ...], limits: Limits, device: str = "cpu") -> str:
    spec = load_run(words[0], words[1:])
    ranks = range(spec.parallel.world) if device == "cpu" else [0]
    said = refusal(spec, ranks, device, limits)
    assert "\n" not in said
    return said


def offered(said: str) -> list[tuple[str, ...]]:
    """The changes that would fit, as they would be typed."""
    text = said.rsplit("; ", 2)[1].removesuffix(" would fit").removesuffix(" together")
    return [tuple(re.sub(r" on \d+ GPUs", "", one).split()) for one in text.split(" or ")]


@pytest.mark.parametrize("words", [DENSE, EXPERTS, (*DENSE, *SHARED), (*EXPERTS, *SHARED)])
def test_all_ranks_of_a_machine_count_together(words: tuple[str, ...]) -> None:
    spec = load_run(words[0], words[1:])
    each = [memory(spec, "cpu", rank).total for rank in range(spec.parallel.world)]
    assert refused(words, Limits(sum(each))) == ""
    said = refused(words, Limits(sum(each) - 1))
    if len(each) > 1:
        assert f" for the {len(each)} ranks on this machine, {max(each) / GIB:.3g} GiB each, and" in said
    assert said.startswith(f"cpu-10m needs {sum(each) / GIB:.3g} GiB of memory")
    largest = sorted(memory(spec, "cpu", each.index(max(each))).rows, key=lambda row: -row.bytes)[0]
    assert f" are free: {largest.name} {largest.bytes / GIB:.3g} GiB, " in said
    assert said.endswith("; --force starts it all the same")


PPO = (
    "cpu-10m", "align.method=ppo", "align.rewards=['exact']", "align.prompts=4", "align.samples=2",
    "align.max_tokens=32", "data.seq=128", "data.micro_batch=2",
)  # fmt: skip


@pytest.mark.parametrize(
    "options",
    [(), ("lora.rank=8",), ("align.critic=gpt2-small",), ("align.offload=resting",), ("parallel.dp=2",)],
    ids=" ".join,
)
def test_the_update_of_a_critic_counts(options: tuple[str, ...]) -> None:
    """As `plan memory` has it by phase."""
    spec = load_run(PPO[0], [*PPO[1:], "cluster.gpu=H100-SXM-80GB", *options])
    peaks = memory(spec, "cuda").peaks
    critic = max(size for moment, size in peaks.items() if moment.startswith(UPDATE_CRITIC))
    (phase,) = [one for one in run_phases(spec, spec.cluster.accelerator).phases if one.phase == UPDATE_CRITIC]
    assert critic == pytest.approx(phase.peak, abs=2)


def test_a_critic_that_does_not_fit_is_refused() -> None:
    words = (*PPO, "align.critic=gpt2-small")
    spec = load_run(words[0], words[1:])
    alone = max(size for moment, size in memory(spec).peaks.items() if not moment.startswith(UPDATE_CRITIC))
    assert memory(spec).total > 1.2 * alone
    assert refused(words, Limits(memory(spec).total)) == ""
    assert "critic: optimizer states" in refused(words, Limits(alone))


def test_rollout_ranks_count_too() -> None:
    words = ("cpu-10m", "align.method=grpo", *PPO[2:], "align.rollout_ranks=2")
    spec = load_run(words[0], words[1:])
    trainer, *engines = (memory(spec, "cpu", rank).total for rank in range(spec.ranks))
    sheet = run_phases(spec, None, "cpu")
    assert sheet.rollout_rank is not None and engines == [sheet.rollout_rank.peak] * 2
    need = trainer + sum(engines)
    assert refusal(spec, range(3), "cpu", Limits(need)) == ""
    assert "for the 3 ranks on this machine" in refusal(spec, range(3), "cpu", Limits(need - 1))
    assert list(ranks_here(spec)) == [0, 1, 2]


@pytest.mark.parametrize("words", [DENSE, EXPERTS, (*DENSE, *SHARED), (*EXPERTS, *SHARED)])
@pytest.mark.parametrize("part", [0.9, 0.35])
def test_what_is_said_to_fit_does(words: tuple[str, ...], part: float) -> None:
    spec = load_run(words[0], words[1:])
    room = int(part * sum(peaks(spec)))
    said = refused(words, Limits(room))
    if "; even " in said:
        assert part == 0.35
        return
    assert " would fit; " in said
    for change in offered(said):
        other = load_run(words[0], [*words[1:], *change])
        assert sum(peaks(other)) <= room, change
        assert other.data.global_batch == spec.data.global_batch, change


def test_the_largest_micro_batch_that_fits_is_named() -> None:
    room = sum(peaks(load_run(DENSE[0], [*DENSE[1:], "data.micro_batch=8"])))
    assert ("data.micro_batch=8",) in offered(refused(DENSE, Limits(room)))
    assert ("data.micro_batch=6",) in offered(refused(DENSE, Limits(room - 1)))


def test_a_batch_that_the_spec_leaves_open_is_kept() -> None:
    words = ("cpu-10m", "data.seq=256", "data.micro_batch=16")
    smaller = ("data.micro_batch=8", "data.global_batch=16")
    room = sum(peaks(load_run(words[0], [*words[1:], *smaller])))
    assert smaller in offered(refused(words, Limits(room)))


def test_copies_of_a_model_are_sharded_or_fewer() -> None:
    words = ("cpu-10m", "data.seq=32", "data.micro_batch=1", "data.global_batch=4", "parallel.dp=4")
    spec = load_run(words[0], words[1:])
    said = refused(words, Limits(int(0.7 * sum(peaks(spec)))))
    assert ("parallel.strategy=fsdp2",) in offered(said) and ("parallel.dp=2",) in offered(said)


def test_several_changes_are_as_small_as_they_may_be() -> None:
    words = ("cpu-10m", "data.seq=256", "data.micro_batch=8", "data.global_batch=16", "parallel.dp=2")
    smaller = ("data.micro_batch=2", "parallel.strategy=fsdp2", "parallel.recompute=full")
    room = sum(peaks(load_run(words[0], [*words[1:], *smaller])))
    said = refused(words, Limits(room))
    assert said.count(" together would fit") == 1
    (together,) = offered(said)
    assert sum(peaks(load_run(words[0], [*words[1:], *together]))) <= room
    assert "data.micro_batch=1" not in together


def test_a_model_that_is_too_large_whatever_one_does() -> None:
    said = refused(("qwen3-30b-a3b",), Limits(20 * GIB))
    least = re.search(r"; even (.*) needs (\S+) GiB; ", said)
    assert least and "parallel.recompute=full" in least[1] and "precision.weights=bf16" in least[1]
    spec = load_run("qwen3-30b-a3b", least[1].split())
    assert f"{sum(peaks(spec)) / GIB:.3g}" == least[2] and sum(peaks(spec)) > 20 * GIB


def test_one_rank_may_have_less_than_the_machine() -> None:
    words = (*DENSE, *SHARED)
    each = max(peaks(load_run(words[0], words[1:])))
    assert refused(words, Limits(64 * GIB, each)) == ""
    said = refused(words, Limits(64 * GIB, each - 1))
    assert f"needs {each / GIB:.3g} GiB of memory a rank, and {(each - 1) / GIB:.3g} GiB are free" in said


def test_what_is_offloaded_on_a_cpu_lies_in_the_same_memory() -> None:
    words = (*DENSE, "parallel.offload=optimizer")
    spec = load_run(words[0], words[1:])
    sheet = memory(spec, "cpu")
    assert sheet.host_parts.states > 8 * spec.model.params
    assert refused(words, Limits(sheet.total + sheet.host_parts.states)) == ""
    assert refused(words, Limits(sheet.total + sheet.host_parts.states - 1))


def test_a_gpu_that_is_too_small_may_be_one_of_several() -> None:
    words = ("llama3-1b", "data.seq=1024", "data.micro_batch=1", "data.global_batch=64", "precision.dtype=bf16")
    words = (*words, "parallel.recompute=full", "precision.weights=bf16", "precision.states=bf16")
    spec = load_run(words[0], words[1:])
    room = int(0.8 * peaks(spec, "cuda")[0])
    said = refused(words, Limits(each=room, what="GPU memory"), "cuda")
    count = re.search(r"parallel.strategy=fsdp2 parallel.dp_shard=(\d+) on (\d+) GPUs would fit", said)
    assert count and count[1] == count[2]
    wider = load_run(words[0], [*words[1:], "parallel.strategy=fsdp2", f"parallel.dp_shard={count[1]}"])
    assert total(peak_rows(wider, 0, "cuda")) <= room


def test_what_lies_beside_a_training_counts() -> None:
    spec = load_run("tiny")
    each = total(peak_rows(spec, 0, "cpu"))
    beside = [Row("results", 7 * MIB, "")]
    assert refusal(spec, [0], "cpu", Limits(each + 7 * MIB), lambda *_: beside) == ""
    assert "results 0.00684 GiB" in refusal(spec, [0], "cpu", Limits(each + 7 * MIB - 1), lambda *_: beside)


def test_nobody_is_refused_where_nobody_knows() -> None:
    assert refused(("qwen3-30b-a3b",), Limits()) == ""


# --- limits of a process, and the kernel's OOM killer -----------------------------------------------------


@pytest.mark.parametrize("limit", ["RLIMIT_AS", "RLIMIT_DATA"])
def test_the_limit_of_a_process(limit: str) -> None:
    """In a process of its own, which then takes as much: no more is there."""
    code = f"""
import mmap, resource
from lmworks.plan.memory.host import process_bytes
assert process_bytes() is None
resource.setrlimit(resource.{limit}, (8 * 2**30, resource.RLIM_INFINITY))
room = process_bytes()
assert 6 * 2**30 < room < 8 * 2**30, room
held = mmap.mmap(-1, 2**30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
assert abs(room - process_bytes() - 2**30) < 2**20
try:
    mmap.mmap(-1, process_bytes() + 2**20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
except OSError:
    print("full")
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout == "full\n", result.stderr


def test_most_processes_have_no_limit() -> None:
    assert resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY or host.process_bytes() is None


@pytest.mark.parametrize(
    ("cgroup", "files", "found"),
    [
        ("0::/job\n", {"cgroup/job/memory.events": "low 0\noom 3\noom_kill 2\n", "proc/vmstat": "oom_kill 9\n"}, 2),
        ("4:memory:/job\n", {"cgroup/memory/job/memory.oom_control": "under_oom 0\noom_kill 5\n"}, 5),
        ("4:memory:/elsewhere\n", {"cgroup/memory/memory.oom_control": "oom_kill 1\n"}, 1),
        ("0::/\n", {"proc/vmstat": "pgfault 12\noom_kill 9\n"}, 9),
        ("0::/\n", {}, None),
    ],
    ids=["version 2", "version 1", "a container's own", "the machine's", "unknown"],
)
def test_kills_of_the_kernel_are_counted(
    cgroup: str, files: dict[str, str], found: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "PROC", tmp_path / "proc")
    monkeypatch.setattr(host, "CGROUPS", tmp_path / "cgroup")
    for name, text in {"proc/self/cgroup": cgroup, **files}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert host.oom_kills() == found
