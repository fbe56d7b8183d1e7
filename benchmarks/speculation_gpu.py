"""What a step with guesses costs, and from which acceptance on it pays.

Random weights say nothing about how often a guess is right, but the time of a step does not depend on it. So three
steps are timed at each batch: a plain one, one that judges k guesses which cost nothing to make (as n-grams do), and
one whose guesses a draft model makes. With acceptance a, a step brings (1 − aᵏ⁺¹) / (1 − a) tokens, and the table says
what that comes to. The formula is checked at a = 1, with guesses that are the answers themselves: those of steps that
judge, for a plain step rounds otherwise, and random weights soon pick another token for it. The row says how many of
its guesses were accepted.

    python benchmarks/speculation_gpu.py                      # llama3-8b, guesses by llama3-1b
    python benchmarks/speculation_gpu.py --table
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from dataclasses import replace
from typing import Any

import torch
from common import RESULTS, write_result

from lmworks.engine.core.engine import Engine
from lmworks.engine.core.request import Request, Sequence
from lmworks.engine.core.sampling_params import SamplingParams
from lmworks.engine.speculative.verification import Speculator
from lmworks.loading import load, make_engine
from lmworks.spec import EngineSpec

NAME = "speculation_gpu"
BATCHES = (1, 8, 32)
GUESSES = 4
TOKENS = 200
ACCEPTANCE = (0.5, 0.7, 0.8, 0.9)


class Told:
    """Guesses of someone who knows the answers, or of someone who is always wrong."""

    def __init__(self, answers: dict[tuple[int, ...], list[int]], right: bool) -> None:
        self.answers, self.off = answers, 0 if right else 1

    def guess(self, sequence: Sequence, count: int) -> list[int]:
        done = sequence.num_known_tokens - sequence.num_prompt_tokens
        answer = self.answers[tuple(sequence.tokens[: sequence.num_prompt_tokens])]
        return [token ^ self.off for token in answer[done : done + count]]


def made(model: str, **options: Any) -> Engine:
    spec = EngineSpec(context=64 + TOKENS, max_seqs=max(BATCHES), guesses=GUESSES, **options)
    return make_engine(load(model, spec, None, 0), spec, seed=0)


def run(engine: Engine, batch: int) -> tuple[dict[tuple[int, ...], list[int]], dict[str, float]]:
    """Answers by prompt, milliseconds of a step that decodes (the prompts are short), and how many guesses it had."""
    luck = torch.Generator().manual_seed(batch)
    prompts = torch.randint(0, engine.runner.valid_vocab, (batch, 64), generator=luck).tolist()
    requests = [Request(p, SamplingParams(temperature=0, ignore_eos=True, max_tokens=TOKENS)) for p in prompts]
    for request in requests:
        engine.add(request)
    engine.step()  # the prompts
    before, began = replace(engine.metrics), time.perf_counter()
    done = engine.run()
    seconds, after = time.perf_counter() - began, engine.metrics
    answers = {tuple(piece.request.prompt): piece.result.token_ids for piece in done if piece.result is not None}
    return answers, {
        "ms_a_step": 1e3 * seconds / (after.steps - before.steps),
        "tokens_a_second": batch * TOKENS / seconds,
        "proposed": after.proposed_guesses - before.proposed_guesses,
        "accepted": after.accepted_guesses - before.accepted_guesses,
    }


def twice(engine: Engine, batch: int) -> tuple[dict[tuple[int, ...], list[int]], dict[str, float]]:
    """The first time compiles kernels and records graphs."""
    run(engine, batch)
    return run(engine, batch)


def measure(model: str, draft: str) -> dict[str, Any]:
    results: dict[str, Any] = {str(batch): {} for batch in BATCHES}
    engine = made(model, speculate="ngram")
    for batch in BATCHES:
        row = results[str(batch)]
        engine.speculator = None
        answers, row["plain"] = twice(engine, batch)
        for case, right in (("judged, all wrong", False), ("judged, all right", True)):
            engine.speculator = Speculator(engine.spec, Told(answers, right))
            answers, row[case] = twice(engine, batch)  # of steps that judge: what is right next
    del engine
    gc.collect()
    torch.cuda.empty_cache()
    engine = made(model, speculate="draft", draft=draft)
    for batch in BATCHES:
        _, results[str(batch)]["draft"] = twice(engine, batch)
    return {"model": model, "draft": draft, "guesses": GUESSES, "batches": results}


def tokens_a_step(acceptance: float, guesses: int) -> float:
    return (1 - acceptance ** (guesses + 1)) / (1 - acceptance) if acceptance < 1 else guesses + 1


def table(facts: dict[str, Any]) -> str:
    guesses = facts["guesses"]
    lines = [
        f"{facts['model']}, {guesses} guesses a step; speed-up over plain decoding at acceptance a",
        f"{'batch':>5} {'guesses':>18} {'ms a step':>10} " + " ".join(f"{f'a = {a}':>8}" for a in ACCEPTANCE),
    ]
    for batch, row in facts["batches"].items():
        plain = row["plain"]["ms_a_step"]
        lines.append(f"{batch:>5} {'none':>18} {plain:>10.2f}")
        for name, case in (("free", "judged, all wrong"), (f"by {facts['draft']}", "draft")):
            took = row[case]["ms_a_step"]
            gains = " ".join(f"{plain / took * tokens_a_step(a, guesses):>7.2f}×" for a in ACCEPTANCE)
            lines.append(f"{batch:>5} {name:>18} {took:>10.2f} {gains}")
        if told := row.get("judged, all right"):
            gain = told["tokens_a_second"] / row["plain"]["tokens_a_second"]
            accepted = told["accepted"] / told["proposed"]
            lines.append(
                f"{batch:>5} {'free, all right':>18} {told['ms_a_step']:>10.2f} {gain:>7.2f}×, {accepted:.1%} accepted"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", default="llama3-8b")
    parser.add_argument("--draft", default="llama3-1b")
    parser.add_argument("--table", action="store_true", help="print what was measured last")
    given = parser.parse_args()
    if not given.table:
        write_result(NAME, measure(given.model, given.draft))
    print(table(json.loads((RESULTS / f"{NAME}.json").read_text())))


if __name__ == "__main__":
    main()
