"""A GRPO round by phase, beside the same round with transformers' `generate` and a padded update, as TRL does it.

Random weights; 256 prompts × 4 answers whose lengths are long-tailed (log-normal, mean about 256, at most 512), the
same lists for both. Ours: the engine over the trained weights, packed rows, split-master bf16. Theirs: bf16 weights,
SDPA, one `generate` of all answers (or of a quarter at a time, whichever is faster), per-row stops, gradient
checkpointing, logits of completions only, fused AdamW. TRL itself is not called: it adds work, and takes none away.

    python benchmarks/grpo_round.py --save                                              # llama3-1b, on a GPU
    python benchmarks/grpo_round.py --model tiny --prompts 4 --max-tokens 16 --rounds 1 # on a CPU, to try it
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
import torch.nn.functional as F
from common import write_result
from transformers import LlamaConfig, LlamaForCausalLM, StoppingCriteria, StoppingCriteriaList

from lmworks.align.online_trainer import OnlineTrainer
from lmworks.align.rollout_engine import Completion
from lmworks.engine.core.request import Request
from lmworks.engine.core.sampling_params import SamplingParams
from lmworks.plan.flops import model_flops_per_token
from lmworks.spec import ModelSpec, RunSpec

SAMPLES, PROMPT_TOKENS = 4, 100
REWARD = "def parity(completions, **_):\n    return [float(len(one) % 2) for one in completions]\n"


def answer_lengths(count: int, most: int) -> list[int]:
    draw = np.random.default_rng(0).lognormal(np.log(most / 2.35), 0.6, count)
    return np.clip(draw, most // 32, most).astype(int).tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama3-1b")
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer-batches", type=int, nargs="*", default=[1024, 256])
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    lengths = answer_lengths(options.prompts * SAMPLES, options.max_tokens)
    print(f"{len(lengths)} answers, {np.mean(lengths):.0f} tokens on average, {sum(lengths):,} in all", flush=True)
    ours = measure_ours(options, lengths)
    print(json.dumps(ours, indent=1), flush=True)
    torch.cuda.empty_cache()
    peer = measure_peer(options, lengths)
    print(json.dumps(peer, indent=1), flush=True)
    ratios = {
        "generate": peer["generate_s"] / ours["generate_s"],
        "update": peer["update_s"] / ours["update_s"],
        "round": peer["round_s"] / ours["round_s"],
        "sleep_wake_hand_over_share": (ours["sleep_wake_s"] + ours["hand_over_s"]) / ours["round_s"],
    }
    print(json.dumps(ratios, indent=1))
    if options.save:
        result = {"model": options.model, "prompts": options.prompts, "samples": SAMPLES, "tokens": sum(lengths)}
        print(write_result("grpo_round", {**result, "ours": ours, "transformers": peer, "ratios": ratios}))


# --- ours -----------------------------------------------------------------------------------------------------


def measure_ours(options: argparse.Namespace, lengths: list[int]) -> dict[str, Any]:
    cuda = torch.cuda.is_available()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        draw = np.random.default_rng(1)
        letters = np.array(list("abcdefghijklmnopqrstuvwxyz "))
        rows = [{"prompt": "".join(draw.choice(letters, PROMPT_TOKENS))} for _ in range(2 * options.prompts)]
        (root / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (root / "reward.py").write_text(REWARD)
        context = max(2048, PROMPT_TOKENS + options.max_tokens) if cuda else 256
        spec = RunSpec.from_dict({
            "model": {"preset": options.model, "context": context} if cuda else
                     {"preset": options.model, "context": context, "vocab": 258},
            "data": {"path": str(root / "prompts.jsonl"), "tokenizer": "bytes", "seq": context,
                     "micro_batch": 8, "overlong": "refuse"},
            "align": {"method": "grpo", "prompts": options.prompts, "samples": SAMPLES,
                      "max_tokens": options.max_tokens, "rewards": [f"{root / 'reward.py'}:parity"],
                      "engine_memory": 0.5},
            "precision": {"dtype": "bf16", "weights": "bf16"} if cuda else {},
            "optim": {"lr": 1e-6, "steps": 100},
        })  # fmt: skip
        trainer = OnlineTrainer(spec, root / "run", quiet=True, force=True)
        trainer.build()
        engine = trainer.rollout_engine

        def generate(prompts: Any, seeds: Any) -> list[list[Completion]]:
            """Answers of given lengths."""
            requests = [
                Request(list(prompt), SamplingParams(max_tokens=length, ignore_eos=True, logprobs=0, seed=seed + index))
                for (prompt, seed), own in zip(zip(prompts, seeds, strict=True), groups(lengths), strict=True)
                for index, length in enumerate(own)
            ]
            for request in requests:
                engine.engine.add(request)
            results = {delta.request.id: delta.result for delta in engine.engine.run()}
            answers = [results[request.id].answers[0] for request in requests]  # type: ignore[union-attr]
            return groups(
                [Completion(one.token_ids, [x.logprob for x in one.logprobs or ()], one.text, True) for one in answers]
            )

        engine.generate = generate  # type: ignore[method-assign]
        found = []
        for _ in range(options.rounds + 1):  # the first one compiles and captures
            began = time.perf_counter()
            values = trainer.next_step(trainer.rounds)
            values["round_s"] = time.perf_counter() - began
            found.append(values)
            print({key: round(values[key], 3) for key in values if key.endswith("_s")}, flush=True)
        best = min(found[1:] or found, key=lambda one: one["round_s"])
        best["update_s"] = best["forward_backward_s"] + best["optimizer_s"]
        keep = ("round_s", "generate_s", "update_s", "score_s", "sleep_wake_s", "hand_over_s", "hand_over_bytes")
        tokens = sum(lengths) + PROMPT_TOKENS * len(lengths)
        flops = model_flops_per_token(spec.model, PROMPT_TOKENS + int(np.mean(lengths))) * tokens
        result = {key: best[key] for key in keep} | {
            "generate_tokens_per_s": sum(lengths) / best["generate_s"],
            "update_tflops": flops / best["update_s"] / 1e12,
            "sampler_diff": {key: best[f"sampler_diff/{key}"] for key in ("mean", "max")},
            "importance_weight": best["importance_weight/mean"],
            "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if cuda else None,
            "graph_recaptures": engine.engine.metrics.graph_recaptures,
        }
        trainer.rounds.close()
        return result


def groups(flat: list[Any]) -> list[list[Any]]:
    return [flat[i : i + SAMPLES] for i in range(0, len(flat), SAMPLES)]


# --- transformers ----------------------------------------------------------------------------------------------


class StopAtLengths(StoppingCriteria):
    def __init__(self, ends: torch.Tensor) -> None:
        self.ends = ends

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return input_ids.shape[1] >= self.ends


def measure_peer(options: argparse.Namespace, lengths: list[int]) -> dict[str, Any]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape = ModelSpec.from_preset(options.model)
    config = LlamaConfig(
        vocab_size=shape.vocab, hidden_size=shape.hidden, intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
        max_position_embeddings=2048, tie_word_embeddings=shape.tie_embeddings, pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with torch.device(device):
        model = LlamaForCausalLM._from_config(config, attn_implementation="sdpa", dtype=dtype)
    prompts = torch.randint(0, shape.vocab, (options.prompts, PROMPT_TOKENS), device=device)
    prompts = prompts.repeat_interleave(SAMPLES, 0)
    ends = torch.tensor(lengths, device=device) + PROMPT_TOKENS
    generated: dict[int, float] = {}
    for batch in options.peer_batches:
        if batch > len(lengths):
            continue
        try:
            sync(device)
            began = time.perf_counter()
            for i in range(0, len(lengths), batch):
                some = slice(i, i + batch)
                model.generate(
                    prompts[some], attention_mask=torch.ones_like(prompts[some]), do_sample=True, top_k=0,
                    max_new_tokens=max(lengths[some]),
                    stopping_criteria=StoppingCriteriaList([StopAtLengths(ends[some])]),
                )  # fmt: skip
            sync(device)
            generated[batch] = time.perf_counter() - began
            print(f"transformers, batches of {batch}: {generated[batch]:.1f} s", flush=True)
        except torch.OutOfMemoryError:
            print(f"transformers, batches of {batch}: out of memory", flush=True)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    update = min(peer_update(model, shape, prompts, lengths, rows) for rows in (16, 32))
    best = min(generated, key=generated.__getitem__) if generated else 0
    generate_s = generated.get(best, float("nan"))
    return {
        "generate_s": generate_s,
        "generate_batch": best,
        "generate_by_batch": generated,
        "generate_tokens_per_s": sum(lengths) / generate_s,
        "update_s": update,
        "round_s": generate_s + update,
    }


def peer_update(
    model: LlamaForCausalLM, shape: ModelSpec, prompts: torch.Tensor, lengths: list[int], rows: int
) -> float:
    """Forward and backward over padded micro-batches, and the optimizer step; the second time."""
    device = prompts.device
    model.gradient_checkpointing_enable()
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=device.type == "cuda")
    advantages = torch.randn(len(lengths), device=device)
    seconds = 0.0
    for _ in range(2):
        sync(device)
        began = time.perf_counter()
        for i in range(0, len(lengths), rows):
            own = torch.tensor(lengths[i : i + rows], device=device)
            longest = int(own.max())
            answers = torch.randint(0, shape.vocab, (len(own), longest), device=device)
            mask = torch.arange(longest, device=device) < own.unsqueeze(1)
            ids = torch.cat([prompts[i : i + rows], answers], 1)
            whole = torch.cat([torch.ones_like(prompts[i : i + rows]), mask.long()], 1)
            logits = model(input_ids=ids, attention_mask=whole, logits_to_keep=longest + 1).logits[:, :-1]
            logps = -F.cross_entropy(logits.flatten(0, 1), answers.flatten(), reduction="none").view_as(answers)
            ratio = (logps - logps.detach()).exp()
            loss = -(ratio * advantages[i : i + rows].unsqueeze(1) * mask).sum(1) / own
            (loss.sum() / len(lengths)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        sync(device)
        seconds = time.perf_counter() - began
    print(f"transformers, update with micro-batches of {rows}: {seconds:.1f} s", flush=True)
    return seconds


def sync(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
