"""Traces of steps with a planted bottleneck, in the JSON of PyTorch's profiler: two ranks of one simulated job.

The host launches ahead of the GPU, a stream runs in order what was launched, and an all-reduce ends when the last rank
has sent its part. Healthy steps have all of this too, where it costs nothing: a batch is loaded and memory is allocated
while the GPU works, gradients are sent under the backward pass, and the host waits for the loss at the end.
"""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

BOTTLENECKS = (
    "input_bound",
    "host_bound",
    "sync_bound",
    "allocator_bound",
    "comm_bound",
    "straggler",
    "memory_bound",
    "healthy",
)  # by the names of `lmworks diagnose`
LETTERS = "ABCDEFGH"
WORKSPACE_SEED = 0
RANKS = 2
STEPS = (10, 11)
COMPUTE, COMMUNICATION = 7, 20  # streams
BYTES_PER_US = 200_000  # of an all-reduce

PRODUCT = "nvjet_tst_128x256_64x4_2x1_v_bz_TNT"
ATTENTION = {
    "forward": "void pytorch_flash::flash_fwd_kernel<128, 64>",
    "backward": "void pytorch_flash::flash_bwd_kernel<128, 64>",
}
ELEMENTWISE = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16>>"
ADAM = "void at::native::multi_tensor_apply_kernel<at::native::FusedAdamMathFunctor>"
ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL"
LOADER = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"

Document = dict[str, Any]  # the trace of a rank


@dataclass(frozen=True)
class Job:
    """What its steps have. Times in µs, or shares of the time that the kernels of a step take."""

    layers: int
    product: float  # a matrix product of the forward pass
    elementwise: float  # an element-wise kernel
    elementwise_run: int  # so many of them follow a product
    launch: float  # the host's time for a kernel
    loader: float  # share: the DataLoader's `__next__`
    bucket: float  # an all-reduce, as a share of the backward pass of a layer
    allocation: float  # share: cudaMalloc while the GPU works
    retries: float = 0.0  # share: cudaFree and cudaMalloc after the GPU has run out of work
    after_item: float = 0.0  # share: the host's own work after each `.item()` of the forward pass
    slow_rank: int = 0
    slowness: float = 1.0  # its kernels take so many times as long

    @property
    def backward(self) -> float:
        """Of a layer: two products and attention, with twice the work of the forward pass."""
        return 2 * 2.8 * self.product

    @property
    def kernels(self) -> float:
        """Of a step."""
        return self.layers * (1.5 * self.backward + 4 * self.elementwise_run * self.elementwise)


def job_with(bottleneck: str, draw: random.Random) -> Job:
    """What is planted takes a fifth of the steps' time or more, and more than anything else."""
    between = draw.uniform
    job = Job(
        layers=draw.randint(3, 4), product=between(120, 300), elementwise=between(3, 6), elementwise_run=2,
        launch=between(5, 8), loader=between(0.2, 0.5), bucket=between(0.3, 0.6), allocation=between(0.1, 0.14),
    )  # fmt: skip
    # Where the host is not far ahead of the GPU, what it does is not hidden.
    close = replace(job, loader=between(0.01, 0.02), allocation=0.0)
    return {
        "input_bound": replace(job, loader=between(1.4, 1.9)),
        "host_bound": replace(close, product=between(3, 6), elementwise_run=4, launch=between(12, 20)),
        "sync_bound": replace(close, after_item=between(0.35, 0.7)),
        "allocator_bound": replace(close, retries=between(0.35, 0.7)),
        "comm_bound": replace(job, bucket=between(1.7, 2.4)),
        "straggler": replace(job, slow_rank=draw.randrange(RANKS), slowness=between(1.6, 2.0)),
        "memory_bound": replace(job, elementwise_run=3, elementwise=between(0.4, 0.7) * job.product),
        "healthy": job,
    }[bottleneck]


