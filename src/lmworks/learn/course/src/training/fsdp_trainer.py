"""Training with weights, gradients and optimizer states sharded over the ranks (FullyShardedDataParallel).

torchrun --nproc_per_node=2 src/training/fsdp_trainer.py --model_size medium --max_steps 50
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from models.gpt import GPT, RMSNorm, TransformerBlock
from training.ddp_trainer import DistributedTrainer, TrainingArguments, parse_arguments

from lmworks.learn import unfinished  # noqa: F401 - what is not written yet runs as the reference does

warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")  # that FSDP2 follows


@dataclass
class FSDPArguments(TrainingArguments):
    model_size: str = "medium"
    sharding_strategy: str = "full_shard"  # full_shard, shard_grad_op, no_shard or hybrid_shard


class FSDPTrainer(DistributedTrainer):
    name: ClassVar[str] = "fsdp"
    args: FSDPArguments

    def wrap(self, model: GPT) -> nn.Module:
        if not dist.is_initialized():
            raise SystemExit("FSDP shards over ranks: start it with torchrun --nproc_per_node=2 …")
        if self.args.mixed_precision != "no":
            compute_norms_in_fp32(model)
        return FullyShardedDataParallel(
            model,
            sharding_strategy=self._get_sharding_strategy(),
            mixed_precision=self._get_mixed_precision_policy(),
            auto_wrap_policy=self._get_fsdp_policy(),
            device_id=self.device,
            use_orig_params=True,  # the optimizer sees the model's own parameters, by name
        )

    def _setup_optimizer(self) -> torch.optim.AdamW:
        """As in exercise 8, by names: of a sharded matrix a rank holds a run of numbers, which is a vector."""
        vectors = {name for name, parameter in meta_model(self.config).named_parameters() if parameter.dim() < 2}
        named = {name.replace("_fsdp_wrapped_module.", ""): one for name, one in self.model.named_parameters()}
        groups = [
            {"params": [one for name, one in named.items() if (name in vectors) == vector], "weight_decay": decay}
            for vector, decay in ((False, self.args.weight_decay), (True, 0.0))
        ]
        return torch.optim.AdamW(groups, lr=self.args.learning_rate, betas=(0.9, 0.95), fused=True)

    def autocast(self) -> Any:
        return torch.autocast(self.device.type, enabled=False)  # the policy casts already

    def clip_norm(self) -> float:
        return float(self.model.clip_grad_norm_(self.args.max_grad_norm))  # of shards: only FSDP knows the whole norm

    def _get_sharding_strategy(self) -> ShardingStrategy:
        """By its name in `args.sharding_strategy`; a name that is none of the four is an error that lists them."""
        # exercise sharding_strategy(self)
        strategies = {
            "full_shard": ShardingStrategy.FULL_SHARD,  # ZeRO-3: weights, gradients, optimizer states
            "shard_grad_op": ShardingStrategy.SHARD_GRAD_OP,  # ZeRO-2: gradients, optimizer states
            "no_shard": ShardingStrategy.NO_SHARD,  # as DDP
            "hybrid_shard": ShardingStrategy.HYBRID_SHARD,  # ZeRO-3 within a node, copies across nodes
        }
        if self.args.sharding_strategy not in strategies:
            raise ValueError(f"sharding_strategy {self.args.sharding_strategy!r}: one of {', '.join(strategies)}")
        return strategies[self.args.sharding_strategy]
        # end sharding_strategy

    def _get_mixed_precision_policy(self) -> MixedPrecision | None:
        """bf16 or fp16 for weights, gradient reduction and buffers, by `args.mixed_precision`; None: fp32."""
        # exercise mixed_precision(self)
        if self.args.mixed_precision == "bf16":
            kind = torch.bfloat16
        elif self.args.mixed_precision == "fp16":
            kind = torch.float16
        else:
            return None
        return MixedPrecision(param_dtype=kind, reduce_dtype=kind, buffer_dtype=kind)
        # end mixed_precision

    def _get_fsdp_policy(self) -> Callable[..., bool]:
        """What is a unit of its own, gathered and freed as one: each TransformerBlock."""
        # exercise fsdp_policy(self)
        return functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={TransformerBlock})
        # end fsdp_policy

    def save_checkpoint(self, path: Path) -> None:
        """One file of the whole model: all ranks gather weights and optimizer states, rank 0 alone writes them.

        The same keys as without FSDP. On a CPU both configurations need `offload_to_cpu=False`, said explicitly: the
        one of the optimizer's states has True by default, and PyTorch's offloading from a CPU to itself breaks.
        """
        # exercise fsdp_checkpoint(self, path)
        offload = self.device.type == "cuda"
        weights = FullStateDictConfig(offload_to_cpu=offload, rank0_only=True)
        states = FullOptimStateDictConfig(offload_to_cpu=offload, rank0_only=True)
        with FullyShardedDataParallel.state_dict_type(self.model, StateDictType.FULL_STATE_DICT, weights, states):
            model = self.model.state_dict()
            optimizer = FullyShardedDataParallel.optim_state_dict(self.model, self.optimizer)
        if self.rank == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save({"model": model, "optimizer": optimizer, "step": self.step}, path)
        dist.barrier()
        # end fsdp_checkpoint

    def load_checkpoint(self, path: Path) -> None:
        state = torch.load(path, map_location="cpu", weights_only=True)
        with FullyShardedDataParallel.state_dict_type(
            self.model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(), FullOptimStateDictConfig()
        ):
            self.model.load_state_dict(state["model"])
            shards = FullyShardedDataParallel.optim_state_dict_to_load(self.model, self.optimizer, state["optimizer"])
        self.optimizer.load_state_dict(shards)
        self.step = state["step"]


def compute_norms_in_fp32(model: GPT) -> None:
    """Of 1/√(mean(x²)) the backward pass takes the cube, which is beyond fp16's 65,504 at once."""
    for module in model.modules():
        if isinstance(module, RMSNorm):
            module.register_forward_pre_hook(lambda _module, inputs: inputs[0].float())
            module.register_forward_hook(lambda module, _inputs, output: output.to(module.weight.dtype))


def meta_model(config: Any) -> GPT:
    """Names and shapes alone."""
    with torch.device("meta"):
        return GPT(config)


if __name__ == "__main__":
    FSDPTrainer(parse_arguments(FSDPArguments)).train()
    if dist.is_initialized():
        dist.destroy_process_group()
