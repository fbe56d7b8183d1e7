"""TRL's side of `online_round.py`: its trainers with transformers' generation, on the same prompts and lengths.

bf16 weights, SDPA, fused AdamW, no activation checkpointing. GRPO (TRL 1.16): one `generate` of all answers and
micro-batches of 16. PPO (TRL 1.12, `trl.experimental.ppo`) keeps the logits of every answer of an optimizer step, so
that its steps are of 128 answers, or of 64 where these do not fit; half of the round is run, after one step to warm up,
and the time doubled. Answers end at the given lengths because `generate` puts an end-of-text there.

    python benchmarks/online_round_trl.py grpo --save
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from common import watched_device_memory
from datasets import Dataset
from online_round import CUDA, SAMPLES, answer_lengths, model_config, parse, save, write_prompts
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
    TrainerCallback,
)

MICRO_BATCH = 16
PAD, EOS, OTHER = 0, 1, 2  # OTHER replaces an end-of-text that comes too early
DTYPE = torch.bfloat16 if CUDA else torch.float32


def main() -> None:
    options = parse(__doc__)
    for method in options.methods:
        with tempfile.TemporaryDirectory() as folder, watched_device_memory() as used:
            found = grpo(options, Path(folder)) if method == "grpo" else ppo(options, Path(folder))
        found["peak_device_gib"] = used.gib
        print(found)
        if options.save:
            save(options, method, "trl", found)


class Clock(TrainerCallback):
    """Seconds of every generation and of every optimizer step with the generation before it."""

    def __init__(self) -> None:
        self.began: list[float] = []
        self.generate: list[float] = []
        self.rounds: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        sync()
        self.rounds.append(time.perf_counter() - self.began[-1])
        print(f"generate {self.generate[-1]:.2f} s of a round of {self.rounds[-1]:.2f} s", flush=True)


class StopAtLengths(StoppingCriteria):
    def __init__(self, ends: torch.Tensor) -> None:
        self.ends = ends

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return input_ids.shape[1] >= self.ends


def end_at_lengths(model: Any, lengths: list[int], clock: Clock) -> None:
    """Make `model.generate` end its answers at these lengths, call after call, and time it."""
    generate = model.generate
    given = 0

    def timed(*arguments: Any, **keywords: Any) -> Any:
        nonlocal given
        prompts = keywords["input_ids"]
        own = [lengths[(given + row) % len(lengths)] for row in range(len(prompts))]
        given += len(prompts)
        ends = torch.tensor(own, device=prompts.device) + prompts.shape[1]
        sync()
        clock.began.append(time.perf_counter())
        stop = StoppingCriteriaList([StopAtLengths(ends)])
        output = generate(*arguments, stopping_criteria=stop, **keywords)
        ids = output if isinstance(output, torch.Tensor) else output.sequences
        positions = torch.arange(ids.shape[1], device=ids.device)
        answers = (positions >= prompts.shape[1]) & (positions < ends.unsqueeze(1) - 1)
        ids[answers & ((ids == EOS) | (ids == PAD))] = OTHER
        ids[torch.arange(len(ids), device=ids.device), ends - 1] = EOS
        sync()
        clock.generate.append(time.perf_counter() - clock.began[-1])
        return output

    model.generate = timed


def grpo(options: argparse.Namespace, root: Path) -> dict[str, Any]:
    from trl import GRPOConfig, GRPOTrainer

    lengths, clock, model = answer_lengths(options), Clock(), make_model(options, AutoModelForCausalLM)
    end_at_lengths(model, lengths, clock)
    micro_batch = min(MICRO_BATCH, len(lengths))
    args = GRPOConfig(
        output_dir=str(root / "grpo"), per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=len(lengths) // micro_batch, num_generations=SAMPLES, max_steps=2,
        max_completion_length=options.max_tokens, **common_arguments(),
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [float(len(one) % 2) for one in completions],
        args=args,
        train_dataset=Dataset.from_json(str(write_prompts(root, options))),
        processing_class=make_tokenizer(),
        callbacks=[clock],
    )
    trainer.train()
    return result(clock, last=1, times=1) | {"generate_batch": len(lengths), "version": "1.16"}


def ppo(options: argparse.Namespace, root: Path) -> dict[str, Any]:
    try:
        return ppo_in_batches(options, root, min(128, options.prompts * SAMPLES // 2))
    except torch.OutOfMemoryError:
        print("batches of 128: out of memory", flush=True)
    torch.cuda.empty_cache()
    return ppo_in_batches(options, root, 64)


def ppo_in_batches(options: argparse.Namespace, root: Path, batch: int) -> dict[str, Any]:
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    lengths, clock = answer_lengths(options), Clock()
    policy, reference = (make_model(options, AutoModelForCausalLM) for _ in range(2))
    reward, critic = (make_model(options, AutoModelForSequenceClassification) for _ in range(2))
    end_at_lengths(policy, lengths, clock)
    micro_batch = min(MICRO_BATCH, batch)
    steps = len(lengths) // 2 // batch
    args = PPOConfig(
        output_dir=str(root / "ppo"), per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=batch // micro_batch, total_episodes=batch * (steps + 1), num_ppo_epochs=1,
        num_mini_batches=1, local_rollout_forward_batch_size=batch, response_length=options.max_tokens,
        stop_token_id=EOS, temperature=1.0, kl_coef=0.15, num_sample_generations=0, **common_arguments(),
    )  # fmt: skip
    tokenizer = make_tokenizer()
    rows = Dataset.from_json(str(write_prompts(root, options)))
    tokens = rows.map(lambda row: {"input_ids": tokenizer(row["prompt"])["input_ids"]}, remove_columns=["prompt"])
    trainer = PPOTrainer(
        args=args, processing_class=tokenizer, model=policy, ref_model=reference, reward_model=reward,
        value_model=critic, train_dataset=tokens, eval_dataset=tokens, callbacks=[clock],
    )  # fmt: skip
    trainer.train()
    return result(clock, last=steps, times=2) | {"generate_batch": batch, "version": "1.12"}


def common_arguments() -> dict[str, Any]:
    return {"bf16": CUDA, "use_cpu": not CUDA, "gradient_checkpointing": False, "learning_rate": 1e-6,
            "report_to": "none", "save_strategy": "no", "logging_steps": 1, "optim": "adamw_torch_fused",
            "disable_tqdm": True}  # fmt: skip


def result(clock: Clock, last: int, times: int) -> dict[str, Any]:
    """Of the last steps, which together are 1/`times` of a round."""
    return {
        "round_s": times * sum(clock.rounds[-last:]),
        "generate_s": times * sum(clock.generate[-last:]),
        "steps": clock.rounds,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if CUDA else None,
    }


def make_model(options: argparse.Namespace, head: Any) -> Any:
    with torch.device("cuda" if CUDA else "cpu"):
        model = head.from_config(model_config(options.model), attn_implementation="sdpa", dtype=DTYPE)
    model.config._name_or_path = "random"
    return model


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Of bytes: the prompts have as many tokens as with our byte tokenizer."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(["<pad>", "<eos>", *alphabet])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )


def sync() -> None:
    if CUDA:
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
