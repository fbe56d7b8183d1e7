"""Which layouts can run: every rule in one place, and what would be legal instead of what is not."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

from .errors import SpecError

if TYPE_CHECKING:
    from .model import ModelSpec
    from .run import ParallelSpec, RunSpec

LOOPED = ("interleaved", "looped-bfs", "interleaved-zero-bubble")  # several stages a rank, each rank's in a loop
V_SHAPED = ("zbv", "dualpipev")  # two stages a rank: r on the way down, 2P−1−r on the way up
SPLIT_BACKWARD = ("interleaved-zero-bubble", "zbv", "dualpipev")  # gradients of inputs first, of weights later
IN_ROUNDS = ("interleaved", "interleaved-zero-bubble")  # of at least pp micro-batches, every round of the same size
RESIDENT_BLOCKS = 2  # the last blocks of a network, whose activations never wait in host memory
DEGREES = ("pp", "tp", "cp", "dp")


def check_layout(run: RunSpec) -> None:
    """Refuse an illegal layout, naming what is wrong and the nearest legal ones of as many ranks."""
    wrong = problems(run)
    if wrong:
        others = nearest(run)
        hint = f"; legal with {run.parallel.world} ranks: {' | '.join(others)}" if others else ""
        raise SpecError("; ".join(wrong) + hint)


def problems(run: RunSpec) -> list[str]:
    """Everything that keeps the layout from running, as sentences that name the key; empty: it runs."""
    return [*machines(run), *tensor(run), *context(run), *pipeline(run), *expert(run), *data(run), *host(run)]


def machines(run: RunSpec) -> list[str]:
    """A cluster that is named is used whole: one rank for each of its accelerators."""
    nodes, each, world = run.cluster.nodes, run.cluster.gpus_per_node, run.ranks
    if nodes * each in (1, world):
        return []
    return [f"cluster.nodes = {nodes} × cluster.gpus_per_node = {each} is {nodes * each} ranks, the layout has {world}"]


def tensor(run: RunSpec) -> list[str]:
    tp, found = run.parallel.tp, indivisible(run.model, "parallel.tp", run.parallel.tp)
    local = run.data.seq // run.parallel.cp
    if tp > 1 and run.parallel.sp and local % tp:
        found.append(f"parallel.sp = true needs data.seq / cp = {local} divisible by parallel.tp = {tp}")
    return found


def indivisible(model: ModelSpec, key: str, tp: int) -> list[str]:
    """What `key` = `tp` tensor-parallel ranks cannot share evenly."""
    if tp == 1:
        return []
    found = [f"{key} = {tp} does not go with model.qk_norm_whole"] if model.qk_norm_whole else []
    widths = {"model.heads": model.heads, "model.vocab": model.vocab}
    if model.experts:
        widths["model.expert_ffn"] = model.expert_ffn
    if not model.experts or model.mlp_layers:
        widths["model.ffn"] = model.ffn
    for width, size in widths.items():
        if size % tp:
            found.append(f"{key} = {tp} does not divide {width} = {size}{pad(width, size, tp)}")
    if model.kv_heads % tp and tp % model.kv_heads:
        found.append(f"{key} = {tp} and model.kv_heads = {model.kv_heads}: one must divide the other")
    return found


def pad(key: str, size: int, tp: int) -> str:
    return f" (a vocabulary may be padded: {-(-size // tp) * tp})" if key == "model.vocab" else ""


def context(run: RunSpec) -> list[str]:
    cp, model, method = run.parallel.cp, run.model, run.parallel.cp_method
    if cp == 1:
        return []
    found = []
    pieces = 2 * cp if method == "ring" else cp
    if run.data.seq % pieces:
        found.append(f"parallel.cp = {cp} ({method}) needs data.seq = {run.data.seq} divisible by {pieces}")
    heads = model.heads // run.parallel.tp
    if method == "ulysses" and heads % cp:
        found.append(f"parallel.cp = {cp} does not divide the {heads} heads of a rank, as cp_method = 'ulysses' needs")
    kv_heads = max(1, model.kv_heads // run.parallel.tp)
    if method == "ulysses" and kv_heads % cp and cp % kv_heads:
        found.append(f"parallel.cp = {cp} and the {kv_heads} key/value heads of a rank: one must divide the other")
    if model.capacity:
        found.append(
            f"model.capacity = {model.capacity:g} counts the tokens of a whole sequence, "
            f"and parallel.cp = {cp} splits it; use 0 (no token is dropped)"
        )
    return found


def pipeline(run: RunSpec) -> list[str]:
    layout, found = run.parallel, []
    pp, schedule, virtual = layout.pp, layout.schedule, layout.virtual_stages
    if pp == 1:
        return []
    stages, batches = pp * virtual, run.accumulation
    if stages > run.model.layers:
        found.append(f"parallel.pp × virtual_stages = {pp} × {virtual} is more than model.layers = {run.model.layers}")
    if schedule in ("gpipe", "1f1b") and virtual > 1:
        found.append(f"parallel.schedule = '{schedule}' has one stage a rank, not virtual_stages = {virtual}")
    if schedule in V_SHAPED and virtual != 2:
        found.append(f"parallel.schedule = '{schedule}' has two stages a rank, not virtual_stages = {virtual}")
    least = {"1f1b": pp, "dualpipev": 2 * pp}.get(schedule, 1)
    rounds = max(1, batches // pp)
    if batches < least:
        found.append(
            f"parallel.schedule = '{schedule}' over pp = {pp} needs at least {least} micro-batches, not {batches}: "
            f"data.global_batch = {least * run.data.micro_batch * layout.dp} would do"
        )
    elif schedule in IN_ROUNDS and batches % rounds:
        fit = (batches - batches % pp) * run.data.micro_batch * layout.dp
        found.append(
            f"parallel.schedule = '{schedule}' over pp = {pp} runs micro-batches in rounds of equal size, and "
            f"{batches} are not {rounds} such rounds: data.global_batch = {fit} would do"
        )
    if layout.compile and schedule in SPLIT_BACKWARD:
        found.append(f"parallel.compile does not work with schedule = '{schedule}' (PyTorch #161904); use '1f1b'")
    return found


def least_micro_batches(layout: ParallelSpec) -> int:
    """What fills the pipeline: micro-batches of a step whose size the spec leaves open."""
    return 2 * layout.pp if layout.pp > 1 and layout.schedule == "dualpipev" else layout.pp


def expert(run: RunSpec) -> list[str]:
    layout, experts = run.parallel, run.model.experts
    ep, found = layout.ep, []
    if ep == 1:
        return []
    if not experts or experts % ep:
        fitting = [str(n) for n in range(1, experts + 1) if experts % n == 0] or ["1 (the model is dense)"]
        found.append(f"parallel.ep = {ep} does not divide model.experts = {experts}; ep can be {', '.join(fitting)}")
    over = (layout.dp if layout.dp_shard == 1 else layout.dp_shard) * layout.cp
    if over % ep:
        found.append(f"parallel.ep = {ep} does not divide the {over} ranks (dp × cp) that it is folded into")
    return found


def data(run: RunSpec) -> list[str]:
    """What a data-parallel strategy cannot be combined with."""
    layout, found = run.parallel, []
    alone = {"tp": layout.tp, "pp": layout.pp, "cp": layout.cp, "ep": layout.ep}
    if layout.engine == "deepspeed":
        found += [f"parallel.engine = 'deepspeed' works without parallel.{k} = {v}" for k, v in alone.items() if v > 1]
        found += deepspeed(run)
    if layout.strategy == "fsdp1":
        found += [
            f"parallel.strategy = 'fsdp1' does not combine with parallel.{key} = {alone[key]}; use 'fsdp2'"
            for key in ("pp", "ep")
            if alone[key] > 1
        ]
        if layout.offload == "full":
            found.append("parallel.offload = 'full' needs strategy = 'fsdp2' (or engine = 'deepspeed'), not 'fsdp1'")
    if layout.strategy == "ddp" and layout.offload == "full":
        found.append("parallel.offload = 'full' needs strategy = 'fsdp2': DDP keeps whole parameters on the device")
    if layout.strategy == "zero" and layout.zero < 3:
        if layout.dp_replicate > 1:
            found.append(f"parallel.zero = {layout.zero} has no replicas: give parallel.dp_shard alone")
        if layout.offload == "full":
            found.append(f"parallel.offload = 'full' needs parallel.zero = 3, not {layout.zero}")
    return found


def deepspeed(run: RunSpec) -> list[str]:
    """What DeepSpeed itself, or our seam to it, cannot do."""
    layout, precision, found = run.parallel, run.precision, []
    if layout.strategy != "zero":
        found.append(f"parallel.engine = 'deepspeed' needs strategy = 'zero', not '{layout.strategy}'")
    if not layout.zero:
        found.append("parallel.engine = 'deepspeed' needs parallel.zero = 1, 2 or 3")
    if layout.zero == 3 and layout.dp_replicate > 1:
        found.append("parallel.engine = 'deepspeed' has no replicas: give parallel.dp_shard alone")
    if run.model.experts:
        found.append(
            f"parallel.engine = 'deepspeed' does not balance model.experts = {run.model.experts}; use engine = 'native'"
        )
    if precision.dtype == "fp16" and not math.log2(precision.loss_scale).is_integer():
        power = 2.0 ** round(math.log2(precision.loss_scale))
        found.append(
            f"precision.loss_scale = {precision.loss_scale:g} must be a power of two for DeepSpeed, e.g. {power:g}"
        )
    return found


def host(run: RunSpec) -> list[str]:
    """Where activations cannot wait in host memory."""
    layout = run.parallel
    key = f"parallel.offload_activations = {layout.offload_activations:g}"
    if not layout.offload_activations:
        return []
    found = []
    if layout.pp > 1:
        found.append(f"{key} works without parallel.pp = {layout.pp}, which holds several micro-batches at once")
    if layout.engine == "deepspeed":
        found.append(f"{key} works with parallel.engine = 'native', not 'deepspeed'")
    if run.model.layers <= RESIDENT_BLOCKS:
        found.append(
            f"{key} needs more than model.layers = {run.model.layers}: the last {RESIDENT_BLOCKS} blocks keep theirs"
        )
    return found


def nearest(run: RunSpec, count: int = 3) -> list[str]:
    """Legal layouts of as many ranks, those that change the fewest degrees (and those least) first."""
    layout = run.parallel
    now = {axis: getattr(layout, axis) for axis in DEGREES}
    found = []
    for degrees in factorisations(layout.world):
        if degrees == now:
            continue
        changes: dict[str, Any] = {**degrees, "dp_replicate": 1, "dp_shard": 1}
        if degrees["tp"] == 1:
            changes["sp"] = False
        if degrees["pp"] == 1:
            changes |= {"virtual_stages": 0, "schedule": "1f1b"}
        if layout.ep > 1 and (degrees["dp"] * degrees["cp"]) % layout.ep:
            continue
        trial = run.with_derived("parallel", layout.replace(**changes))
        per_pass = run.data.micro_batch * degrees["dp"]
        if not run.data.given["global_batch"]:
            least = per_pass * least_micro_batches(trial.parallel)
            trial.derive("data", run.data.with_derived("global_batch", least))
        if trial.data.global_batch % per_pass or problems(trial):
            continue
        distance = sum(degrees[axis] != now[axis] for axis in DEGREES)
        size = sum(abs(degrees[axis] - now[axis]) for axis in DEGREES)
        found.append((distance, size, " ".join(f"{axis}={n}" for axis, n in degrees.items() if n > 1) or "dp=1"))
    return [text for _, _, text in sorted(found)[:count]]


def factorisations(world: int) -> list[dict[str, int]]:
    """Every (pp, tp, cp, dp) whose product is `world`."""
    divisors = [n for n in range(1, world + 1) if world % n == 0]
    return [
        {"pp": pp, "tp": tp, "cp": cp, "dp": world // (pp * tp * cp)}
        for pp, tp, cp in itertools.product(divisors, repeat=3)
        if world % (pp * tp * cp) == 0
    ]
