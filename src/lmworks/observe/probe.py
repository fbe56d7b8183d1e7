"""Measure what this machine can do: a few seconds that turn a step-time prediction from a guess into arithmetic.

Each kind of kernel in `plan/ops.py` is run at a handful of sizes, as training runs it: products in their three
layouts (forward, gradient of the input, gradient of the weight), attention both ways, passes over memory, fused
AdamW, and ops too small to cost anything but their launch. The median of several runs is kept. The result is cached
per host, device, thread count and torch version, and `lmworks train` reads it from there.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

from ..plan.flops import keys_per_query
from ..plan.machine import FORMAT, Machine, Rate
from ..spec import Cluster, SpecError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# (tokens, inputs, outputs) of linear layers: small models first, so that a slow machine still measures something
GEMMS = {
    "cpu": [
        (512, 128, 128), (2048, 192, 192), (2048, 192, 512), (2048, 256, 1024), (512, 256, 4096), (1024, 1024, 1024),
    ],
    "cuda": [
        (2048, 256, 1024), (8192, 768, 768), (8192, 768, 3072), (2048, 768, 32768), (8192, 2048, 8192),
        (16384, 4096, 4096),
    ],
}  # fmt: skip
# (batch, heads, seq, head_dim)
ATTENTIONS = {
    "cpu": [(8, 4, 128, 32), (4, 6, 256, 32), (2, 4, 512, 64)],
    "cuda": [(64, 12, 256, 64), (16, 12, 1024, 64), (4, 32, 4096, 128)],
}
PASSES = {"cpu": [2**16, 2**18, 2**20, 2**22], "cuda": [2**18, 2**22, 2**24, 2**26]}  # elements of one fp32 tensor
OPTIMIZER = {"cpu": 2**22, "cuda": 2**27}  # parameters
BUSY = 1.3  # noise above which a measurement is not kept: it would say the machine is slower than it is


class Clock:
    """Seconds of one call: the median of at least five runs after a warm-up, within a share of the time budget.

    The median, as a training step gets what is usual, not what is best; a machine busy with other work betrays
    itself by `noise`. Before each run another 32 MiB are written: in training, too, an op finds its operands where
    the ops in between have pushed them.
    """

    def __init__(self, device: torch.device, seconds: float) -> None:
        self.device, self.share = device, seconds / 50  # about fifty points are measured
        self.others = torch.zeros(2**23, device=device)
        self.noise: list[float] = []  # median over fastest run of each point

    def once(self, work: Callable[[], object]) -> float:
        self.others.add_(1)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        start = time.perf_counter()
        work()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - start

    def __call__(self, work: Callable[[], object], calls: int = 1) -> float:
        """`calls`: how many of the measured thing one run of `work` holds."""
        deadline = time.perf_counter() + self.share
        self.once(work)
        times = [self.once(work) for _ in range(5)]
        while time.perf_counter() < deadline:
            times.append(self.once(work))
        self.noise.append(statistics.median(times) / min(times))
        return statistics.median(times) / calls


def probe(device: str | torch.device = "cpu", seconds: float = 4.0) -> Machine:
    """Measure `device`. fp16 is left out on a CPU, where nobody trains with it."""
    device = torch.device(device)
    clock = Clock(device, seconds)
    rates: dict[str, tuple[Rate, ...]] = {}
    for dtype in ["fp32", "bf16", "fp16"] if device.type == "cuda" else ["fp32", "bf16"]:
        rates[f"gemm.{dtype}"] = gemms(clock, DTYPES[dtype], seconds)
        forward, backward = attentions(clock, DTYPES[dtype], seconds)
        rates[f"attention.{dtype}"], rates[f"attention_backward.{dtype}"] = forward, backward
    rates |= passes(clock)
    rates["optimizer"] = (optimizer(clock),)
    launch, launch_backward = launches(clock)
    return Machine(
        name=device_name(device),
        device=device.type,
        tag="measured",
        rates=rates,
        launch_s=launch,
        launch_backward_s=launch_backward,
        memory_bytes=memory_bytes(device),
        noise=statistics.median(clock.noise),
    )


def gemms(clock: Clock, dtype: torch.dtype, seconds: float) -> tuple[Rate, ...]:
    """x·Wᵀ, grad·W and gradᵀ·x of each linear layer, each a point of its own: products of other proportions."""
    points: list[Rate] = []
    for tokens, inputs, outputs in GEMMS[clock.device.type]:
        flops = 2 * tokens * inputs * outputs
        if points and 12 * flops / points[-1].rate > seconds / 4:
            break  # this format is so slow here that larger products would take the whole budget
        x = torch.randn(tokens, inputs, device=clock.device).to(dtype)
        weight = torch.randn(outputs, inputs, device=clock.device).to(dtype)
        grad = torch.randn(tokens, outputs, device=clock.device).to(dtype)
        for left, right in [(x, weight.t()), (grad, weight), (grad.t(), x)]:
            shape = (left.shape[0], left.shape[1], right.shape[1])
            points.append(Rate(shape, flops / clock(partial(torch.mm, left, right))))
    return tuple(points)


def attentions(clock: Clock, dtype: torch.dtype, seconds: float) -> tuple[tuple[Rate, ...], tuple[Rate, ...]]:
    """Causal attention: FLOPs over the keys that are seen, 2 products forward and 5 backward (scores again)."""
    forward: list[Rate] = []
    backward: list[Rate] = []
    for batch, heads, seq, head_dim in ATTENTIONS[clock.device.type]:
        flops = 4 * batch * heads * seq * head_dim * keys_per_query(seq)
        if forward and 12 * flops / forward[-1].rate > seconds / 4:
            break
        q, k, v = (
            torch.randn(batch, seq, heads, head_dim, device=clock.device).to(dtype).transpose(1, 2).requires_grad_()
            for _ in range(3)
        )
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        grad = torch.randn_like(out)
        shape = (seq, head_dim)

        def run(q: torch.Tensor = q, k: torch.Tensor = k, v: torch.Tensor = v) -> None:
            with torch.no_grad():
                F.scaled_dot_product_attention(q, k, v, is_causal=True)

        def run_back(out: torch.Tensor = out, grad: torch.Tensor = grad, qkv: tuple = (q, k, v)) -> None:
            torch.autograd.grad(out, qkv, grad, retain_graph=True)

        forward.append(Rate(shape, flops / clock(run)))
        backward.append(Rate(shape, 2.5 * flops / clock(run_back)))
    return tuple(forward), tuple(backward)


def passes(clock: Clock) -> dict[str, tuple[Rate, ...]]:
    """Element-wise ops with a fresh result, by the bytes that they read and write."""
    rates: dict[str, list[Rate]] = {"stream": [], "strided": [], "exp": [], "tanh": []}
    heads, head_dim = 8, 64
    for elements in PASSES[clock.device.type]:
        a, b = torch.randn(elements, device=clock.device), torch.randn(elements, device=clock.device)
        x, table = a.view(-1, heads, head_dim), b.view(-1, heads, head_dim)[:, :1]  # a row per position
        kernels: dict[str, tuple[int, Callable[[], object]]] = {
            "stream": (12, partial(torch.mul, a, b)),
            "exp": (8, partial(F.silu, a)),
            "tanh": (8, partial(F.gelu, a, approximate="tanh")),
            "strided": (8, partial(torch.mul, x, table)),
        }
        for kind, (width, work) in kernels.items():
            rates[kind].append(Rate((float(width * elements),), width * elements / clock(work)))
    return {kind: tuple(points) for kind, points in rates.items()}


def optimizer(clock: Clock) -> Rate:
    """Fused AdamW over tensors of a million parameters: reads p, g, m, v and writes p, m, v."""
    count = OPTIMIZER[clock.device.type]
    parameters = [torch.nn.Parameter(torch.zeros(2**20, device=clock.device)) for _ in range(count // 2**20)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    adamw = torch.optim.AdamW(parameters, fused=True)
    return Rate((28.0 * count,), 28 * count / clock(adamw.step))


def launches(clock: Clock) -> tuple[float, float]:
    """Host seconds of one small op: called from Python with autograd recording, and its backward node."""
    count, x = 200, torch.ones(8, device=clock.device, requires_grad=True)

    def forward() -> torch.Tensor:
        y = x
        for _ in range(count):
            y = y * x
        return y

    once = clock(forward, count)
    both = clock(lambda: forward().sum().backward(), count)
    return once, max(0.0, both - once) / 2  # two products and a sum for each node's backward: see plan/ops.py


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{cpu_model()}, {torch.get_num_threads()} threads"


def cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):  # not every system says
        return 0


# --- the cache ------------------------------------------------------------------------------------


def cache_folder() -> Path:
    own, xdg = os.environ.get("LMWORKS_CACHE"), os.environ.get("XDG_CACHE_HOME")
    if own:
        return Path(own)
    return (Path(xdg) if xdg else Path.home() / ".cache") / "lmworks"


def cache_path(device: torch.device) -> Path:
    key = (platform.node(), device_name(device), torch.get_num_threads(), torch.__version__, FORMAT)
    return cache_folder() / f"probe-{hashlib.blake2b(repr(key).encode(), digest_size=8).hexdigest()}.json"


def pick(cluster: Cluster) -> torch.device:
    """The device of this machine that the spec would run on."""
    if cluster.device == "cuda" and not torch.cuda.is_available():
        raise SpecError("cluster.device = 'cuda', but no CUDA device is here; use cluster.device = 'cpu'")
    cuda = cluster.device == "cuda" or (cluster.device == "auto" and torch.cuda.is_available())
    return torch.device("cuda" if cuda else "cpu")


def cached_machine(cluster: Cluster) -> Machine | None:
    """What was measured earlier about this machine; None where nothing was, or not by this version."""
    try:
        data = json.loads(cache_path(pick(cluster)).read_text(encoding="utf-8"))
        return Machine.from_dict(data) if data["format"] == FORMAT else None
    except (OSError, ValueError, KeyError, TypeError):  # no cache, or not one of ours: measured again when asked
        return None


def this_machine(cluster: Cluster, *, refresh: bool = False) -> Machine:
    """The cached measurement, or a new one, kept unless the machine was busy or the folder cannot be written."""
    machine = None if refresh else cached_machine(cluster)
    if machine is None:
        device = pick(cluster)
        machine = probe(device)
        if machine.noise > BUSY:
            return machine
        path = cache_path(device)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(machine.to_dict(), indent=2), encoding="utf-8")
        except OSError:
            pass  # measured again next time
    return machine
