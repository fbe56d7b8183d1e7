"""A run, described once: what the planner predicts, the trainer does, and the report compares."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar, Self, cast

from .align import CONVERSATIONS, DATA_KINDS, PREFERENCES, AlignSpec, check_align
from .errors import SpecError
from .fault_tolerance import CheckpointSpec, FaultSpec, HealthSpec, WatchSpec, check_health
from .fim import FimSpec
from .hardware import Cluster
from .layout import LOOPED, V_SHAPED, check_layout, least_micro_batches
from .lora import DEFAULT_ADAPTER, LoraSpec, check_lora
from .model import ModelSpec
from .precision import PrecisionSpec, check_precision
from .schema import Section, opt
from .stages import changed, check_stages, total_steps

RECOMPUTE = ("none", "selective", "mlp", "full", "budget")
NO_DATA = (
    'data.path = "" names no data: make some with `lmworks data prepare TEXT --out data/mine`, then '
    "data.path=data/mine (or data.path=stdlib:bytes, the embedded corpus, to try it)"
)
SCHEDULES = ("gpipe", "1f1b", "interleaved", "looped-bfs", "interleaved-zero-bubble", "zbv", "dualpipev")


@dataclass(frozen=True)
class DataSpec(Section):
    """Where tokens come from and how many go into a step. Batch sizes count sequences."""

    section: ClassVar[str] = "data"

    path: str = opt(
        "stdlib:bytes",
        "a folder made by `lmworks data prepare`, or stdlib:TOKENIZER for the embedded corpus; post-training: a file "
        "or folder of examples; empty in a plan that names none, which cannot be started",
    )
    mix: dict[str, float] = opt({}, "several such folders with a weight each, instead of path")
    seq: int = opt(128, "tokens in one training sequence", ge=1)
    micro_batch: int = opt(8, "sequences that one rank runs at once", ge=1)
    global_batch: int = opt(0, "sequences in one optimizer step (0: micro_batch × dp, times pp for a pipeline)", ge=0)
    shuffle: bool = opt(True, "visit sequences in a random order, another one each epoch")
    document_mask: bool = opt(False, "attention stays inside a document; a target in the next document is not counted")
    fim: FimSpec = opt(FimSpec, "infilling examples")
    workers: int = opt(0, "processes that read ahead (0: read in the training process)", ge=0)
    verify: bool = opt(True, "compare the shards with their checksums before training")
    kind: str = opt(
        "auto", "what data.path holds (auto: what align.method needs, else tokens)", choices=("auto", *DATA_KINDS)
    )
    tokenizer: str = opt("", "post-training: folder of the tokenizer, or bytes (empty: that of checkpoint.init)")
    chat_template: str = opt("", "post-training: a Jinja file (empty: the template of the tokenizer's folder)")
    val_path: str = opt("", "post-training: held-out examples (empty: a share of data.path)")
    val_fraction: float = opt(0.05, "post-training: share of the examples that is held out", ge=0, lt=1)
    packing: bool = opt(True, "post-training: several examples in a row of data.seq tokens, each attending to itself")
    bad_examples: str = opt("refuse", "what follows an example that cannot be used", choices=("refuse", "skip"))
    overlong: str = opt(
        "refuse", "what follows an example longer than data.seq", choices=("refuse", "skip", "truncate")
    )

    def check(self) -> None:
        for name, weight in self.mix.items():
            if weight <= 0:
                raise SpecError(f"data.mix: the weight of {name!r} is {weight:g}; it must be more than 0")

    @property
    def sources(self) -> dict[str, float]:
        return self.mix or {self.path: 1.0}

    @property
    def named(self) -> bool:
        return bool(self.mix or self.path)

    @property
    def has_documents(self) -> bool:
        """Whether rows hold several documents that do not attend to each other."""
        return self.document_mask or (self.kind == CONVERSATIONS and self.packing)

    @property
    def rows_per_example(self) -> int:
        """Sequences of one example: a pair of answers has two."""
        return 2 if self.kind == PREFERENCES else 1

    @property
    def masks_targets(self) -> bool:
        """Whether some targets are not counted, so that ranks have to add up how many are."""
        return self.document_mask or self.fim.rate > 0 or self.kind != "tokens"

    def check_path_given(self) -> None:
        """Before a run is started, or a job is written that starts it."""
        if not self.named:
            raise SpecError(NO_DATA)


@dataclass(frozen=True)
class OptimSpec(Section):
    """The optimizer and its schedule."""

    section: ClassVar[str] = "optim"

    optimizer: str = opt("adamw", "rule of the update; sgd is plain, without momentum", choices=("adamw", "sgd"))
    steps: int = opt(1000, "optimizer steps in the whole run", ge=1)
    lr: float = opt(3e-4, "peak learning rate", gt=0, le=10)
    schedule: str = opt("cosine", "shape of the learning rate", choices=("cosine", "linear", "wsd", "constant"))
    warmup: int = opt(-1, "steps over which the rate rises from 0 (-1: a tenth of all, at most 100)", ge=-1)
    min_lr_ratio: float = opt(
        0.1, "rate of the last step as a part of the peak (0: it falls to 0 right after it)", ge=0, le=1
    )
    decay_ratio: float = opt(0.2, "wsd: the last part of the run, in which the rate falls", gt=0, le=1)
    beta1: float = opt(0.9, "decay of the mean of gradients", ge=0, lt=1)
    beta2: float = opt(0.95, "decay of the mean of squared gradients", ge=0, lt=1)
    eps: float = opt(1e-8, "added to the root of the second moment", gt=0)
    weight_decay: float = opt(0.1, "decoupled decay, on matrices only", ge=0)
    clip: float = opt(1.0, "largest norm of the whole gradient (0: off)", ge=0)

    def check(self) -> None:
        if self.warmup < 0:
            self.derive("warmup", min(100, self.steps // 10))
        if self.warmup > self.steps:
            raise SpecError(
                f"optim.warmup = {self.warmup} is longer than optim.steps = {self.steps}; "
                f"use at most {self.steps}, e.g. {max(1, self.steps // 10)}"
            )

    @property
    def decay_steps(self) -> int:
        """wsd: the last steps, in which the rate falls."""
        return min(max(1, self.steps - 1 - self.warmup), max(1, round(self.decay_ratio * self.steps)))

    @property
    def steps_at_peak(self) -> int:
        """wsd: the steps before the rate falls, warm-up included: the same for runs that differ in `steps` only."""
        return self.steps - self.decay_steps


@dataclass(frozen=True)
class ParallelSpec(Section):
    """How the model is laid over ranks, and over one rank's memory."""

    section: ClassVar[str] = "parallel"

    dp: int = opt(0, "shorthand: data-parallel ranks, resolved by strategy", ge=0)
    dp_replicate: int = opt(1, "copies of the model (DDP, or the outer part of HSDP)", ge=1)
    dp_shard: int = opt(1, "ranks over which parameters or optimizer states are sharded", ge=1)
    tp: int = opt(1, "tensor-parallel ranks", ge=1)
    sp: bool = opt(False, "sequence-parallel regions between tensor-parallel ones")
    pp: int = opt(1, "pipeline stages", ge=1)
    cp: int = opt(1, "context-parallel ranks", ge=1)
    ep: int = opt(1, "expert-parallel ranks (folded into the data-parallel ones)", ge=1)
    strategy: str = opt("ddp", "what dp means", choices=("ddp", "fsdp1", "fsdp2", "zero"))
    zero: int = opt(0, "ZeRO stage, with strategy = 'zero' or engine = 'deepspeed'", ge=0, le=3)
    engine: str = opt("native", "who runs data parallelism", choices=("native", "deepspeed"))
    offload: str = opt(
        "none",
        "what lives in host memory: optimizer states and the update, or parameters and gradients too",
        choices=("none", "optimizer", "full"),
    )
    cp_method: str = opt(
        "ring", "how attention spans context-parallel ranks: keys travel, or heads do", choices=("ring", "ulysses")
    )
    schedule: str = opt("1f1b", "pipeline schedule", choices=SCHEDULES)
    virtual_stages: int = opt(0, "pipeline stages that one rank holds (0: 1, or 2 where the schedule needs it)", ge=0)
    reshard: bool = opt(True, "FSDP: free gathered parameters after the forward pass")
    prefetch: int = opt(1, "FSDP2: blocks whose parameters are gathered ahead", ge=1)
    bucket_mb: float = opt(25.0, "DDP and ZeRO: MiB of gradients that are reduced at once", gt=0)
    sync_each_pass: bool = opt(
        False, "DDP and FSDP2: reduce gradients after each micro-batch, not after the last: more traffic, less memory"
    )
    comm_priority: str = opt("normal", "CUDA: priority of the streams of collectives", choices=("normal", "high"))
    static_graph: bool = opt(False, "DDP: every step uses the same parameters, which saves its search for unused ones")
    recompute: str = opt("none", "activations computed again in the backward pass", choices=RECOMPUTE)
    recompute_every: int = opt(1, "with recompute = 'full': every how many blocks", ge=1)
    recompute_budget: float = opt(
        0.0, "with recompute = 'budget': GiB of activations a rank may keep (0: what its GPU has left)", ge=0
    )
    offload_activations: float = opt(
        0.0, "GiB of a rank's kept activations that wait in host memory for the backward pass", ge=0
    )
    compile: bool = opt(False, "torch.compile each transformer block")
    async_tp: bool = opt(False, "not supported (async tensor parallelism); only false, which specs of older runs have")

    def check(self) -> None:
        if self.dp:
            axis = "dp_replicate" if self.strategy == "ddp" else "dp_shard"
            if self.dp_replicate * self.dp_shard == 1:
                self.derive(axis, self.dp)
            elif self.dp != self.dp_replicate * self.dp_shard:
                raise SpecError(
                    f"parallel.dp = {self.dp} contradicts parallel.dp_replicate × parallel.dp_shard = "
                    f"{self.dp_replicate} × {self.dp_shard}; give one or the other"
                )
        self.derive("dp", self.dp_replicate * self.dp_shard)
        if self.strategy == "ddp" and self.engine == "native" and self.dp_shard > 1:
            raise SpecError(
                f"parallel.strategy = 'ddp' replicates, but parallel.dp_shard = {self.dp_shard}; "
                "use strategy = 'fsdp2' or dp_replicate"
            )
        if self.zero and self.strategy != "zero" and self.engine != "deepspeed":
            raise SpecError(
                f"parallel.zero = {self.zero} needs parallel.strategy = 'zero' or parallel.engine = 'deepspeed', "
                f"not strategy = '{self.strategy}' with engine = '{self.engine}'"
            )
        plain = self.engine == "native" and self.pp == 1 and self.offload == "none"
        if self.sync_each_pass and not (plain and self.strategy in ("ddp", "fsdp2")):
            raise SpecError(
                "parallel.sync_each_pass = true needs strategy = 'ddp' or 'fsdp2' without pipeline and offload; "
                "ZeRO-2 reduces after each micro-batch anyway"
            )
        if self.async_tp:
            raise SpecError(
                "parallel.async_tp = true is not supported: its gain was never measured, and it was removed; "
                "use parallel.async_tp = false, which computes the same"
            )
        if self.sp and self.tp == 1:
            raise SpecError("parallel.sp = true needs parallel.tp > 1: it splits what tensor parallelism leaves whole")
        if not self.virtual_stages:
            several = self.pp > 1 and self.schedule in (*LOOPED, *V_SHAPED)
            self.derive("virtual_stages", 2 if several else 1)
        if self.virtual_stages > 1 and self.pp == 1:
            raise SpecError(f"parallel.virtual_stages = {self.virtual_stages} needs parallel.pp > 1")

    def to_dict(self) -> dict[str, Any]:
        """Without the shorthand: a written spec says each thing once, so that it can be edited in one place."""
        table = super().to_dict()
        del table["dp"]
        return table

    @property
    def world(self) -> int:
        return self.dp * self.tp * self.pp * self.cp


