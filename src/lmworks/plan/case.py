"""One training job as the planner prices it, or many that differ in numbers only.

A number may be a numpy array: the search prices thousands of layouts in one call, with the formulas that price one.
What selects a formula (model, precision, recompute, schedule) is one value per case.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from ..spec import Cluster, Gpu, ModelSpec, RunSpec, SpecError
from .exact.optimizers import optimizer_of
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
    recompute: str = "none"
    recompute_every: Number = 1
    cp_method: str = "ring"  # or "ulysses"
    dtype: str = "bf16"
    optimizer: str = "adamw"
    offload: str = "none"
    offload_activations: Number = 0.0  # GiB of a rank in host memory
    cluster: Cluster = Cluster(gpus_per_node=8)  # GPUs per node, and links
    host: Number = 1.0  # launch time of its host over that of the reference host

    @classmethod
    def of(cls, spec: RunSpec, gpu: Gpu) -> Self:
        """A run of our own trainer on GPUs of this kind."""
        layout = spec.parallel
        if layout.recompute == "budget":
            raise SpecError("parallel.recompute = 'budget' has no closed form; plan with none, selective, mlp or full")
        if layout.strategy == "zero" or layout.engine == "deepspeed":
            zero = layout.zero
        else:
            over = layout.dp_shard * (layout.cp if layout.strategy == "fsdp2" else 1)
            zero = 3 if layout.strategy.startswith("fsdp") and over > 1 else 0
        degrees = {axis: getattr(layout, axis) for axis in ("dp_replicate", "dp_shard", "tp", "cp", "pp", "ep")}
        return cls(
            spec.model,
            gpu,
            software_of(spec),
            spec.data.seq,
            spec.data.micro_batch,
            spec.accumulation,
            **degrees,
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
            cluster=spec.cluster,
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
    def width(self) -> int:
        """Bytes per element of a GEMM operand."""
        return {"fp32": 4, "fp8": 1}.get(self.dtype, 2)

    @property
    def text(self) -> str:
        """The layout of one candidate; degrees of 1 are left out."""
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
        return ", ".join([*words, f"micro-batch {int(self.micro_batch)}"])
