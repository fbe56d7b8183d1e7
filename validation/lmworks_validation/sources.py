"""Other people's measurements as jobs with a result, one small reader a source.

A reader says what its table leaves out and everybody knew (the code that ran, what a word meant there), flags rows
that are suspect, and turns whatever was printed into seconds a step and bytes. Published tables are in `published/`;
bulk sets are read from a folder that the user names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from lmworks.plan.case import Case
from lmworks.plan.software import as_measured
from lmworks.plan.step.constants import REFERENCE_LAUNCH_S
from lmworks.plan.tables.columns import read
from lmworks.plan.tables.rows import Job, job
from lmworks.spec import RunSpec, SpecError, catalogue, load_run
from lmworks.spec.errors import did_you_mean

PUBLISHED = Path(__file__).parent.parent / "published"
GIB = 2**30


@dataclass(frozen=True)
class Measured:
    """One run and what was measured of it; what was not is None."""

    source: str
    job: Job
    group: str = ""  # a part of the source with a figure of its own
    step_s: float | None = None
    allocated: float | None = None  # bytes of the fullest rank
    reserved: float | None = None
    in_use: float | None = None  # as nvidia-smi counts: reserved, and what the allocator does not count
    # A paper's closed form, not a measurement: bytes, or the share of another case's bytes.
    activations: float | None = None
    states: float | None = None
    share_of: Case | None = None
    suspect: str = ""  # why the figure may be wrong
    inferred: bool = False  # shape, layout or length are not in the table
    # Where blocks recompute in several ways: their shares, and the case in which all do so. Memory has no closed form.
    mixed: tuple[tuple[float, Case], ...] = ()

    @property
    def case(self) -> Case:
        return self.job.case

    @property
    def shares(self) -> tuple[tuple[float, Case], ...]:
        """Cases whose times, weighed so, add up to that of the step."""
        return self.mixed or ((1.0, self.case),)

    @property
    def label(self) -> str:
        return self.job.label


Raw = Mapping[str, str]
Reader = Callable[[Raw, dict[str, str]], Measured | None]


@dataclass(frozen=True)
class Source:
    name: str
    file: str
    reader: Reader
    bulk: bool = False  # outside the project
    compare: str = "step_s"  # or tokens_per_s: what its own readers compare
    fitted: bool = True  # whether any constant was fitted to it
    note: str = ""

    def rows(self, data: Path | None = None) -> list[Measured] | None:
        """None: not at hand. A reader leaves out a row by answering None."""
        path = (data / self.file if data else None) if self.bulk else PUBLISHED / self.file
        if path is None or not path.exists():
            return None
        table = read(path)
        found = (self.reader(raw, cells) for raw, cells in zip(table.raw, table.rows, strict=True))
        return [measured for measured in found if measured]


def figure(raw: Raw, name: str) -> float | None:
    return float(raw[name]) if raw.get(name) else None


def llm_foundry(raw: Raw, cells: dict[str, str]) -> Measured:
    """MPT under FSDP1: GELU, biases, learned positions, tied head; `num_params` agrees with that."""
    found = job({**cells, "framework": "llm-foundry", "optimizer": "adamw"})
    case, seq, gpus = found.case, found.case.seq, int(found.case.world)
    small = "40GB" in case.gpu.name
    suspect = ""
    if cells["model"] == "mpt-1b" and gpus == 32 and small:
        suspect = "noise"
    if (cells["model"] == "mpt-30b" and gpus == 8 and seq == 8192) or (cells["model"] == "mpt-70b" and small):
        suspect = "near the end of memory"
    tokens = float(raw["tokens_per_s"])
    group = case.gpu.name.split("-")[0]
    return Measured("llm-foundry", found, group, float(case.tokens_per_step) / tokens, suspect=suspect)


def megatron(raw: Raw, cells: dict[str, str]) -> Measured | None:
    """Three generations: 2020 and 2021 (no flash attention, full recompute) and Megatron-Core on H100.

    Where only TFLOP/s are printed, the paper's own formula gives the time back.
    """
    table = raw["table"]
    if table.startswith("Korthikanti"):
        return None  # MFU of the runs whose times are a source of their own
    cells = {**cells, "optimizer": "adamw"}
    if "H100" in table:
        # Its README has pipeline messages overlapped, which Megatron does only where stages are interleaved.
        cells |= {"framework": "megatron-core", "precision": "bf16", "schedule": "interleaved"}
        group, inferred = "Megatron-Core H100", False
    else:
        cells |= {"framework": "megatron 2021", "recompute": "full", "precision": "fp16", "sp": "no"}
        cells |= {} if raw["zero"] else {"zero": "0"}
        group = table.split(" (")[0].replace("Narayanan2021", "2021").replace("Megatron-LM ", "")
        inferred = "README" in table
    if "Table 1" not in table and "H100" not in table:
        cells["schedule"] = "1f1b" if "README" in table else "interleaved"
    if "2020" in table:
        cells["seq_len"] = "1024"  # what the printed TFLOP/s and seconds give together
    if "GPT-3 example" in table:
        cells |= {"model": "gpt3-175b", "tp": "8", "pp": "16"}
    found = job(cells)
    if "H100" in table:  # its loss was fused only on demand
        plain = replace(found.case.software, loss="plain")
        found = replace(found, case=found.case.replace(software=plain))
    seconds = figure(raw, "iter_time_s") or figure(raw, "iter_time_s_derived")
    if not seconds:
        tflops = figure(raw, "tflops_per_gpu")
        if not tflops:
            return None
        flops = printed_flops(found.case, recompute="H100" not in table)
        seconds = flops / (tflops * 1e12 * float(found.case.world))
    if raw["zero"]:
        group += " ZeRO-3"
    return Measured("megatron", found, group, seconds, inferred=inferred)


def printed_flops(case: Case, recompute: bool) -> float:
    """Narayanan et al.: 96·B·s·l·h²·(1 + s/6h + V/16lh) with recompute; 72·B·s·l·h²·(1 + s/6h + V/12lh) without."""
    model, seq = case.model, case.seq
    factor, head = (96, 16) if recompute else (72, 12)
    whole = factor * float(case.global_batch) * seq * model.layers * model.hidden**2
    return whole * (1 + seq / (6 * model.hidden) + model.vocab / (head * model.layers * model.hidden))


def korthikanti(raw: Raw, cells: dict[str, str]) -> Measured:
    """Times are measured (Table 5); memory is the paper's formula, without embeddings."""
    cells = {**cells, "framework": "megatron 2022", "precision": "fp16", "optimizer": "adamw", "vocab": "51200"}
    cells |= {"schedule": "interleaved" if int(raw["interleave"]) > 1 else "1f1b"}
    found = job(cells, f"{raw['model']} {raw['mode']}")
    seconds = figure(raw, "iter_time_s")
    if seconds:
        return Measured("korthikanti", found, "Table 5", seconds)
    bare = found.case.replace(model=found.case.model.replace(vocab=8, positions="none"))
    found = replace(found, case=bare)
    part = figure(raw, "activations_pct_of_none")
    if part:
        whole = bare.replace(recompute="none", sp=False)
        return Measured("korthikanti", found, "Fig 7", activations=part / 100, share_of=whole)
    held = GIB * float(raw["activations_gib"]), GIB * float(raw["weights_opt_gib"])
    return Measured("korthikanti", found, "Fig 1", activations=held[0], states=held[1])


