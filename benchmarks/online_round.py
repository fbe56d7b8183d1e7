"""A round of GRPO or PPO by phase, beside the same round of TRL with transformers' generation.

Random weights; 256 prompts × 4 answers whose lengths are long-tailed (log-normal, mean about 256, at most 512), the
same lists for both. Ours: the engine over the trained weights, packed rows, split-master bf16. PPO has four models of
the same shape. TRL's side is `online_round_trl.py`; run both on one machine, one after the other.

    python benchmarks/online_round.py grpo ppo --save             # llama3-1b, on a GPU
    python benchmarks/online_round_trl.py grpo --save             # with TRL 1.16 installed (ppo: 1.12)
    python benchmarks/online_round.py grpo --model tiny --prompts 4 --max-tokens 16 --rounds 1    # on a CPU, to try it
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import RESULTS, watched_device_memory, write_result

from lmworks.align.online_trainer import OnlineTrainer
from lmworks.align.rollout_engine import Completion, paused_gc
from lmworks.engine.core.engine import Engine
from lmworks.engine.core.request import Request, Result
from lmworks.engine.core.sampling_params import SamplingParams
from lmworks.plan.flops import model_flops_per_token
from lmworks.spec import ModelSpec, RunSpec

SAMPLES, PROMPT_TOKENS = 4, 100
# Part of the GPU in use while the engine answers, packed rows of a forward pass: GRPO in no more memory than TRL takes.
ENGINE_MEMORY = {"grpo": 0.18, "ppo": 0.5}
MICRO_BATCH = {"grpo": 3, "ppo": 8}
REWARD = "def parity(completions, **_):\n    return [float(len(one) % 2) for one in completions]\n"
CUDA = torch.cuda.is_available()


def main() -> None:
    options = parse(__doc__)
    for method in options.methods:
        found = measure(options, method)
        print(json.dumps(found, indent=1))
        if options.save:
            save(options, method, "ours", found)


def parse(doc: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="+", choices=("grpo", "ppo"))
    parser.add_argument("--model", default="llama3-1b")
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--engine-memory", type=float, help=f"align.engine_memory ({ENGINE_MEMORY})")
    parser.add_argument("--micro-batch", type=int, help=f"rows of 2,048 tokens of a forward pass ({MICRO_BATCH})")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    lengths = answer_lengths(options)
    print(f"{len(lengths)} answers, {np.mean(lengths):.0f} tokens on average, {sum(lengths):,} in all", flush=True)
    return options


def answer_lengths(options: argparse.Namespace) -> list[int]:
    most = options.max_tokens
    draw = np.random.default_rng(0).lognormal(np.log(most / 2.35), 0.6, options.prompts * SAMPLES)
    return np.clip(draw, max(2, most // 32), most).astype(int).tolist()


def save(options: argparse.Namespace, method: str, who: str, found: dict[str, Any]) -> None:
    """Into one file, beside what was measured before; ratios where both sides are there."""
    path = RESULTS / "online_round.json"
    result = json.loads(path.read_text()) if path.exists() else {}
    result |= {"model": options.model, "prompts": options.prompts, "samples": SAMPLES,
               "tokens": sum(answer_lengths(options))}  # fmt: skip
    rounds = result.setdefault(method, {})
    rounds[who] = found
    if {"ours", "trl"} <= rounds.keys():
        rounds["ratios"] = {
            key: rounds["trl"][f"{key}_s"] / rounds["ours"][f"{key}_s"] for key in ("generate", "round")
        }
    for stamp in ("date", "commit", "machine"):
        result.pop(stamp, None)
    print(json.dumps({method: rounds}, indent=1), write_result("online_round", result), flush=True)


def model_config(model: str) -> Any:
    """transformers' description of the shape; a vocabulary of bytes on a CPU."""
    from transformers import LlamaConfig

    shape = ModelSpec.from_preset(model)
    return LlamaConfig(
        vocab_size=shape.vocab if CUDA else 258, hidden_size=shape.hidden, intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
        max_position_embeddings=2048, tie_word_embeddings=shape.tie_embeddings, pad_token_id=0, eos_token_id=1,
        bos_token_id=None, num_labels=1,
    )  # fmt: skip


def write_prompts(root: Path, options: argparse.Namespace) -> Path:
    draw = np.random.default_rng(1)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz "))
    rows = [{"prompt": "".join(draw.choice(letters, PROMPT_TOKENS))} for _ in range(2 * options.prompts)]
    path = root / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_reward_model(root: Path, model: str) -> Path:
    from transformers import LlamaForSequenceClassification

    folder = root / "reward-model"
    with torch.device("cuda" if CUDA else "cpu"):
        scorer = LlamaForSequenceClassification._from_config(model_config(model), dtype=torch.bfloat16)
    scorer.save_pretrained(folder)
    return folder