@dataclass(frozen=True)
class LogSpec(Section):
    section: ClassVar[str] = "log"

    every: int = opt(10, "steps between printed lines where there is no terminal", ge=1)
    eval_every: int = opt(100, "steps between evaluations on held-out data (0: only at the end)", ge=0)
    eval_batches: int = opt(16, "micro-batches in one evaluation (0: all held-out data)", ge=0)
    eval_by_position: bool = opt(False, "after the last step, also the loss by the position of a token in its window")
    suites: list[str] = opt([], "evaluation suites to run while training (`lmworks evals list`, or .toml files)")
    suites_every: int = opt(0, "steps between them (0: only at the end)", ge=0)
    suites_limit: int = opt(32, "problems of each suite (0: all)", ge=0)
    tensorboard: bool = opt(False, "also write TensorBoard events to the run folder")
    wandb: str = opt("off", "also log to Weights & Biases", choices=("off", "offline", "online"))
    project: str = opt("lmworks", "Weights & Biases project")
    profile: list[int] = opt([], "[start, stop]: steps to record as a profiler trace and a memory snapshot")
    profile_ranks: list[int] = opt([0], "ranks that record them")
    profile_stacks: bool = opt(False, "with Python calls, which slows these steps down")
    nvtx: bool = opt(False, "name steps, phases, micro-batches and layers for Nsight Systems")

    def check(self) -> None:
        ordered = len(self.profile) == 2 and 1 <= self.profile[0] <= self.profile[1]
        if self.profile and not ordered:
            raise SpecError(
                f"log.profile = {self.profile} must be [first step, last step], counted from 1, e.g. [10, 12]"
            )


