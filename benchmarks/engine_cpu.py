"""The engine on a CPU beside transformers' `generate`: the same weights and prompts, turn about, in one run.

python benchmarks/engine_cpu.py    # about ten minutes; writes results/engine_cpu.json

Random weights in fp32, greedy, so that the tokens of both can be compared. A step is what a token more takes: the time
of an answer less that of its first token, over the tokens between. The floor of a step with one sequence is the time in
which this machine reads the weights once. transformers takes the mixed requests as one batch padded to the longest
prompt, which runs until the longest answer is done; only tokens that were asked for count.
"""

from __future__ import annotations

import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from common import write_result

from lmworks import GPT, LLM, ModelSpec, SamplingParams
from lmworks.cli.output import print_table

PROMPT, ANSWER, LONG = 128, 32, 900
REPEATS = 3
BATCHES = {"gpt2-small": (1, 8, 32), "qwen3-0.6b": (1, 8)}
MIXED = 32  # requests, with prompts of 16 to 256 tokens and answers of 16 to 128
Tokens = list[list[int]]
Generate = Callable[[Tokens, Sequence[int]], Tokens]  # prompts and how long their answers are


def ours(folder: str) -> Generate:
    llm = LLM(folder, dtype="fp32", context=1024, device="cpu")

    def generate(prompts: Tokens, counts: Sequence[int]) -> Tokens:
        params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in counts]
        return [result.token_ids for result in llm.generate(prompts, params, progress=False)]

    return generate


def peer(folder: str) -> Generate:
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.inference_mode()
    def generate(prompts: Tokens, counts: Sequence[int]) -> Tokens:
        width, most = max(map(len, prompts)), max(counts)
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        out = model.generate(
            ids, attention_mask=mask, max_new_tokens=most, min_new_tokens=most, do_sample=False, pad_token_id=0
        )
        return [row[width : width + count] for row, count in zip(out.tolist(), counts, strict=True)]

    return generate


def timed(run: Generate, prompts: Tokens, counts: Sequence[int]) -> tuple[float, Tokens]:
    began = time.perf_counter()
    tokens = run(prompts, counts)
    return time.perf_counter() - began, tokens


class Prompts:
    """Never the same one twice: nothing is found in a cache of prefixes."""

    def __init__(self, vocab: int) -> None:
        self.draw, self.vocab = random.Random(0), vocab

    def of(self, *lengths: int) -> Tokens:
        return [[self.draw.randrange(self.vocab) for _ in range(length)] for length in lengths]


def compare(runs: dict[str, Generate], prompts: Callable[[], Tokens], counts: Sequence[int]) -> dict[str, Any]:
    """Seconds of both, and how many of their answers are the same."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    same = 0
    for _ in range(REPEATS):
        given = prompts()
        found = {name: timed(run, given, counts) for name, run in runs.items()}
        for name, (took, _) in found.items():
            seconds[name].append(took)
        same += sum(a == b for a, b in zip(*(tokens for _, tokens in found.values()), strict=True))
    middle = {name: statistics.median(times) for name, times in seconds.items()}
    return {"seconds": middle, "ratio": middle["peer"] / middle["ours"], "same": same, "answers": REPEATS * len(counts)}


def read_rate() -> float:
    """Bytes a second that all cores read."""
    x = torch.ones(2**28)
    x.sum()
    return 4 * len(x) / min(timed_sum(x) for _ in range(5))


def timed_sum(x: torch.Tensor) -> float:
    began = time.perf_counter()
    x.sum()
    return time.perf_counter() - began


def bench(preset: str, rate: float) -> dict[str, Any]:
    spec = ModelSpec.from_preset(preset)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        model = GPT(spec)
        read = 4 * (
            sum(p.numel() for p in model.parameters()) - (0 if spec.tie_embeddings else spec.vocab * spec.hidden)
        )
        model.save_hf(folder)
        del model
        runs = {"ours": ours(folder), "peer": peer(folder)}
    prompts = Prompts(spec.vocab)
    for run in runs.values():
        run(prompts.of(PROMPT), [2])
    result: dict[str, Any] = {"floor_ms": 1e3 * read / rate, "steps": {}}
    for batch in BATCHES[preset]:
        first = compare(runs, lambda batch=batch: prompts.of(*[PROMPT] * batch), [1] * batch)
        whole = compare(runs, lambda batch=batch: prompts.of(*[PROMPT] * batch), [ANSWER] * batch)
        step = {name: 1e3 * (whole["seconds"][name] - first["seconds"][name]) / (ANSWER - 1) for name in runs}
        result["steps"][batch] = {"step_ms": step, "ratio": step["peer"] / step["ours"], "first": first, "whole": whole}
    result["long"] = compare(runs, lambda: prompts.of(LONG), [1])
    if preset == "gpt2-small":
        draw = random.Random(1)
        lengths = [draw.randint(16, 256) for _ in range(MIXED)]
        counts = [draw.randint(16, 128) for _ in range(MIXED)]
        mixed = compare(runs, lambda: prompts.of(*lengths), counts)
        result["mixed"] = {**mixed, "output_tokens_per_s": {k: sum(counts) / s for k, s in mixed["seconds"].items()}}
    return result


def rows(preset: str, result: dict[str, Any]) -> list[list[str]]:
    def row(what: str, mine: str, theirs: str, ratio: float, equal: dict[str, Any], floor: str = "") -> list[str]:
        return [preset, what, mine, theirs, f"{ratio:.2f}", floor, f"{equal['same']}/{equal['answers']}"]

    table = []
    for batch, at in result["steps"].items():
        floor = f"{result['floor_ms']:.0f} ms" if batch == 1 else ""
        mine, theirs = (f"{at['step_ms'][name]:.1f} ms" for name in ("ours", "peer"))
        table.append(row(f"a step of {batch}", mine, theirs, at["ratio"], at["whole"], floor))
    long = result["long"]
    mine, theirs = (f"{long['seconds'][name]:.2f} s" for name in ("ours", "peer"))
    table.append(row(f"first token after {LONG}", mine, theirs, long["ratio"], long))
    if "mixed" in result:
        mixed = result["mixed"]
        mine, theirs = (f"{mixed['output_tokens_per_s'][name]:.0f} tokens/s" for name in ("ours", "peer"))
        table.append(row(f"{MIXED} mixed requests", mine, theirs, mixed["ratio"], mixed))
    return table


def main() -> None:
    rate = read_rate()
    results: dict[str, Any] = {"peer": "transformers generate, fp32", "read_bytes_per_s": rate, "models": {}}
    table = []
    for preset in BATCHES:
        results["models"][preset] = bench(preset, rate)
        table += rows(preset, results["models"][preset])
        write_result("engine_cpu", results)
    columns = ["model", "what", "LMWorks", "transformers", "ratio", "floor", "same answers"]
    print_table(f"This CPU reads {rate / 1e9:.1f} GB/s", columns, table)


if __name__ == "__main__":
    main()