def torchtitan(raw: Raw, cells: dict[str, str]) -> Measured:
    """Two generations of the code. A local batch under a pipeline is cut into as many micro-batches as stages."""
    cells = {**cells, "framework": "torchtitan", "optimizer": "adamw", "sp": "yes"}
    cells.setdefault("precision", "fp8" if "float8" in raw["technique"] else "bf16")
    found = job(cells, f"{raw['model']} {raw['n_gpus']} GPUs {raw['technique']} seq {raw['seq_len']}")
    tokens = float(raw["tps_per_gpu"]) * float(found.case.world)
    memory = figure(raw, "memory_gib")
    year = re.search(r"2025", raw["table"])
    return Measured(
        "torchtitan",
        found,
        "2025" if year else "2024",
        float(found.case.tokens_per_step) / tokens,
        reserved=memory * GIB if memory else None,
    )


# Rows of Megatron-Bridge whose layout is not that of the release's recipe (scripts/performance, at its tag) but, to the
# letter, that of the release before or after.
STALE = {
    ("25.11", "Qwen3_30B_a3B", "H100"): "the recipe has micro-batches of one sequence, and 12 stages a rank",
    ("25.11", "GPT OSS 120B", "B200"): "the recipe has ep = 64",
    ("25.11", "GPT OSS 120B", "H100"): "the recipe has micro-batches of one sequence",
    ("26.02.01", "Qwen3_30B_a3B", "H100"): "the recipe has ep = 16 and no pipeline",
}


def nemo(raw: Raw, cells: dict[str, str]) -> Measured | None:
    """NeMo and Megatron-Bridge: one code base on the same machines, in two tables. Neither says what is recomputed."""
    tokens = figure(raw, "tokens_per_s_per_gpu")
    if not tokens or "lora" in f"{raw['phase']} {raw.get('task', '')}".lower():
        return None
    found = job({**cells, "framework": "nemo", "optimizer": "adamw", "sp": "yes", "recompute": "none"})
    case = found.case
    kind = "experts" if case.model.experts else case.dtype
    seconds = float(case.tokens_per_step) / (tokens * float(case.world))
    suspect = STALE.get((raw["release"].split()[0], raw["model"], case.gpu.name.split("-")[0]), "")
    return Measured("", found, f"{kind} {case.gpu.name.split('-')[0]}", seconds, suspect=suspect)


