"""DeepSpeed as an engine behind the same spec: `parallel.engine = "deepspeed"`, ZeRO stages 1 to 3, offload.

DeepSpeed owns the backward pass, the reduction and the step, so this is not a `DataParallel` strategy whose leaves our
optimizer updates. The interface is one step of the loop:

    for i, batch in enumerate(batches):
        with engine.micro_batch(last=i == len(batches) - 1):
            _, loss = engine(batch.tokens, …, reduction="sum")
            engine.backward(loss / tokens_of_the_global_batch)
    norm = engine.step(learning_rate)  # of the whole gradient before clipping; inf: not finite, the step was not taken

DeepSpeed averages over ranks; the loss is multiplied by their number, so that gradients are sums as everywhere here.
Clipping is left to it (`gradient_clipping`): its rule, g · min(1, clip / (norm + 1e-6)), is PyTorch's.

With bf16 or fp16 DeepSpeed holds the weights in that format, with an fp32 copy that the optimizer updates, and runs the
whole network in it. Our own strategies keep fp32 weights and cast for the matrix products alone, so the two agree
closely in fp32 only.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..spec import RunSpec, SpecError

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

MOMENTS = {"adamw": ("exp_avg", "exp_avg_sq"), "sgd": ()}


def config(spec: RunSpec) -> dict[str, Any]:
    """What DeepSpeed is given, as its JSON has it."""
    layout, precision = spec.parallel, spec.precision
    numbers = int(layout.bucket_mb * 2**20) // (4 if precision.reduce == "fp32" else 2)  # DeepSpeed counts elements
    zero: dict[str, Any] = {
        "stage": layout.zero,
        "reduce_bucket_size": numbers,
        "allgather_bucket_size": numbers,
    }
    if layout.offload != "none":
        zero["offload_optimizer"] = {"device": "cpu"}
    if layout.offload == "full":
        zero["offload_param"] = {"device": "cpu"}
    result: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": spec.data.micro_batch,
        "gradient_accumulation_steps": spec.accumulation,
        "gradient_clipping": spec.optim.clip,
        "communication_data_type": precision.reduce,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,  # PyTorch's optimizers: nothing has to be compiled
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 2**31,  # the run has its own progress
    }
    if precision.dtype == "bf16":
        result["bf16"] = {"enabled": True}
    if precision.dtype == "fp16":
        result["fp16"] = {
            "enabled": True,
            "initial_scale_power": int(math.log2(precision.loss_scale)),
            "loss_scale_window": precision.loss_scale_window,
            "hysteresis": 1,  # the scale halves at the first overflow, as ours does
            "min_loss_scale": 1,
        }
    return result


def load_deepspeed(device_type: str) -> Any:
    """The package, set to the run's device; an extra, because it is built from source."""
    os.environ.setdefault("DS_ACCELERATOR", device_type)  # read when it is imported
    try:
        import deepspeed
    except ImportError as error:
        raise SpecError(
            "parallel.engine = 'deepspeed' needs DeepSpeed: pip install --no-build-isolation \"lmworks[deepspeed]\", "
            "or use parallel.engine = 'native'"
        ) from error
    # On CPUs it would compile an all-reduce of its own for several minutes at the first start; gloo has one.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


