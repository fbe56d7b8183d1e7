"""One training job as the planner prices it, or many that differ in numbers only.

A number may be a numpy array: the search prices thousands of layouts in one call, with the formulas that price one.
What selects a formula (model, precision, recompute, schedule) is one value per case.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from ..spec import Cluster, Gpu, Grid, ModelSpec, RunSpec, components
from ..spec.lora import block_adapter_weights
from .exact.optimizers import optimizer_of
from .passes import CROSS_ENTROPY, critic_adapter, head_of, teacher_shape
from .software import Software, software_of

Number = float | NDArray[Any]


@dataclass(frozen=True)
class Case:
    model: ModelSpec
    gpu: Gpu
    software: Software
    seq: int
    micro_batch: Number = 1
    accumulation: Number = 1  # micro-batches of one data-parallel rank in a step
    dp_replicate: Number = 1
    dp_shard: Number = 1
    tp: Number = 1
    cp: Number = 1
    pp: Number = 1
    ep: Number = 1
    virtual: Number = 1  # pipeline stages of one rank
    zero: int = 0  # ZeRO stage over dp_shard: 1 optimizer states, 2 gradients too, 3 parameters too
    reshard: bool = True  # ZeRO-3: gathered parameters are freed between forward and backward pass
    sp: bool = False
    schedule: str = "1f1b"
    # "full", "selective" (GEMMs and attention are saved), "mlp" (attention and its GEMMs), "attention" (core attention)
    # or "budget": block by block, as `policies` says
    recompute: str = "none"
    recompute_every: Number = 1
    policies: tuple[tuple[int, tuple[str, ...]], ...] = ()  # with "budget": (blocks of a stage, the policy of each)
    cp_method: str = "ring"  # or "ulysses"
    dtype: str = "bf16"
    optimizer: str = "adamw"
    offload: str = "none"
    offload_activations: Number = 0.0  # GiB of a rank in host memory
    cluster: Cluster = Cluster(gpus_per_node=8)  # GPUs per node, and links
    host: Number = 1.0  # launch time of its host over that of the reference host
    # Memory of our own trainer only.
    strategy: str = ""  # ddp, zero, fsdp1 or fsdp2 ("": the one with this ZeRO stage)
    sync_each_pass: bool = False  # DDP and FSDP2: gradients are reduced after each micro-batch
    prefetch: int = 1  # FSDP2: blocks that are gathered ahead
    bucket_mb: float = 25.0  # ZeRO: MiB of gradients that are reduced at once
    documents: bool = False  # attention is masked by document
    head: str = CROSS_ENTROPY  # what follows the last norm
    teacher: ModelSpec | None = None  # of distillation
    device: str = "cuda"  # or "cpu", whose kernels save other tensors
    # Low-rank adapters of a block; where there are any, all other weights are frozen.
    adapters: tuple[components.Weight, ...] = ()
    several_adapters: bool = False  # another one over the same base is trained, too: PPO's critic
    frozen_base: str = ""  # format of the frozen weights of linear layers (lora.base)

    @classmethod
    def of(cls, spec: RunSpec, gpu: Gpu | None = None) -> Self:
        """A run of our own trainer on GPUs of this kind; its memory is the same on all kinds."""
        layout, gpu = spec.parallel, gpu or spec.cluster.accelerator or Gpu()
        if layout.strategy == "zero" or layout.engine == "deepspeed":
            zero = layout.zero
        else:
            over = layout.dp_shard * (layout.cp if layout.strategy == "fsdp2" else 1)
            zero = 3 if layout.strategy.startswith("fsdp") and over > 1 else 0
        case = cls(
            spec.model,
            gpu,
            software_of(spec),
            spec.data.seq,
            spec.data.micro_batch * spec.data.rows_per_example,
            spec.accumulation,
            layout.dp_replicate,
            layout.dp_shard,
            layout.tp,
            layout.cp,
            layout.pp,
            layout.ep,
            virtual=layout.virtual_stages,
            zero=zero,
            reshard=layout.reshard,
            sp=layout.sp,
            schedule=layout.schedule,
            recompute=layout.recompute,
            recompute_every=layout.recompute_every,
            cp_method=layout.cp_method,
            dtype=spec.precision.dtype,
            optimizer=optimizer_of(spec),
            offload=layout.offload,
            offload_activations=layout.offload_activations,
            cluster=spec.cluster.filled(spec.parallel.world),
            strategy=layout.strategy,
            sync_each_pass=layout.sync_each_pass,
            prefetch=layout.prefetch,
            bucket_mb=layout.bucket_mb,
            documents=spec.data.has_documents,
        )
        return case.post_trained(spec) if spec.align.method or spec.lora.rank else case

    def post_trained(self, spec: RunSpec) -> Self:
        """With what a post-training method, or adapters, change."""
        return self.replace(
            documents=self.documents or spec.align.online,
            head=head_of(spec, spec.model),
            teacher=teacher_shape(spec),
            adapters=tuple(block_adapter_weights(spec.model, spec.lora, spec.adapters)),
            several_adapters=critic_adapter(spec) is not None,
            frozen_base=spec.lora.base,
        )

    def replace(self, **changes: Any) -> Self:
        return replace(self, **changes)

    def take(self, rows: NDArray[Any] | np.intp) -> Self:
        """The candidates that `rows` (a mask or an index) selects."""
        arrays = {name: value[rows] for name, value in vars(self).items() if isinstance(value, np.ndarray)}
        return replace(self, **arrays)

    @property
    def dp(self) -> Number:
        return self.dp_replicate * self.dp_shard

    @property
    def world(self) -> Number:
        return self.dp * self.tp * self.cp * self.pp

    @property
    def global_batch(self) -> Number:
        return self.micro_batch * self.accumulation * self.dp

    @property
    def tokens(self) -> Number:
        """Of one micro-batch on one rank."""
        return self.micro_batch * self.seq / self.cp

    @property
    def tokens_per_step(self) -> Number:
        return self.global_batch * self.seq

    @property
    def layers(self) -> Number:
        """Of the rank with the most."""
        return np.ceil(self.model.layers / self.pp)

    @property
    def compute_bytes(self) -> int:
        """Bytes per element of an activation, and of a gathered weight of a block."""
        return 4 if self.dtype == "fp32" else 2

    @property
    def expert_tp(self) -> Number:
        """Tensor-parallel ranks that share an expert."""
        return 1 if self.software.whole_experts else self.tp

    @property
    def routed_tokens(self) -> Number:
        """Of one micro-batch, those that one rank sends to experts."""
        return self.tokens / self.tp if self.software.whole_experts and self.sp else self.tokens

    @property
    def expert_copies(self) -> Number:
        """Ranks of a pipeline stage that hold the same experts, and share their gradients."""
        if not self.model.experts:
            return 1
        ranks = self.dp_shard * self.cp if self.zero == 3 else self.dp * self.cp
        return np.maximum(1, ranks * self.tp // self.expert_tp // self.ep)

    @property
    def is_lmworks(self) -> bool:
        """Our own trainer, whose rules are known to the byte."""
        return self.software.name.startswith("lmworks")

    @property
    def grid(self) -> Grid:
        """Of one candidate."""
        sizes = {axis: int(getattr(self, axis)) for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")}
        return Grid(**sizes, experts_over="dp_cp" if self.dp_shard == 1 else "shard")

    @property
    def sharding(self) -> str:
        """Of one candidate, as parallelize.py decides: alone, ddp, zero0, zero1, zero2, fsdp1 or fsdp2 (ZeRO-3 too).

        "alone": nobody else has other data, and nothing has to meet. "zero0" is DDP with a group of its own for
        experts, with gradients that may come in two halves, or of one adapter of several: PyTorch's DDP can do none of
        it. FSDP1 without shards is "ddp", but for its flat parameters.
        """
        kind = self.strategy or ("ddp", "zero", "zero", "fsdp2")[self.zero]
        kind = f"zero{self.zero}" if kind == "zero" else kind
        if self.dp * self.cp == 1 and self.offload != "full":
            return "alone"
        if kind == "ddp" and (self.pp > 1 or self.ep > 1 or self.several_adapters):
            return "zero0"
        return "fsdp2" if kind == "zero3" else kind

    @property
    def text(self) -> str:
        """The layout of one candidate; degrees of 1 are left out, and weights in fp32."""
        words = [f"{axis}={int(getattr(self, axis))}" for axis in ("tp", "cp", "pp", "ep") if getattr(self, axis) > 1]
        if self.dp > 1:
            copies = f"{int(self.dp_replicate)}×" if self.dp_shard > 1 and self.dp_replicate > 1 else ""
            words.append(f"dp={copies}{int(self.dp_shard if self.dp_shard > 1 else self.dp)} ZeRO-{self.zero}")
        if self.pp > 1:
            words.append(self.schedule + (f"×{int(self.virtual)}" if self.virtual > 1 else ""))
        if self.recompute != "none":
            words.append(f"recompute {self.recompute}")
        if self.offload != "none":
            words.append(f"offload {self.offload}")
        if self.offload_activations:
            words.append(f"{self.offload_activations:g} GiB of activations on the host")
        words.append(f"micro-batch {int(self.micro_batch)}")
        if self.software.weights < 4:
            words.append("bf16 weights")
        return ", ".join(words)