def bigscience(raw: Raw, cells: dict[str, str]) -> Measured:
    """Layout trials for BLOOM, Megatron-DeepSpeed on A100; their sizes tell a vocabulary of 250,000."""
    found = job({**cells, "optimizer": "adamw"})
    held = re.match(r"(\d+)GB", raw["mem"])
    return Measured(
        "bigscience",
        found,
        "",
        float(raw["sec_per_it"]),
        in_use=float(held[1]) * 1e9 if held else None,
        inferred=not raw["layers"],
    )


def simumax(raw: Raw, cells: dict[str, str]) -> Measured | None:
    """Dense rows only: the ranks of MLA's projections are not given."""
    if raw["experts"]:
        return None
    found = job({**cells, "sp": "yes", "optimizer": "adamw", "schedule": "1f1b"})
    return Measured(
        "simumax",
        found,
        "dense",
        float(raw["step_ms_measured"]) / 1e3,
        allocated=fullest(raw["max_allocated_mb_by_rank"]),
        reserved=fullest(raw["max_reserved_mb_by_rank"]),
    )


def fullest(megabytes: str) -> float:
    return max(float(part) for part in megabytes.split(";")) * 2**20


def vtrain(raw: Raw, cells: dict[str, str]) -> Measured:
    """Recompute is in the simulator's configuration, hardly in the run: with it the slope over layers would be 209
    TFLOP/s for matrices 1024 wide, without it 157."""
    cells = {**cells, "recompute": "none", "precision": "fp16", "optimizer": "adamw", "sp": "no", "zero": "0"}
    name = f"h{raw['hidden']} l{raw['layers']} tp{raw['tp']} dp{raw['dp']} pp{raw['pp']} mb{raw['micro_batch']}"
    found = job(cells, f"{name} gb{raw['global_batch']}")
    found = replace(found, unknown=("recompute",), others={"recompute": (found.case.replace(recompute="full"),)})
    return Measured("vtrain", found, "", float(raw["iter_time_ms_measured"]) / 1e3)


def own(raw: Raw, cells: dict[str, str]) -> Measured:
    """Our trainer on one H200, as `benchmarks/plan_check.py` writes it down.

    `run` is a spec as the command line takes it, `loss` and `clips` say which code it ran on, and `blocks` how many
    recomputed in which way where a budget asked for it.
    """
    preset, *words = raw["run"].split()
    spec = load_run(preset, words)
    host = float(raw["launch_us"]) * 1e-6 / REFERENCE_LAUNCH_S
    mixed = []
    for policy, count in blocks_of(raw["blocks"], spec).items():
        alike = spec.replace(parallel=spec.parallel.replace(recompute=policy, recompute_budget=0.0))
        case = Case.of(alike, catalogue()[cells["gpu"]])
        ran = as_measured(case.software, raw["loss"], int(raw["clips"]))
        mixed.append((count / spec.model.layers, case.replace(host=host, software=ran)))
    if spec.precision.weights == "bf16":
        group = "bf16 weights"
    else:
        group = "compiled" if spec.parallel.compile else "eager"
    return Measured(
        "lmworks",
        Job(mixed[0][1], raw["run"]),
        group,
        figure(raw, "step_s"),
        allocated=None if spec.precision.fp8_head else figure(raw, "allocated_bytes"),  # it kept others in bf16
        mixed=tuple(mixed) if len(mixed) > 1 else (),
    )


def blocks_of(text: str, spec: RunSpec) -> dict[str, int]:
    """ "selective=6": so many of the blocks, and the others keep everything; nothing: as the spec has it for all."""
    if not text:
        return {spec.parallel.recompute: spec.model.layers}
    named = {policy: int(count) for policy, count in (word.split("=") for word in text.split())}
    rest = spec.model.layers - sum(named.values())
    return {**named, **({"none": rest} if rest else {})}


SOURCES = {
    source.name: source
    for source in (
        Source("llm-foundry", "llm_foundry.csv", llm_foundry, compare="tokens_per_s"),
        Source("megatron", "megatron.csv", megatron, note="rows whose layout or length is inferred are apart"),
        Source("korthikanti", "korthikanti.csv", korthikanti, note="memory is the paper's formula"),
        Source("torchtitan", "torchtitan.csv", torchtitan, compare="tokens_per_s", note="memory is reserved"),
        Source("lmworks", "lmworks_h200.csv", own, note="our own runs; memory is the closed form"),
        Source("nemo", "nemo.csv", nemo, fitted=False),
        Source("megatron-bridge", "megatron_bridge.csv", nemo, fitted=False),
        Source("bigscience", "bigscience.csv", bigscience, fitted=False, note="memory is that of the GPU in use"),
        Source("simumax", "simumax_b200_measured.csv", simumax, bulk=True, note="12 MLA rows of 43 are not covered"),
        Source("vtrain", "vtrain_measured_single.csv", vtrain, bulk=True),
    )
}


def source_named(name: str) -> Source:
    if name not in SOURCES:
        raise SpecError(f"source = {name!r} is not known{did_you_mean(name, SOURCES)}")
    return SOURCES[name]
