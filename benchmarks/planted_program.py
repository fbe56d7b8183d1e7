"""A training loop of plain PyTorch into which one defect can be planted, recorded step by step on every rank.

`Program()` is the undisturbed loop; every field under "planted" is one defect that people make. Started by
planted_causes.py with a list of programs, all of one number of ranks, so that the ranks start once.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, schedule
from torch.utils.checkpoint import checkpoint

WARM_UP, STEPS = 3, 5


@dataclass(frozen=True)
class Program:
    device: str = "cpu"
    ranks: int = 1
    model: str = "mlp"  # mlp, transformer, moe, conv
    hidden: int = 512
    layers: int = 6
    batch: int = 64  # sequences, or images
    seq: int = 16  # tokens of a sequence
    layout: str = "single"  # ddp, fsdp2, pipeline
    passes: int = 1  # forward and backward passes a step
    micro_batches: int = 16  # of a pipeline
    pipeline: str = "1f1b"
    dtype: str = "float32"
    payload_mb: int = 0  # of a batch, read on the device but not computed with
    one_core: bool = False  # a rank has one core
    memory_slack: float = 0.0  # what the allocator may take beyond the peak of the warm-up, as a part of it
    host_work: int = 0  # Python work in every layer that a device's queue hides
    # planted
    read_s: float = 0.0  # to read a batch, asleep
    decode: int = 0  # Python work to decode a batch
    pageable: bool = False  # the payload is copied from pageable memory, by the stream that computes
    pieces: int = 1  # a layer is computed in so many parts
    python: int = 0  # Python work in every layer
    check: bool = False  # every layer looks whether its output is finite
    log_every_layer: bool = False  # every layer's mean goes to the host
    unfused: bool = False  # norms and activations are written by hand
    loop_optimizer: bool = False  # Adam, tensor by tensor
    recompute: bool = False  # every layer is checkpointed
    empty_cache: bool = False  # after every step
    ragged: bool = False  # the sequence length changes with every pass
    bucket_mb: float = 25.0  # of DDP
    by_hand: bool = False  # gradients are reduced after the backward pass, one by one
    sync_each_pass: bool = False
    one_unit: bool = False  # FSDP2 gathers the whole model at once
    small_batch: int = 0  # instead of `batch`
    few_micro_batches: int = 0  # instead of `micro_batches`
    uneven: int = 0  # layers that the first stage takes from the last
    slow_rank: int = -1  # of which rank only, for the plants below
    more_work: float = 1.0  # times the batch
    spin: int = 0  # Python work before every step
    late_read_s: float = 0.0
    throttled: bool = False  # another process computes on the rank's core

    @property
    def work(self) -> int:
        """Tokens or pixels of a step, on a rank that is not slow."""
        return self.passes * (self.small_batch or self.batch) * self.seq

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)  # type: ignore[no-any-return]


def python_work(count: int) -> int:
    return sum(number * number % 7 for number in range(count))


class Norm(nn.Module):
    def __init__(self, hidden: int, by_hand: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))
        self.by_hand = by_hand

    def forward(self, x: Tensor) -> Tensor:
        if not self.by_hand:
            return F.rms_norm(x, self.weight.shape, self.weight)
        square = x * x
        mean = square.mean(-1, keepdim=True)
        return x * torch.rsqrt(mean + 1e-6) * self.weight


def gelu(x: Tensor, by_hand: bool) -> Tensor:
    if not by_hand:
        return F.gelu(x, approximate="tanh")
    cube = x * x * x
    return 0.5 * x * (1 + torch.tanh(0.79788456 * (x + 0.044715 * cube)))


class FeedForward(nn.Module):
    def __init__(self, one: Program, hidden: int) -> None:
        super().__init__()
        self.one = one
        self.up, self.down = nn.Linear(hidden, 4 * hidden, bias=False), nn.Linear(4 * hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.one.pieces == 1:
            return self.down(gelu(self.up(x), self.one.unfused))  # type: ignore[no-any-return]
        parts = x.flatten(0, -2).chunk(self.one.pieces)
        return torch.cat([self.down(gelu(self.up(part), self.one.unfused)) for part in parts]).view_as(x)


class Experts(nn.Module):
    """Top-1 experts of a fixed capacity: no shape depends on values, so nothing waits for the device."""

    def __init__(self, one: Program, hidden: int, experts: int = 4) -> None:
        super().__init__()
        self.one, self.experts = one, experts
        self.router = nn.Linear(hidden, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, hidden, 4 * hidden) / hidden**0.5)
        self.down = nn.Parameter(torch.randn(experts, 4 * hidden, hidden) / (2 * hidden**0.5))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        weight, chosen = self.router(rows).softmax(-1).max(-1)
        order = chosen.argsort()[: len(rows) // self.experts * self.experts]
        grouped = rows[order].view(self.experts, -1, rows.shape[-1])
        out = torch.bmm(gelu(torch.bmm(grouped, self.up), self.one.unfused), self.down).flatten(0, 1)
        return torch.zeros_like(rows).index_copy(0, order, out * weight[order, None]).view_as(x)


class Attention(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.heads = max(1, hidden // 64)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden, bias=False), nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, one: Program) -> None:
        super().__init__()
        self.one, hidden = one, one.hidden
        self.norm = Norm(hidden, one.unfused)
        self.ffn: nn.Module = Experts(one, hidden) if one.model == "moe" else FeedForward(one, hidden)
        self.attention = Attention(hidden) if one.model in ("transformer", "moe") else None
        self.attention_norm = Norm(hidden, one.unfused) if self.attention else None

    def forward(self, x: Tensor) -> Tensor:
        if self.attention and self.attention_norm:
            x = x + self.attention(self.attention_norm(x))
        x = x + self.ffn(self.norm(x))
        if self.one.check and not torch.isfinite(x).all():
            raise ValueError("not finite")
        if self.one.log_every_layer:
            LOGGED.append(float(x.mean()))
        python_work(self.one.python + self.one.host_work)
        return x


LOGGED: list[float] = []


class ConvBlock(nn.Module):
    def __init__(self, one: Program) -> None:
        super().__init__()
        self.one = one
        self.conv = nn.Conv2d(one.hidden, one.hidden, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        parts = x.chunk(self.one.pieces) if self.one.pieces > 1 else (x,)
        done = [gelu(self.conv(part), self.one.unfused) for part in parts]
        python_work(self.one.python)
        if self.one.check and not torch.isfinite(done[0]).all():
            raise ValueError("not finite")
        return torch.cat(done) if len(done) > 1 else done[0]


class Model(nn.Module):
    def __init__(self, one: Program, layers: int) -> None:
        super().__init__()
        self.recompute = one.recompute
        self.layers = nn.ModuleList(ConvBlock(one) if one.model == "conv" else Block(one) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
        return x


class Batches(torch.utils.data.Dataset[Tensor]):
    """A batch an item: what a loader without workers reads while the loop waits."""

    def __init__(self, one: Program, rank: int) -> None:
        self.one, self.slow = one, rank == one.slow_rank
        times = one.more_work if self.slow else 1.0
        size = int((one.small_batch or one.batch) * times)
        inner = (one.hidden, one.seq, one.seq) if one.model == "conv" else (one.seq, one.hidden)
        self.values = torch.randn(size, *inner)
        if one.model == "conv":
            self.values = self.values.contiguous(memory_format=torch.channels_last)
        self.payload = torch.ones(one.payload_mb * 2**18) if one.payload_mb else torch.ones(1)
        if one.device == "cuda" and not one.pageable:
            self.values, self.payload = self.values.pin_memory(), self.payload.pin_memory()
        self.lengths = [self.cut(one.seq - place * (one.seq // 8)) for place in range(5 if one.ragged else 1)]

    def cut(self, length: int) -> Tensor:
        """The first tokens of a batch, in memory of their own, pinned where the batch is."""
        if length == self.one.seq:
            return self.values
        values = self.values[:, :length].contiguous()
        return values.pin_memory() if self.values.is_pinned() else values

    def __len__(self) -> int:
        return 10**6

    def __getitem__(self, index: int) -> Any:
        if self.one.read_s or (self.slow and self.one.late_read_s):
            time.sleep(self.one.read_s + (self.one.late_read_s if self.slow else 0.0))
        python_work(self.one.decode)
        return self.lengths[index % len(self.lengths)], self.payload


def on_device(one: Program, batches: Iterator[Any]) -> Iterator[Tensor]:
    """Batches on the device; pinned ones are copied one ahead, by a stream of their own."""
    if one.device == "cpu":
        yield from (values for values, _ in batches)
        return
    if one.pageable:
        for values, payload in batches:
            payload.to("cuda")
            yield values.to("cuda", one.torch_dtype)
    side, main = torch.cuda.Stream(), torch.cuda.current_stream()

    def ahead() -> tuple[Tensor, Tensor, torch.cuda.Event]:
        values, payload = next(batches)
        with torch.cuda.stream(side):
            copied = values.to("cuda", non_blocking=True).to(one.torch_dtype)
            return copied, payload.to("cuda", non_blocking=True), side.record_event()

    now = ahead()
    while True:
        copied, payload, event = now
        main.wait_event(event)
        copied.record_stream(main)
        payload.record_stream(main)
        yield copied
        now = ahead()


class Loop:
    """The job of one rank."""

    def __init__(self, one: Program, rank: int) -> None:
        self.one, self.rank = one, rank
        torch.manual_seed(rank)
        self.dtype = one.torch_dtype
        self.net, self.schedule = self.parallel_model()
        choice = {"foreach": False} if one.loop_optimizer else {"fused": True}
        self.optimizer = torch.optim.Adam(self.net.parameters(), 1e-5, **choice)  # type: ignore[arg-type]
        loader = torch.utils.data.DataLoader(Batches(one, rank), batch_size=None)
        self.batches = on_device(one, iter(loader))

    def parallel_model(self) -> tuple[nn.Module, Any]:
        one = self.one
        layers = one.layers
        if one.layout == "pipeline":
            layers = one.layers // one.ranks + (one.uneven if self.rank == 0 else 0)
            layers -= one.uneven if self.rank == one.ranks - 1 else 0
        with torch.device(one.device):
            net: nn.Module = Model(one, layers).to(self.dtype)
        if one.model == "conv":
            net = net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if one.layout == "ddp" and not one.by_hand:
            return DistributedDataParallel(net, bucket_cap_mb=one.bucket_mb), None
        if one.layout == "fsdp2":
            for layer in () if one.one_unit else net.layers:  # type: ignore[union-attr]
                fully_shard(layer)
            fully_shard(net)
        if one.layout == "pipeline":
            stage = PipelineStage(net, self.rank, one.ranks, torch.device(one.device))
            kind = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}[one.pipeline]
            count = one.few_micro_batches or one.micro_batches
            return net, kind(stage, count, loss_fn=lambda out, wanted: (out - wanted).pow(2).mean())
        return net, None

    def step(self) -> None:
        one = self.one
        if self.rank == one.slow_rank:
            python_work(one.spin)
        for place in range(one.passes):
            values = next(self.batches)
            if self.schedule:
                self.pipeline_pass(values)
                continue
            last = place == one.passes - 1
            if isinstance(self.net, DistributedDataParallel):
                self.net.require_backward_grad_sync = last or one.sync_each_pass
            out = self.net(values)
            (out.float().pow(2).mean() / one.passes).backward()
            if one.by_hand and (last or one.sync_each_pass):
                for parameter in self.net.parameters():
                    dist.all_reduce(parameter.grad)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if one.empty_cache:
            torch.cuda.empty_cache()

    def pipeline_pass(self, values: Tensor) -> None:
        """The first stage has the input, the last what is wanted."""
        first, last = self.rank == 0, self.rank == self.one.ranks - 1
        self.schedule.step(*((values,) if first else ()), **({"target": values} if last else {}))


def record(one: Program, rank: int, path: Path) -> None:
    """WARM_UP steps, then STEPS under the profiler, written to `path`."""
    rival = None
    cores = sorted(os.sched_getaffinity(0))
    if one.one_core:
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
        if one.throttled and rank == one.slow_rank:
            rival = subprocess.Popen([sys.executable, "-c", "while True: pass"])  # on this core, as a child
    try:
        loop = Loop(one, rank)
        for _ in range(WARM_UP):
            loop.step()
        synchronize(one)
        if one.memory_slack:
            limit = (1 + one.memory_slack) * torch.cuda.max_memory_allocated()
            torch.cuda.empty_cache()
            torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(0).total_memory)
        kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (one.device == "cuda")
        path.parent.mkdir(parents=True, exist_ok=True)
        with profile(
            activities=kinds,
            schedule=schedule(wait=0, warmup=1, active=STEPS, repeat=1),
            on_trace_ready=lambda found: found.export_chrome_trace(str(path)),
            record_shapes=True,
        ) as found:
            for _ in range(STEPS + 1):
                loop.step()
                found.step()
        synchronize(one)
    finally:
        if rival:
            rival.kill()
            rival.wait()
        os.sched_setaffinity(0, cores)
        LOGGED.clear()
        if one.device == "cuda":
            gc.collect()
            torch.cuda.set_per_process_memory_fraction(1.0)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


def synchronize(one: Program) -> None:
    if one.device == "cuda":
        torch.cuda.synchronize()
    if one.ranks > 1:
        dist.barrier()


def main() -> None:
    """`planted_program.py JOBS FOLDER`: JOBS is JSON, a list of [name, fields of a Program]."""
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    torch.set_num_threads(1)
    if cores := json.loads(os.environ.get("PLANTED_CORES", "[]")):
        os.sched_setaffinity(0, cores[rank])
    if ranks > 1:
        dist.init_process_group("gloo")
    for name, fields in json.loads(Path(sys.argv[1]).read_text()):
        began = time.perf_counter()
        said = ""
        try:
            record(Program(**fields), rank, Path(sys.argv[2]) / name / f"rank{rank}.json")
        except torch.OutOfMemoryError:
            said = "out of memory"
        if rank == 0:
            print(f"{name}: {time.perf_counter() - began:.1f} s {said}", flush=True)
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
