"""A row of somebody's table as a job that the planner can price: the shape of its model, and its layout.

What the row does not say is unknown. The usual value is taken, said in a sentence, and where it matters the job is
also priced with other values, so that the interval is as wide as the ignorance. The shape of the model comes from
the columns of the row, its name, or no more than its size.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...spec import Cluster, Gpu, ModelSpec, SpecError
from ..case import Case
from ..software import SOFTWARE, Software, under_bf16_optimizer
from .columns import Row
from .layout import batch_of, degrees_of, pipeline_of, sharding_of, sp_of
from .lora import adapters_of, lora_named
from .names import (
    ASYNC_TP,
    COMPILE,
    GPT,
    framework_named,
    gpu_named,
    nic_named,
    optimizer_named,
    precision_named,
    recompute_modules,
    recompute_named,
    shape_named,
    without_count,
)
from .recipes import with_recipe
from .unpriced import refuse, refuse_dense

COUNTS = ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "experts", "top_k", "shared_experts")
USUAL_VOCAB = {"swiglu": 32_000, "gelu": 51_200}
MOST_VOCAB = 300_000  # of public models: 262,144 (Gemma 3)


def model_of(row: Row, seq: int) -> ModelSpec:
    """What the row says wins; a known name fills the rest; then the usual."""
    given = {key: value for key in (*COUNTS, "expert_ffn") if (value := row.whole(key))}
    tied = row.flag("tie_embeddings")
    if tied is not None:
        given["tie_embeddings"] = tied
    known = named(row, given)
    if not known and not {"layers", "hidden"} <= given.keys():
        known = by_size(row, given)
    shape = {**known, **given}
    if "heads" not in shape:
        shape["heads"] = usual_heads(shape["hidden"], row.whole("tp") or 1)
        row.assume("heads", f"heads = {shape['heads']}: {shape['hidden'] // shape['heads']} wide")
    shape.update({key: value for key, value in style(row, shape).items() if key not in shape})
    if "vocab" not in shape:
        shape["vocab"] = USUAL_VOCAB[shape["mlp"]]
        more = vocab_beyond(row, shape, seq) if {"layers", "hidden"} <= given.keys() else 0
        shape["vocab"] += more
        why = f": {row.text('params') or row.text('model')} beside {shape['layers']} layers" if more else ""
        row.assume("vocab", f"vocab = {shape['vocab']}{why}")
    if shape.get("experts"):  # the spec's experts are SwiGLU without biases
        shape.update(mlp="swiglu", bias=False)
        if "top_k" not in shape:
            row.assume("top_k", "top_k = 2")
    return ModelSpec.from_dict({**shape, "context": max(seq, 1)})


def usual_heads(hidden: int, tp: int) -> int:
    """As many as divide the width into heads of nearly 128, and among tensor-parallel ranks."""
    fits = [n for n in range(1, hidden + 1) if hidden % n == 0 and n % tp == 0] or [1]
    return min(fits, key=lambda n: abs(math.log(hidden / n / 128)))


def padded_vocab(model: ModelSpec, software: Software, tp: int) -> ModelSpec:
    if not software.vocab_multiple:
        return model
    whole = software.vocab_multiple * tp
    return model.replace(vocab=-(-model.vocab // whole) * whole)


def vocab_beyond(row: Row, shape: Mapping[str, Any], seq: int) -> int:
    """Rows of the embedding that a size tells beyond the usual ones, beside a GPT's 12 × layers × hidden²: 182B of 78
    layers and 13,824 has 250,000. A size is good to a unit of its last digit; what no vocabulary has is no vocabulary.
    """
    size = row.real("params") or size_in(row.text("params")) or size_in(row.text("model"))
    if shape["mlp"] == "swiglu" or not size:
        return 0
    model = ModelSpec.from_dict({**shape, "context": max(seq, 1)})
    digits = f"{size:.15g}".rstrip("0")
    unit = 10.0 ** (len(f"{size:.0f}") - len(digits))
    weights = shape["hidden"] * (1 if model.tie_embeddings else 2)
    more = round((size - model.params) / weights)
    return more if size - model.params > unit and shape["vocab"] + more <= MOST_VOCAB else 0


def named(row: Row, given: dict[str, Any]) -> dict[str, Any]:
    """The public model of that name. A run of fewer layers is still of that family; a row of other widths is not."""
    parts = row.text("model").split("; ")  # a family and a size may have a column each
    found = shape_named(row.text("model")) or shape_named("-".join(parts)) or shape_named("-".join(reversed(parts)))
    if not found:
        return {}
    note = found.pop("note", "")
    if any(key in given and found.get(key, given[key]) != given[key] for key in ("hidden", "ffn")):
        return {
            key: found[key] for key in ("norm", "positions", "mlp", "bias", "tie_embeddings", "qk_norm") if key in found
        }
    if note:
        row.assume("model", f"model: {note}")
        given.pop("kv_heads", None)
    return {key: value for key, value in found.items() if key not in ("context", "rope_scaling", "rope_theta")}


def by_size(row: Row, given: dict[str, Any]) -> dict[str, Any]:
    """A public shape of as many parameters, or 12 × layers × hidden² with 128 of width a layer, as GPT-3 has it."""
    refuse_dense(row)
    size = row.real("params") or 1e9 * (row.real("params_b") or 0) or size_in(row.text("model"))
    if not size:
        raise SpecError(
            f"model = {row.text('model')!r} is not a known name, and neither layers and hidden nor params are given"
        )
    if 0 < size < 2000:  # a column of billions without saying so
        size *= 1e9
    written = f"{size / 1e9:g}b" if size >= 1e9 else f"{size / 1e6:g}m"
    shape = shape_named(f"gpt3-{written}") or shape_named(f"llama-{written}")
    if not shape or "layers" in given or "hidden" in given:
        hidden = given.get("hidden") or max(128, round((size / 12 * 128) ** (1 / 3) / 128) * 128)
        shape = {**GPT, "hidden": hidden, "layers": given.get("layers") or max(1, round(size / (12 * hidden**2)))}
    row.assume("model", f"model: {written.upper()} parameters as {shape['layers']} layers of {shape['hidden']}")
    return shape


def size_in(name: str) -> float:
    """7e9 of "my model 7B"; 0 where the name has no size."""
    found = re.search(r"(?i)(?<![a-z0-9.])(\d+(?:\.\d+)?)\s*([bmt])(?![a-z0-9])", name)
    return float(found[1]) * {"m": 1e6, "b": 1e9, "t": 1e12}[found[2].lower()] if found else 0.0


def style(row: Row, shape: dict[str, Any]) -> dict[str, Any]:
    """Llama's kind of block or GPT's, where no name says so: by the MLP that is given, or by its width."""
    word = row.text("mlp").lower()
    grouped = shape.get("kv_heads", shape["heads"]) != shape["heads"]
    ffn = shape.get("ffn", 0)
    llama = bool(shape.get("experts")) or grouped or (ffn and ffn < 3.5 * shape["hidden"])
    if word:
        llama = any(part in word for part in ("swi", "silu", "glu")) and "relu" not in word
    elif shape.get("mlp"):
        llama = shape["mlp"] == "swiglu"
    elif not llama and ffn and ffn != 4 * shape["hidden"]:
        llama = True
    return {"mlp": "swiglu"} if llama else dict(GPT)


# --- a row -----------------------------------------------------------------------------------------------


GUESSED = {
    "model": 0.15,
    "heads": 0.05,
    "vocab": 0.05,
    "seq_len": 0.15,
    "gpu": 0.05,
    "tp": 0.15,
    "top_k": 0.3,
    "accumulation": 0.1,
}


@dataclass(frozen=True)
class Job:
    """A case read from a row, what was assumed for it, and how else its unknown fields might be answered."""

    case: Case
    label: str
    assumed: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()  # columns
    others: Mapping[str, tuple[Case, ...]] = field(default_factory=dict)  # by unknown column
    spread: float = 0.0  # relative, for what no other case can stand for


def job(cells: Mapping[str, str], label: str = "", usual: str = "") -> Job:
    """Read one row. Raises SpecError where it cannot be a job, saying which column and why.

    `usual` is the code base of rows that name none.
    """
    row = Row(dict(cells))
    refuse(row)
    gpu = gpu_of(row)
    software, dtype = software_for(row, gpu, usual), precision_of(row, gpu)
    seq = seq_of(row, software)
    model = model_of(row, seq)
    lora = lora_named(row, model)
    degrees = degrees_of(row, gpu, model, software)
    model = padded_vocab(model, software, degrees["tp"])
    sharding = sharding_of(row, software, degrees, model, gpu, dtype)
    if sharding["zero"] == 1 and under_bf16_optimizer(software, dtype):
        software = replace(software, gradients=4, reduce=4)
    axes: dict[str, Any] = {axis: degrees[axis] for axis in ("tp", "pp", "cp", "ep")}
    case = Case(
        model,
        gpu,
        software,
        seq,
        **axes,
        **sharding,
        **pipeline_of(row, model, degrees["pp"]),
        sp=sp_of(row, software, degrees["tp"]),
        recompute=recompute_of(row, software),
        recompute_every=2
        if re.search(r"selective layer|every (2nd|second|other)", row.text("recompute").lower())
        else 1,
        dtype=dtype,
        optimizer=optimizer_of(row),
        offload=offload_of(row),
        cluster=Cluster(gpus_per_node=degrees["per_node"], nic_gbs=nic_of(row, degrees["per_node"])),
        **adapters_of(lora, model),
    )
    case = case.replace(**batch_of(row, case))
    spread = sum(GUESSED.get(column, 0.0) ** 2 for column in set(row.open)) ** 0.5
    name = label or row.text("label") or describe(row, case)
    return Job(case, name, tuple(row.assumed), tuple(row.open), others(row, case), spread)


def describe(row: Row, case: Case) -> str:
    degrees = " ".join(f"{axis}{n}" for axis in ("dp", "tp", "pp", "cp", "ep") if (n := int(getattr(case, axis))) > 1)
    name = row.text("model") or f"{case.model.params / 1e9:.3g}B"
    return f"{name} {int(case.world)}×{case.gpu.name} {degrees} seq {case.seq}".replace("  ", " ")


def gpu_of(row: Row) -> Gpu:
    text, count = without_count(row.text("gpu"))
    if not text:
        row.assume("gpu", "gpu = H100-SXM-80GB")
        text = "H100-SXM-80GB"
    if count:
        count_gpus(row, count)
    gpu, said = gpu_named(text, row.real("gpu_mem_gb"))
    row.assumed.extend(said)
    return gpu


def count_gpus(row: Row, count: int) -> None:
    """ "8xH100": all GPUs of the run, or those of one machine where another column says how many there are."""
    total = row.whole("n_gpus")
    if row.text("nodes") or (total and total > count and total % count == 0):
        row.cells.setdefault("gpus_per_node", str(count))
    elif not total:
        row.cells["n_gpus"] = str(count)
        row.assumed.append(f"n_gpus = {count}: from gpu = {row.text('gpu')!r}")
    elif total != count:
        raise SpecError(f"n_gpus = {total}, but gpu = {row.text('gpu')!r} says {count}")


def usual_framework(rows: Sequence[Mapping[str, str]]) -> str:
    """Of a table that names none: one that splits layers is Megatron's kind all over, one that shards is PyTorch's."""
    splits = any(cells.get(axis, "1").strip() not in ("1", "1.0") for cells in rows for axis in ("tp", "pp", "ep"))
    shards = any(cells.get("fsdp", "0").strip() not in ("0", "1") or "local_batch" in cells for cells in rows)
    chunks = any("interleave" in cells for cells in rows)  # a word of Megatron's
    return "megatron" if chunks or (splits and not shards) else "torchtitan"


def software_for(row: Row, gpu: Gpu, usual: str = "") -> Software:
    """The code base that is named, in the way that the row used it."""
    found = framework_named(row.text("framework")) or framework_named(row.text("note"))
    if not found and (found := framework_named(f"{row.text('origin')} {row.text('model')}")):
        row.assumed.append(f"framework: {found.name}, by where the row comes from")
    if not found:
        found = SOFTWARE["maxtext" if gpu.name.startswith("TPU") else usual or usual_framework([row.cells])]
        row.assume("framework", f"framework: like {found.name}")
    compiled = f"{found.name}-compile"
    if compiled in SOFTWARE and (row.flag("compile") or COMPILE.search(row.hints.lower())):
        found = SOFTWARE[compiled]
    if found.name == "torchtitan-compile" and re.search(r"\b202[5-9]", row.hints):
        found = SOFTWARE["torchtitan-2025"]
        found = replace(found, flash="") if re.search(r"\b202[6-9]", row.hints) else found
    if found.name == "megatron" and gpu.name.startswith("V100"):
        found = SOFTWARE["megatron-2021"]
    kernel = row.text("attention").lower()
    if row.flag("attention") is False or any(
        word in kernel for word in ("scores", "eager", "unfused", "torch", "math")
    ):
        found = replace(found, attention="scores")
    elif kernel:
        found = replace(found, attention="flash")
    if found.name == "megatron" and "framework" in row.open and not gpu.name.startswith("A"):
        found = replace(found, async_tp=True)  # what tables without a name are made with
    elif ASYNC_TP.search(f"{row.hints} {row.text('origin')}".lower()) and "vanilla" not in row.hints.lower():
        found = replace(found, async_tp=True)
    if re.search(r"row-?wise", row.hints.lower()):  # a scale for every row, both ways
        found = replace(found, casts=10.0)
    if found.name == "megatron-bridge":
        found = with_recipe(found, row, gpu)
    if row.text("mixed"):
        found = replace(found, reduce=2 if row.text("mixed").lower() == "pure" else 4)
    return found


def seq_of(row: Row, software: Software) -> int:
    seq = row.whole("seq_len", kilo=1024)
    if seq:
        return seq
    tokens, batch = row.whole("global_batch_tokens"), row.whole("global_batch")
    if tokens and batch and tokens % batch == 0:
        return tokens // batch
    seq = 2048 if software.attention == "scores" else 4096
    row.assume("seq_len", f"seq_len = {seq}")
    return seq


def recompute_of(row: Row, software: Software) -> str:
    cell = row.text("recompute")
    found, nearest = recompute_modules(cell)
    if nearest:
        row.assumed.append(nearest)
    found = found or recompute_named(cell)
    if not found and row.flag("recompute") is not None:
        found = "full" if row.flag("recompute") else "none"
    if not found and cell:
        if not cell.replace(".", "").isdecimal():
            known = "none, full, selective, attention or a list of modules"
            raise SpecError(f"recompute = {cell!r} is not known; use {known}")
        found = "full"
    if not found and "recomp" in row.hints.lower():
        found = recompute_named(row.hints)
    if not found:
        family = software.name.removesuffix("-compile")
        found = {"torchtitan": "selective", "megatron-2021": "full", "megatron-deepspeed": "full"}.get(family, "none")
        row.assume("recompute", f"recompute = {found}: usual for {software.name}")
    return "attention" if found == "selective" and software.name.startswith("megatron") else found


def precision_of(row: Row, gpu: Gpu) -> str:
    cell = row.text("precision")
    found = precision_named(cell) or precision_named(row.text("note")) or precision_named(row.text("framework"))
    if cell and not found and cell.lower() not in ("mixed", "amp", "half"):
        raise SpecError(f"precision = {cell!r} is not known; use bf16, fp16, fp8, fp4 or fp32")
    if not found:
        found = "bf16" if gpu.bf16_tflops else "fp16"
        row.assume("precision", f"precision = {found}")
    return found


def optimizer_of(row: Row) -> str:
    if row.text("optimizer"):
        return optimizer_named(row.text("optimizer"))
    row.assume("optimizer", "optimizer = adamw")
    return "adamw"


def offload_of(row: Row) -> str:
    said = row.flag("offload")
    if said is not None or not row.text("offload"):
        return "full" if said else "none"
    return "full" if re.search(r"param|full|all", row.text("offload").lower()) else "optimizer"


def nic_of(row: Row, per_node: int) -> float:
    given = row.real("nic_gbs")
    if given:
        return given
    text = row.text("internode")
    if not text:
        text = row.text("gpu") if re.search(r"\d\s*gb/s per gpu|gbps per gpu", row.text("gpu").lower()) else ""
        return nic_named(text[text.rfind(",") + 1 :], per_node) if text else 0.0
    return nic_named(text, per_node)


def others(row: Row, case: Case) -> dict[str, tuple[Case, ...]]:
    """The same job with one unknown answered otherwise."""
    found: dict[str, list[Case]] = {}
    if "recompute" in row.open:
        ways = ("none", "full") if case.software.name.startswith("megatron") else ("none", "selective", "full")
        found["recompute"] = [case.replace(recompute=way) for way in ways if way != case.recompute]
    if "micro_batch" in row.open:
        local = int(case.micro_batch * case.accumulation)
        sizes = {1, int(case.micro_batch) * 2, int(case.micro_batch) // 2} - {int(case.micro_batch), 0}
        found["micro_batch"] = [
            case.replace(micro_batch=n, accumulation=local // n) for n in sorted(sizes) if local % n == 0
        ]
    if "framework" in row.open:
        names = {"torchtitan": ("torchtitan-compile", "huggingface"), "megatron": ("megatron-2021",)}
        found["framework"] = [case.replace(software=SOFTWARE[name]) for name in names.get(case.software.name, ())]
        if case.software.async_tp:
            found["framework"].append(case.replace(software=replace(case.software, async_tp=False)))
    if "interleave" in row.open or "schedule" in row.open:
        each = -(-case.model.layers // int(case.pp))
        more = [n for n in (1, 2, each) if n != case.virtual and each % n == 0]
        found["schedule"] = [case.replace(virtual=n, schedule="interleaved" if n > 1 else "1f1b") for n in more]
    if "sp" in row.open:
        found["sp"] = [case.replace(sp=not case.sp)]
    return {column: tuple(cases) for column, cases in found.items() if cases}