def make_trainer(options: argparse.Namespace, method: str, root: Path) -> OnlineTrainer:
    """Its engine answers with the lengths of `answer_lengths`."""
    (root / "reward.py").write_text(REWARD)
    context = max(2048, PROMPT_TOKENS + options.max_tokens) if CUDA else 256
    scored = (
        {"reward_model": str(write_reward_model(root, options.model)), "kl_target": 0}
        if method == "ppo"
        else {"rewards": [f"{root / 'reward.py'}:parity"]}
    )
    spec = RunSpec.from_dict({
        "model": {"preset": options.model, "context": context, **({} if CUDA else {"vocab": 258})},
        "data": {"path": str(write_prompts(root, options)), "tokenizer": "bytes", "seq": context,
                 "micro_batch": options.micro_batch or MICRO_BATCH[method], "overlong": "refuse"},
        "align": {"method": method, "prompts": options.prompts, "samples": SAMPLES,
                  "max_tokens": options.max_tokens,
                  "engine_memory": options.engine_memory or ENGINE_MEMORY[method], **scored},
        "precision": {"dtype": "bf16", "weights": "bf16"} if CUDA else {},
        "optim": {"lr": 1e-6, "steps": 100},
    })  # fmt: skip
    trainer = OnlineTrainer(spec, root / "run", quiet=True, force=True)
    trainer.build()
    answer_with_lengths(trainer, answer_lengths(options))
    return trainer


def measure(options: argparse.Namespace, method: str) -> dict[str, Any]:
    lengths = answer_lengths(options)
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory() as folder, watched_device_memory() as used:
        trainer = make_trainer(options, method, Path(folder))
        found = []
        for _ in range(options.rounds + 1):  # the first one compiles and captures
            began = time.perf_counter()
            values = trainer.next_step(trainer.rounds)
            values["round_s"] = time.perf_counter() - began
            found.append(values)
            print({key: round(values[key], 3) for key in values if key.endswith("_s")}, flush=True)
        warm = sorted(found[1:] or found, key=lambda one: one["round_s"])
        median = warm[len(warm) // 2]
        median["update_s"] = median["forward_backward_s"] + median["optimizer_s"]
        seconds = {key: value for key, value in median.items() if key.endswith("_s")}
        tokens = sum(lengths) + PROMPT_TOKENS * len(lengths)
        flops = model_flops_per_token(trainer.spec.model, PROMPT_TOKENS + int(np.mean(lengths))) * tokens
        return seconds | {
            "generate_tokens_per_s": sum(lengths) / median["generate_s"],
            "update_tflops": flops / median["update_s"] / 1e12,
            "sampler_diff": {key: median[f"sampler_diff/{key}"] for key in ("mean", "max")},
            "importance_weight": median["importance_weight/mean"],
            "sleep_wake_hand_over_share": (median["sleep_wake_s"] + median["hand_over_s"]) / median["round_s"],
            "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if CUDA else None,  # without the KV cache
            "peak_device_gib": used.gib,
            "engine_memory": trainer.spec.align.engine_memory,
            "micro_batch": trainer.spec.data.micro_batch,
            "kv_cache_tokens": trainer.rollout_engine.runner.blocks * trainer.rollout_engine.runner.spec.block,
            "generate_s_by_round": [one["generate_s"] for one in warm],
            "graph_recaptures": trainer.rollout_engine.engine.metrics.graph_recaptures,
        }


def answer_with_lengths(trainer: OnlineTrainer, lengths: list[int]) -> None:
    """The engine's answers to a round get these lengths."""
    engine = trainer.rollout_engine.engine

    def generate(prompts: Any, seeds: Any) -> list[list[Completion]]:
        return [
            [
                Completion(one.token_ids, [x.logprob for x in one.logprobs or ()], one.text, True)
                for one in found.answers
            ]
            for found in sample_with_lengths(engine, prompts, seeds, lengths)
        ]

    trainer.rollout_engine.generate = generate  # type: ignore[method-assign]


def sample_with_lengths(engine: Engine, prompts: Any, seeds: Any, lengths: list[int]) -> list[Result]:
    """Sample as `RolloutEngine.sample` does; only that each answer has a length of its own."""
    requests = [
        Request(list(prompt), SamplingParams(n=SAMPLES, max_tokens=max(own), ignore_eos=True, logprobs=0, seed=seed))
        for prompt, seed, own in zip(prompts, seeds, groups(lengths), strict=True)
    ]
    for request, own in zip(requests, groups(lengths), strict=True):
        engine.add(request)
        for sequence, length in zip(request.sequences, own, strict=True):
            sequence.limit = len(request.prompt) + length
    with paused_gc():
        results = {delta.request.id: delta.result for delta in engine.run()}
    return [results[request.id] for request in requests]  # type: ignore[misc]


def groups(flat: list[Any]) -> list[list[Any]]:
    return [flat[i : i + SAMPLES] for i in range(0, len(flat), SAMPLES)]


if __name__ == "__main__":
    main()