class DeepSpeedEngine:
    """A model and a PyTorch optimizer over its parameters, handed to DeepSpeed after `init_process_group`.

    It reads LOCAL_RANK, as torchrun sets it.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, spec: RunSpec) -> None:
        self.ds = load_deepspeed(next(model.parameters()).device.type)
        self.stage, self.ranks = spec.parallel.zero, spec.parallel.dp
        self.loss_factor = float(self.ranks)
        self.moments = MOMENTS[spec.optim.optimizer]
        self.engine, self.zero, *_ = self.ds.initialize(model=model, optimizer=optimizer, config=config(spec))
        self.parameters = dict(model.named_parameters())
        self.init_moments()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.engine(*args, **kwargs)

    @contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        self.engine.set_gradient_accumulation_boundary(last)
        yield

    def backward(self, loss: Tensor) -> None:
        """`loss` is this rank's share of the global batch's: gradients then add up over micro-batches and ranks."""
        self.engine.backward(loss * self.loss_factor, scale_wrt_gas=False)

    def step(self, rate: float) -> float:
        """Clip and update; returns the gradient's norm before that, inf where it was not finite and nothing changed."""
        for group in self.zero.param_groups:
            group["lr"] = rate * group["lr_scale"]
        self.engine.step()
        return float(self.engine.get_global_grad_norm())

    @property
    def loss_scale(self) -> float:
        """Of fp16; 1 otherwise."""
        return float(self.zero.loss_scale)

    # --- state by name ------------------------------------------------------------------------------------------------

    def fp32_partitions(self) -> list[Tensor]:
        """This rank's fp32 weights as the inner optimizer knows them: a flat piece for each parameter group."""
        pieces = "fp32_partitioned_groups_flat" if self.stage == 3 else "single_partition_of_fp32_groups"
        return list(getattr(self.zero, pieces))

    def local_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """This rank's weights and moments, on their device."""
        for index, flat in enumerate(self.fp32_partitions()):
            yield f"the weights of parameter group {index}", flat.detach()
            for key in self.moments:
                yield f"{key} of parameter group {index}", self.zero.optimizer.state[flat][key]

    def init_moments(self) -> None:
        """What the first step would start from, so that a checkpoint can be loaded before it."""
        import torch

        if not self.moments:
            return
        for flat in self.fp32_partitions():
            state = {key: torch.zeros_like(flat, requires_grad=False) for key in self.moments}
            state["step"] = torch.zeros((), dtype=torch.float32, device=flat.device)
            self.zero.optimizer.state[flat] = state
        if self.stage < 3:
            self.zero._lazy_init_hp_params_optimizer_state()

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Whole fp32 weights and moments on every rank: {"model": {name}, "optim": {name.exp_avg, name.step, …}}."""
        import torch

        get = self.ds.utils
        model = {name: get.safe_get_full_fp32_param(p).clone() for name, p in self.parameters.items()}
        optim: dict[str, Tensor] = {}
        for name, parameter in self.parameters.items():
            for key in self.moments:
                optim[f"{name}.{key}"] = get.safe_get_full_optimizer_state(parameter, key).clone()
            if self.moments:
                optim[f"{name}.step"] = torch.tensor(self.steps_taken())
        return {"model": model, "optim": optim}

    def steps_taken(self) -> float:
        return float(self.zero.optimizer.state[self.fp32_partitions()[0]]["step"])

    def load(self, state: dict[str, dict[str, Tensor]]) -> None:
        """Load what `state` returned: whole tensors, of which each rank takes its part.

        The weights of another run to start from come without "optim": the moments stay as they are.
        """
        import torch

        moments = self.moments if "optim" in state else ()
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                self.write(parameter, state["model"][name])
                for key in moments:
                    self.write(parameter, state["optim"][f"{name}.{key}"], key)
            if moments:
                taken = next(value for name, value in state["optim"].items() if name.endswith(".step"))
                for flat in self.fp32_partitions():
                    self.zero.optimizer.state[flat]["step"].fill_(float(taken))

    def write(self, parameter: Tensor, value: Tensor, moment: str | None = None) -> None:
        """A whole weight into the optimizer's fp32 pieces and the model, or a whole moment into its pieces."""
        from torch.nn.functional import pad

        put = self.ds.utils
        if self.stage < 3:
            if moment:
                put.safe_set_full_optimizer_state(parameter, value, moment)
                return
            put.safe_set_full_fp32_param(parameter, value)
            parameter.data.copy_(value)
            return
        # Stage 3 holds 1/ranks of each weight, padded; DeepSpeed's own setter of whole values forgets the padding.
        size = parameter.ds_tensor.numel()  # type: ignore[attr-defined]
        flat = value.flatten()
        part = pad(flat, (0, size * self.ranks - flat.numel())).narrow(0, size * self.engine.global_rank, size)
        if moment:
            put.safe_set_local_optimizer_state(parameter, part, moment)
            return
        put.safe_set_local_fp32_param(parameter, part)
        with self.ds.zero.GatheredParameters([parameter], modifier_rank=0):
            parameter.data.copy_(value)
