"""Training on one process or many, each with a whole copy of the model (DistributedDataParallel).

    python src/training/ddp_trainer.py --model_size small --max_steps 50
    torchrun --nproc_per_node=2 src/training/ddp_trainer.py --model_size small --max_steps 50

A run leaves a folder: run.json (what was run), metrics.jsonl (one line a step) and its checkpoints.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from models.gpt import GPT, SIZES

from lmworks.learn import unfinished  # noqa: F401 - what is not written yet runs as the reference does


@dataclass
class TrainingArguments:
    model_size: str = "small"
    max_steps: int = 50
    batch_size: int = 0  # sequences of a micro-batch on each rank; 0: 8 on a GPU, 1 on a CPU
    seq_len: int = 0  # 0: 1024 on a GPU, 64 on a CPU (16 for medium)
    grad_accum_steps: int = 1
    learning_rate: float = 3e-4
    min_lr: float = 3e-5
    warmup_steps: int = 10
    weight_decay: float = 0.1
    max_grad_norm: float = 1.0
    mixed_precision: str = "no"  # no, bf16 or fp16 (with a scaled loss: its small gradients would vanish)
    gradient_checkpointing: bool = False
    data: str = ""  # a text file, read as bytes; "": made-up tokens
    output_dir: str = ""  # "": runs/ddp-small-2 and the like, by trainer, size and ranks
    save_every: int = 0  # 0: at the end
    resume: bool = False
    log_every: int = 10
    seed: int = 1234
    wandb: bool = False  # W&B; WANDB_MODE=offline needs no account


class LossScale:
    """For fp16, whose smallest number is 6e-8: the gradient of the loss is `factor` instead of one, so that small
    gradients are numbers too. They are divided by it before they are clipped. Where one has overflowed, the step is
    left out and the factor halved; after 2000 steps without, it is doubled."""

    def __init__(self, model: nn.Module) -> None:
        self.factor, self.good_steps = 2.0**16, 0
        model.register_forward_hook(self.scale)

    def scale(self, _module: nn.Module, _inputs: Any, output: Any) -> Any:
        logits, loss = output
        if loss is not None and loss.requires_grad:
            loss = loss.clone()
            loss.register_hook(lambda gradient: gradient * self.factor)
        return logits, loss

    def divide(self, model: nn.Module) -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= self.factor

    def adapt(self, model: nn.Module, norm: float) -> None:
        """`norm` is that of all ranks together: all leave the same step out, for AdamW skips what has no gradient."""
        if math.isfinite(norm):
            self.good_steps += 1
            if self.good_steps % 2000 == 0:
                self.factor *= 2
            return
        self.factor, self.good_steps = self.factor / 2, 0
        for parameter in model.parameters():
            parameter.grad = None


class DistributedTrainer:
    name: ClassVar[str] = "ddp"

    def __init__(self, args: TrainingArguments) -> None:
        self.args = args
        self.rank, self.world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if torch.cuda.is_available() else (
            torch.device("cpu"))  # fmt: skip
        if self.world_size > 1 and not dist.is_initialized():
            dist.init_process_group("nccl" if self.device.type == "cuda" else "gloo")
        self.fit_to_device()
        torch.manual_seed(args.seed)  # every rank starts from the same weights
        config = SIZES[args.model_size]
        changes = {"gradient_checkpointing": args.gradient_checkpointing}
        self.config = type(config)(**{**vars(config), **changes})
        model = GPT(self.config).to(self.device)
        self.parameter_count = sum(parameter.numel() for parameter in model.parameters())
        self.loss_scale = LossScale(model) if args.mixed_precision == "fp16" else None
        self.model = self.wrap(model)
        self.optimizer = self._setup_optimizer()
        self.step = 0
        self.folder = Path(args.output_dir or f"runs/{self.name}-{args.model_size}-{self.world_size}")

    def fit_to_device(self) -> None:
        """Batch and sequence that were not given; what a CPU gets less of is printed. The model keeps its size."""
        args, cuda = self.args, self.device.type == "cuda"
        sizes = (8, 1024) if cuda else (1, 16 if args.model_size == "medium" else 64)
        reduced = [
            f"{name} {full} → {size}"
            for name, size, full in zip(("batch_size", "seq_len"), sizes, (8, 1024), strict=True)
            if not getattr(args, name) and size < full
        ]
        args.batch_size, args.seq_len = args.batch_size or sizes[0], args.seq_len or sizes[1]
        args.seq_len = min(args.seq_len, SIZES[args.model_size].max_seq_len)
        if reduced and self.rank == 0:
            print(f"no GPU: {', '.join(reduced)}; all parameters are there (--batch_size, --seq_len to choose)")

    def wrap(self, model: GPT) -> nn.Module:
        if self.world_size == 1:
            return model
        return DistributedDataParallel(model, device_ids=[self.device.index] if self.device.type == "cuda" else None)

    def _setup_optimizer(self) -> torch.optim.AdamW:
        """AdamW (β 0.9 and 0.95): matrices and embeddings decay, vectors (norms, biases) do not."""
        # exercise optimizer(self)
        decayed, others = [], []
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                (decayed if parameter.dim() >= 2 else others).append(parameter)
        groups = [
            {"params": decayed, "weight_decay": self.args.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=self.args.learning_rate, betas=(0.9, 0.95))
        # end optimizer

    def get_lr(self, step: int) -> float:
        """The learning rate of step 0, 1, …: linear warm-up over `warmup_steps` (the first step already has a share),
        then a cosine from `learning_rate` to `min_lr`, which is reached at `max_steps` and kept."""
        # exercise lr_schedule(self, step)
        args = self.args
        if step < args.warmup_steps:
            return args.learning_rate * (step + 1) / args.warmup_steps
        if step >= args.max_steps:
            return args.min_lr
        progress = (step - args.warmup_steps) / (args.max_steps - args.warmup_steps)
        return args.min_lr + 0.5 * (1 + math.cos(math.pi * progress)) * (args.learning_rate - args.min_lr)
        # end lr_schedule

    def autocast(self) -> Any:
        """The forward pass in lower precision, where it is asked for."""
        if self.args.mixed_precision == "no":
            return nullcontext()
        kind = torch.bfloat16 if self.args.mixed_precision == "bf16" else torch.float16
        return torch.autocast(self.device.type, kind)

    def without_sync(self) -> Any:
        """Gradients stay on this rank: for every micro-batch of a step but the last."""
        return self.model.no_sync() if self.world_size > 1 else nullcontext()

    def clip_gradients(self) -> float:
        """Scales all gradients so that their norm is at most `max_grad_norm`; the norm before."""
        if self.loss_scale:
            self.loss_scale.divide(self.model)
        norm = self.clip_norm()
        if self.loss_scale:
            self.loss_scale.adapt(self.model, norm)
        return norm

    def clip_norm(self) -> float:
        return float(nn.utils.clip_grad_norm_(self.model.parameters(), self.args.max_grad_norm))

    def train_step(self, micro_batches: list[Tensor]) -> dict[str, float]:
        """One update from `grad_accum_steps` micro-batches of tokens (batch, seq): as one batch of them all would do.

        Passes run under `self.autocast()`; all but the last under `self.without_sync()`, with their backward pass. Clip
        with `self.clip_gradients()`: of shards, FSDP's trainer alone knows the norm, and it inherits this step. Returns
        numbers: the mean loss of the micro-batches, the norm of the gradient before clipping, and the learning rate.
        """
        # exercise train_step(self, micro_batches)
        self.model.train()
        lr = self.get_lr(self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        total = 0.0
        for index, tokens in enumerate(micro_batches):
            last = index == len(micro_batches) - 1
            with nullcontext() if last else self.without_sync():
                with self.autocast():
                    _, loss = self.model(tokens.to(self.device), labels=tokens.to(self.device))
                loss = loss / len(micro_batches)
                loss.backward()
            total += loss.item()
        norm = self.clip_gradients()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return {"loss": total, "grad_norm": norm, "lr": lr}
        # end train_step

    def save_checkpoint(self, path: Path) -> None:
        """Rank 0 writes {"model", "optimizer", "step"}; the model's keys are those of a GPT without any wrapper."""
        # exercise ddp_checkpoint.save(self, path)
        if self.rank == 0:
            model = self.model.module if isinstance(self.model, DistributedDataParallel) else self.model
            state = {"model": model.state_dict(), "optimizer": self.optimizer.state_dict(), "step": self.step}
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save(state, path)
        if self.world_size > 1:
            dist.barrier()
        # end ddp_checkpoint.save

    def load_checkpoint(self, path: Path) -> None:
        """Every rank reads weights, optimizer states and the step, and goes on as if it had never stopped."""
        # exercise ddp_checkpoint.load(self, path)
        state = torch.load(path, map_location=self.device, weights_only=True)
        model = self.model.module if isinstance(self.model, DistributedDataParallel) else self.model
        model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]
        # end ddp_checkpoint.load

    def micro_batches(self, step: int) -> list[Tensor]:
        """Of one step, by its number alone: a run that goes on sees what the uninterrupted one would have."""
        args = self.args
        shape = (args.grad_accum_steps, args.batch_size, args.seq_len)
        drawn = torch.Generator().manual_seed((args.seed << 32) + step * self.world_size + self.rank)
        if not args.data:  # a walk with small steps: something to learn, unlike noise
            start = torch.randint(0, self.config.vocab_size, shape[:2], generator=drawn)[..., None]
            steps = torch.randint(0, 4, shape, generator=drawn).cumsum(-1)
            return list((start + steps) % min(self.config.vocab_size, 1024))
        text = torch.frombuffer(bytearray(Path(args.data).read_bytes()), dtype=torch.uint8)
        starts = torch.randint(0, len(text) - args.seq_len, shape[:2], generator=drawn)[..., None]
        return list(text[starts + torch.arange(args.seq_len)].long())

    def train(self) -> None:
        args = self.args
        last = self.folder / "checkpoint.pt"
        if args.resume and last.exists():
            self.load_checkpoint(last)
        tokens = args.batch_size * args.seq_len * args.grad_accum_steps * self.world_size
        tracker = self.start_log()
        began = time.perf_counter()
        while self.step < args.max_steps:
            figures = self.train_step(self.micro_batches(self.step))
            seconds, began = time.perf_counter() - began, time.perf_counter()
            peak = (
                torch.cuda.max_memory_allocated()
                if self.device.type == "cuda"
                else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            )
            line = {"step": self.step, **figures, "seconds": seconds, "tokens_per_s": tokens / seconds, "memory": peak}
            if self.rank == 0:
                with (self.folder / "metrics.jsonl").open("a") as file:
                    file.write(json.dumps(line) + "\n")
                if tracker:
                    tracker.log(line, step=self.step)
                if self.step % args.log_every == 0 or self.step in (1, args.max_steps):
                    print(
                        f"step {self.step:>5}  loss {line['loss']:.4f}  grad norm {line['grad_norm']:.2f}  "
                        f"lr {line['lr']:.2e}  {line['tokens_per_s']:,.0f} tokens/s  {peak / 2**30:.2f} GiB",
                        flush=True,
                    )
            if self.step == args.max_steps or (args.save_every and self.step % args.save_every == 0):
                self.save_checkpoint(last)
        if self.rank == 0:
            print(f"done: {self.folder}")

    def start_log(self) -> Any:
        if self.rank:
            return None
        self.folder.mkdir(parents=True, exist_ok=True)
        metrics = self.folder / "metrics.jsonl"  # a run that goes on writes the steps after its checkpoint again
        lines = metrics.read_text().splitlines() if metrics.exists() else []
        metrics.write_text("".join(f"{line}\n" for line in lines if json.loads(line)["step"] <= self.step))
        about = {
            "trainer": self.name,
            "world_size": self.world_size,
            "device": self.device.type,
            "parameters": self.parameter_count,
            "resumed_from": self.step,
            **vars(self.args),
        }
        (self.folder / "run.json").write_text(json.dumps(about, indent=2) + "\n")
        if not self.args.wandb:
            return None
        import wandb

        return wandb.init(project="lmworks-learn", dir=self.folder, config=about)


def parse_arguments(kind: type[Any]) -> Any:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    for field in fields(kind):
        if field.type == "bool":
            parser.add_argument(f"--{field.name}", action="store_true")
        else:
            cast = {"int": int, "float": float, "str": str}[str(field.type)]
            choices = sorted(SIZES) if field.name == "model_size" else None
            parser.add_argument(f"--{field.name}", type=cast, default=field.default, choices=choices)
    return kind(**vars(parser.parse_args()))


if __name__ == "__main__":
    DistributedTrainer(parse_arguments(TrainingArguments)).train()
    if dist.is_initialized():
        dist.destroy_process_group()