class Rank:
    """Its host and its GPU: until when each is busy, and the events of both. Times in µs."""

    def __init__(self, number: int, job: Job, draw: random.Random) -> None:
        self.number, self.job, self.draw = number, job, draw
        self.slowness = job.slowness if number == job.slow_rank else 1.0
        self.host = self.step_began = 1000.0
        self.busy_until = {COMPUTE: 0.0, COMMUNICATION: 0.0}
        self.launches = 0
        self.events: list[Document] = [
            {"ph": "M", "name": name, "pid": process, "tid": thread, "args": {"name": text}}
            for name, process, thread, text in (
                ("process_name", 100 + number, 0, "host"),
                ("thread_name", 100 + number, 1, "training loop"),
                ("process_name", number, 0, f"GPU {number}"),
                ("thread_name", number, COMPUTE, f"stream {COMPUTE}: compute"),
                ("thread_name", number, COMMUNICATION, f"stream {COMMUNICATION}: NCCL"),
            )
        ]

    def add(self, category: str, name: str, start: float, length: float, **args: Any) -> None:
        """Of a stream of the GPU where one is given, else of the host."""
        process, thread = (self.number, args["stream"]) if "stream" in args else (100 + self.number, 1)
        times = {"ts": round(start, 3), "dur": round(length, 3)}
        self.events.append(
            {"ph": "X", "cat": category, "name": name, "pid": process, "tid": thread, **times, "args": args}
        )

    def call(self, name: str, length: float, category: str = "cuda_runtime") -> None:
        self.add(category, name, self.host, length)
        self.host += length

    def wait(self, name: str, length: float) -> None:
        """A call that takes so long after the GPU has done all that was launched."""
        self.call(name, max(self.busy_until[COMPUTE] - self.host, 0.0) + length)

    def launch(self, op: str, call: str = "cudaLaunchKernel") -> float:
        """When the GPU can begin with it."""
        self.launches += 1
        self.add("cpu_op", op, self.host, self.job.launch)
        self.add("cuda_runtime", call, self.host + 1, self.job.launch - 2, correlation=self.launches)
        ready = self.host + 5
        self.host += self.job.launch
        return ready

    def occupy(self, category: str, name: str, start: float, length: float, stream: int = COMPUTE, **args: Any) -> None:
        """By what was launched last."""
        self.add(category, name, start, length, stream=stream, correlation=self.launches, **args)
        self.busy_until[stream] = start + length

    def run(self, op: str, kernel: str, length: float) -> None:
        start = max(self.launch(op), self.busy_until[COMPUTE] + 1)
        self.occupy("kernel", kernel, start, length * self.slowness * self.draw.uniform(0.97, 1.03))

    def copy(self, op: str, name: str, length: float) -> None:
        start = max(self.launch(op, "cudaMemcpyAsync"), self.busy_until[COMPUTE] + 1)
        self.occupy("gpu_memcpy", name, start, length)

    def item(self) -> None:
        """A number is copied to the host, which waits for it."""
        began = self.host
        self.copy("aten::_local_scalar_dense", "Memcpy DtoH (Device -> Pageable)", 1.5)
        self.wait("cudaStreamSynchronize", 2)
        self.add("cpu_op", "aten::item", began, self.host - began)

    def layer(self, direction: str) -> None:
        job, work = self.job, 1 if direction == "forward" else 2
        for _ in range(2):
            self.run("aten::mm", PRODUCT, work * job.product)
            for _ in range(job.elementwise_run):
                self.run("aten::add", ELEMENTWISE, job.elementwise)
            if job.after_item and direction == "forward":
                self.item()
                self.host += job.after_item * job.kernels / (2 * job.layers)
        self.run(f"aten::_flash_attention_{direction}", ATTENTION[direction], 0.8 * work * job.product)

    def forward(self) -> None:
        job, self.step_began = self.job, self.host
        self.copy("aten::copy_", "Memcpy HtoD (Pinned -> Device)", 0.005 * job.kernels)
        for _ in range(job.layers):
            self.layer("forward")
            if job.retries:  # no room: the caching allocator gives blocks back and asks once more
                half = 0.5 * job.retries * job.kernels / job.layers
                self.call("cudaMalloc", 8)
                self.wait("cudaFree", half)
                self.call("cudaMalloc", half)
        if job.allocation:
            self.call("cudaMalloc", job.allocation * job.kernels)

    def end_step(self, number: int) -> None:
        self.busy_until[COMPUTE] = max(self.busy_until.values())  # the optimizer waits for all gradients
        self.run("Optimizer.step#AdamW.step", ADAM, 0.04 * self.job.kernels)
        self.call(LOADER, self.job.loader * self.job.kernels, "user_annotation")
        self.item()
        self.add("user_annotation", f"ProfilerStep#{number}", self.step_began, self.host - self.step_began)

    def document(self) -> Document:
        return {
            "schemaVersion": 1,
            "deviceProperties": [{"id": self.number, "name": "simulated GPU"}],
            "distributedInfo": {"backend": "nccl", "rank": self.number, "world_size": RANKS},
            "traceEvents": self.events,
        }


def all_reduce(ranks: Sequence[Rank], length: float) -> None:
    """After all that each rank has launched before; it ends on all of them at once."""
    args = {"Collective name": "allreduce", "In msg nelems": int(length * BYTES_PER_US) // 2, "dtype": "BFloat16",
            "Group size": RANKS, "Process Group Name": "0"}  # fmt: skip
    starts = [max(rank.launch("c10d::allreduce_"), max(rank.busy_until.values()) + 1) for rank in ranks]
    for rank, start in zip(ranks, starts, strict=True):
        rank.occupy("kernel", ALL_REDUCE, start, max(starts) + length - start, COMMUNICATION, **args)


@functools.cache
def planted_traces(bottleneck: str, seed: int) -> list[Document]:
    """One a rank."""
    draw = random.Random(f"{bottleneck} {seed}")
    job = job_with(bottleneck, draw)
    ranks = [Rank(number, job, draw) for number in range(RANKS)]
    for step in STEPS:
        for rank in ranks:
            rank.forward()
        for left in reversed(range(job.layers)):
            for rank in ranks:
                rank.layer("backward")
            all_reduce(ranks, job.bucket * job.backward * (1 if left else 0.2))  # the last bucket is not full
        for rank in ranks:
            rank.end_step(step)
    return [rank.document() for rank in ranks]


def planted_jobs(seed: int) -> list[tuple[str, str, list[Document]]]:
    """Each bottleneck once: a letter, its name and its traces, in an order that the seed decides."""
    names = random.Random(seed).sample(BOTTLENECKS, len(BOTTLENECKS))
    return [(letter, name, planted_traces(name, seed)) for letter, name in zip(LETTERS, names, strict=True)]


def write_job(folder: Path, job: Sequence[Document]) -> list[Path]:
    """A file for each rank, an event a line."""
    folder.mkdir(parents=True)
    files = [folder / f"rank{number}.json" for number in range(len(job))]
    for file, document in zip(files, job, strict=True):
        head = json.dumps({key: value for key, value in document.items() if key != "traceEvents"})
        events = ",\n".join(map(json.dumps, document["traceEvents"]))
        file.write_text(f'{head[:-1]}, "traceEvents": [\n{events}\n]}}\n')
    return files


def write_traces(folder: Path) -> None:
    """Those that a workspace has, in folders A, B, C …"""
    for letter, _, job in planted_jobs(WORKSPACE_SEED):
        write_job(folder / letter, job)