@dataclass(frozen=True)
class RunSpec(Section):
    """One run. `load.load_run` reads it from TOML, `Trainer(spec, run_dir)` does it."""

    name: str = opt("run", "what the run is called")
    seed: int = opt(0, "initial weights and data order follow from it", ge=0, lt=2**63)
    deterministic: bool = opt(False, "only algorithms that repeat bitwise on a GPU, at some cost in speed")
    model: ModelSpec = opt(ModelSpec, "the network")
    data: DataSpec = opt(DataSpec, "the tokens")
    optim: OptimSpec = opt(OptimSpec, "the optimizer")
    parallel: ParallelSpec = opt(ParallelSpec, "the layout")
    precision: PrecisionSpec = opt(PrecisionSpec, "the number formats")
    checkpoint: CheckpointSpec = opt(CheckpointSpec, "what is saved")
    fault: FaultSpec = opt(FaultSpec, "what happens when a process ends")
    health: HealthSpec = opt(HealthSpec, "what is watched in the numbers")
    watch: WatchSpec = opt(WatchSpec, "hangs and slow ranks")
    align: AlignSpec = opt(AlignSpec, "the post-training method")
    lora: LoraSpec = opt(LoraSpec, "low-rank adapters")
    log: LogSpec = opt(LogSpec, "what is recorded")
    cluster: Cluster = opt(Cluster, "the machines")
    stages: list[dict[str, Any]] = opt(
        [], "parts of the run, one after another: each its steps and the keys in which it differs from the spec"
    )

    def check(self) -> None:
        if not self.name or self.name in (".", "..") or set(self.name) & set("/\\"):
            raise SpecError(f"name = {self.name!r} cannot name a folder: use a word without slashes, e.g. 'run'")
        if self.stages:
            self.set_steps_of_stages()
        data, dp = self.data, self.parallel.dp
        if data.seq > self.model.context:
            raise SpecError(
                f"data.seq = {data.seq} is longer than model.context = {self.model.context}; "
                f"lower data.seq or raise model.context"
            )
        per_pass = data.micro_batch * dp
        if not data.global_batch and self.align.online:  # one optimizer step a round
            self.derive("data", data.with_derived("global_batch", self.align.answers))
        elif not data.global_batch:
            self.derive("data", data.with_derived("global_batch", per_pass * least_micro_batches(self.parallel)))
        elif (
            data.global_batch % per_pass and not self.align.online
        ):  # which packs answers into as many rows as it takes
            below = data.global_batch // per_pass * per_pass
            fits = f"{below} or {below + per_pass}" if below else f"{per_pass}"
            raise SpecError(
                f"data.global_batch = {data.global_batch} is not divisible by data.micro_batch × data-parallel ranks = "
                f"{data.micro_batch} × {dp} = {per_pass}; {fits} would fit"
            )
        check_align(self)
        if (kind := self.model.rope_scaling.type) in ("dynamic", "longrope") and self.parallel.cp > 1:
            raise SpecError(
                f"model.rope_scaling.type = '{kind}' goes by the longest position, of which a context-parallel rank "
                "has only its part; use 'ntk' with the factor for data.seq, or 'yarn'"
            )
        if self.data.fim.rate and self.data.kind != "tokens":
            raise SpecError(
                f"data.fim.rate = {self.data.fim.rate:g} needs data.kind = 'tokens', not {self.data.kind!r}"
            )
        check_layout(self)
        check_precision(self)
        check_lora(self)
        check_health(self)
        self.check_profile()
        self.check_by_position()
        if self.stages:
            check_stages(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """With the steps of its stages, before keys that are compared with optim.steps are looked at."""
        total = total_steps(data.get("stages")) if isinstance(data, Mapping) else 0
        optim = data.get("optim", {}) if total else None
        if isinstance(optim, Mapping):
            data = {**data, "optim": {"steps": total, **optim}}
        return super().from_dict(data)

    def set_steps_of_stages(self) -> None:
        """optim.steps is the sum of the stages' steps."""
        total = total_steps(self.stages)
        if self.optim.steps not in (total, OptimSpec.steps):
            raise SpecError(
                f"optim.steps = {self.optim.steps}, but the stages have {total} steps; leave optim.steps out"
            )
        self.derive("optim", self.optim.replace(steps=max(1, total)))

    def to_dict(self) -> dict[str, Any]:
        """Stages only where there are any: a spec without reads as it did before there were.

        What a stage may change is not written as it was derived for the last one, but left open where it was open.
        """
        table = super().to_dict()
        if not self.stages:
            del table["stages"]
            return table
        table["data"]["global_batch"] = self.data.given["global_batch"]
        scaling = self.model.rope_scaling
        table["model"]["rope_scaling"]["original_context"] = scaling.given["original_context"]
        return table

    def check_profile(self) -> None:
        """Steps and ranks that there are none of would leave no trace, and no word about it."""
        log, world = self.log, self.parallel.world
        if log.profile and log.profile[0] > self.optim.steps:
            raise SpecError(f"log.profile = {log.profile} begins after the last step: optim.steps = {self.optim.steps}")
        if log.profile and not all(0 <= rank < world for rank in log.profile_ranks):
            there = f"has ranks 0 to {world - 1}" if world > 1 else "has rank 0 alone"
            raise SpecError(f"log.profile_ranks = {log.profile_ranks}: the layout {there}")

    def check_by_position(self) -> None:
        if not self.log.eval_by_position:
            return
        if self.align.method:
            raise SpecError("log.eval_by_position is for pretraining: examples have no positions in common")
        for key in ("tp", "pp", "cp"):
            if getattr(self.parallel, key) > 1:
                raise SpecError(
                    f"log.eval_by_position needs whole rows of whole models, and parallel.{key} = "
                    f"{getattr(self.parallel, key)}; leave it out and use `lmworks eval RUN --by-position` afterwards"
                )

    # --- stages -----------------------------------------------------------------------------------------

    def stage(self, number: int) -> RunSpec:
        """One stage as a spec of its own, which has the steps of the whole run."""
        table = {key: value for key, value in self.stages[number].items() if key != "steps"}
        whole = self.replace(stages=[], optim=self.optim)
        return cast(RunSpec, changed(whole, table))

    def stage_ends(self) -> list[int]:
        """The last step of each stage; without stages, that of the run."""
        return list(accumulate(stage["steps"] for stage in self.stages)) or [self.optim.steps]

    def stage_after(self, step: int) -> int:
        """The stage that goes on after `step` steps; after the last step, the last one."""
        ends = self.stage_ends()
        return min(bisect_right(ends, step), len(ends) - 1)

    def after(self, step: int) -> RunSpec:
        """The spec by which a run with stages goes on after `step` steps."""
        return self.stage(self.stage_after(step)) if self.stages else self

    @property
    def ranks(self) -> int:
        """Processes of a launch: those of the layout and rollout ranks."""
        return self.parallel.world + self.align.rollout_ranks

    @property
    def sampling_ranks(self) -> int:
        """Ranks of an online method that have an engine, or a part of one."""
        return self.align.rollout_ranks or self.parallel.world

    @property
    def accumulation(self) -> int:
        """Micro-batches that one rank runs for one optimizer step."""
        return max(1, self.data.global_batch // (self.data.micro_batch * self.parallel.dp))

    @property
    def adapters(self) -> tuple[str, ...]:
        """The low-rank adapters over the base model; without any, all weights are trained."""
        return (DEFAULT_ADAPTER,) if self.lora.rank else ()

    @property
    def tokens_per_step(self) -> int:
        """Positions of all rows, padding included."""
        return self.data.global_batch * self.data.rows_per_example * self.data.seq
