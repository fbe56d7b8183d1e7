"""Runs a suite: answers are generated while earlier ones are scored, and each is on disk before the next."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ..data.progress import Progress, silent
from ..sandbox import Sandbox
from ..spec.errors import LMWorksError, SpecError
from .folder import EvaluationFolder, Key
from .formats import FORMATS
from .formats.format import CHOOSE, GENERATE, HELD_OUT, Format
from .models import Completion, EvalModel, Likelihood, Pair, Prompt
from .problem import Problem
from .problems import load_problems
from .results import summarize
from .scoring import score_choices, score_document, score_text, truncated
from .suite import Suite

WORST = -1e9  # log-likelihood of a choice that could not be scored


def run_suite(
    model: EvalModel, suite: Suite, out: Path, limit: int = 0, seed: int = 0, progress: Progress = silent
) -> dict[str, Any]:
    """Continues what `out` holds of the same evaluation, and writes its result."""
    if FORMATS[suite.format].task == HELD_OUT:
        raise SpecError(
            f"suite {suite.name} has no problems to ask: it is the loss of a run on its own held-out data, which "
            f"`lmworks evals run RUN --suite {suite.name}` measures"
        )
    check_k(suite)
    settings = {**model.facts, "suite": suite.to_dict(), "limit": limit, "seed": seed}
    folder = EvaluationFolder(out, settings)
    try:
        problems = folder.problems()
        if problems is None:
            problems = load_problems(suite, limit)
            folder.write_problems(problems)
        with Sandbox() as sandbox:
            Evaluation(model, suite, folder, problems, seed, sandbox, progress).run()
        result = finish(model.facts, suite, folder, problems)
    finally:
        folder.close()
    return result


def check_k(suite: Suite) -> None:
    if "pass" in suite.metrics and max(suite.k) > suite.generation.samples:
        raise SpecError(
            f"pass@{max(suite.k)} needs {max(suite.k)} samples of a problem, and there are "
            f"{suite.generation.samples}: give --samples {max(suite.k)}, or a smaller --k"
        )


def finish(
    facts: dict[str, Any], suite: Suite, folder: EvaluationFolder, problems: Sequence[Problem]
) -> dict[str, Any]:
    groups = {one.id: one.group for one in problems}
    result = {**facts, **summarize(suite, groups, list(folder.verdicts.values()))}
    refused = [one["error"] for one in folder.verdicts.values() if one.get("error")]
    if len(refused) == len(folder.verdicts):  # not a score of 0
        raise LMWorksError(
            f"suite {suite.name}: all {len(refused)} requests were refused: {refused[0]} (kept in {folder.path})"
        )
    folder.write("result.json", result)
    return result


def seed_of(seed: int, problem: str, sample: int) -> int:
    """Of one sample: it does not depend on how many others there are."""
    digest = hashlib.sha256(f"{seed} {problem} {sample}".encode()).digest()
    return int.from_bytes(digest[:7], "big")


class Evaluation:
    def __init__(
        self,
        model: EvalModel,
        suite: Suite,
        folder: EvaluationFolder,
        problems: Sequence[Problem],
        seed: int,
        sandbox: Sandbox,
        progress: Progress,
    ) -> None:
        self.model, self.suite, self.folder, self.problems = model, suite, folder, problems
        self.seed, self.sandbox, self.progress = seed, sandbox, progress
        self.format: Format = FORMATS[suite.format]
        self.by_id = {one.id: one for one in problems}
        samples = suite.generation.samples if self.format.task == GENERATE else 1
        self.keys: list[Key] = [(one.id, sample) for sample in range(samples) for one in problems]
        self.futures: list[Future[None]] = []
        self.began = time.monotonic()

    def run(self) -> None:
        with ThreadPoolExecutor(self.sandbox.size, thread_name_prefix="score") as self.threads:
            self.show()
            for key in self.keys:  # answers of before, whose verdict was lost
                if key in self.folder.samples and key not in self.folder.verdicts:
                    self.submit(self.folder.samples[key])
            missing = [key for key in self.keys if key not in self.folder.samples]
            if missing:
                {GENERATE: self.generate, CHOOSE: self.choose}.get(self.format.task, self.read)(missing)
            for future in self.futures:
                future.result()

    def show(self) -> None:
        with self.folder.lock:
            self.progress(self.suite.name, len(self.folder.verdicts), len(self.keys))

    # --- answers ------------------------------------------------------------------------------------------

    def generate(self, keys: Sequence[Key]) -> None:
        prompts = [self.prompt(self.by_id[name], sample) for name, sample in keys]
        began = time.monotonic()

        def on_result(place: int, found: Completion) -> None:
            name, sample = keys[place]
            problem = self.by_id[name]
            self.keep(
                {
                    "problem": name,
                    "sample": sample,
                    "text": truncated(found.text, self.stops(problem), problem.lines),
                    "tokens": found.tokens,
                    "finish_reason": found.finish_reason,
                    "seed": prompts[place].seed,
                    "seconds": round(time.monotonic() - began, 3),
                    **({"error": found.error} if found.error else {}),
                }
            )

        self.model.generate(prompts, on_result)

    def prompt(self, problem: Problem, sample: int) -> Prompt:
        asked = self.suite.generation
        return Prompt(
            text=problem.prompt,
            seed=seed_of(self.seed, problem.id, sample),
            max_tokens=problem.max_tokens or asked.max_tokens,
            temperature=asked.temperature,
            top_p=asked.top_p,
            stop=self.stops(problem),
            suffix=problem.suffix,
        )

    def stops(self, problem: Problem) -> list[str]:
        return [*self.format.stop, *self.suite.generation.stop, *problem.stop]

    def choose(self, keys: Sequence[Key]) -> None:
        """All choices of all problems at once; a problem is kept when its last choice is known."""
        pairs: list[Pair] = []
        owners: list[tuple[int, int]] = []
        found: list[list[Likelihood | None]] = []
        for place, (name, _) in enumerate(keys):
            problem = self.by_id[name]
            found.append([None] * len(problem.choices))
            pairs += [(problem.prompt, choice) for choice in problem.choices]
            owners += [(place, number) for number in range(len(problem.choices))]

        def on_result(at: int, one: Likelihood) -> None:
            place, number = owners[at]
            found[place][number] = one
            known = [each for each in found[place] if each is not None]
            if len(known) == len(found[place]):
                error = next((each.error for each in known if each.error), "")
                self.keep(
                    {
                        "problem": keys[place][0],
                        "sample": 0,
                        "logprobs": [max(each.logprob, WORST) for each in known],
                        "tokens": [each.tokens for each in known],
                        **({"error": error} if error else {}),
                    }
                )

        self.model.likelihoods(pairs, on_result)

    def read(self, keys: Sequence[Key]) -> None:
        texts = [self.by_id[name].prompt for name, _ in keys]

        def on_result(place: int, one: Likelihood) -> None:
            error = {"error": one.error} if one.error else {}
            self.keep({"problem": keys[place][0], "sample": 0, "logprob": one.logprob, "tokens": one.tokens, **error})

        self.model.text_likelihoods(texts, on_result)

    def keep(self, sample: dict[str, Any]) -> None:
        self.folder.add_sample(sample)
        self.submit(sample)

    # --- verdicts -----------------------------------------------------------------------------------------

    def submit(self, sample: dict[str, Any]) -> None:
        self.futures.append(self.threads.submit(self.judge, sample))

    def judge(self, sample: dict[str, Any]) -> None:
        problem = self.by_id[sample["problem"]]
        verdict: dict[str, Any] = {"problem": problem.id, "sample": sample["sample"]}
        if self.format.task == GENERATE:
            scores, log = score_text(self.suite, problem, sample["text"], self.sandbox)
            verdict |= {"scores": scores, **({"log": log} if log else {})}
        elif self.format.task == CHOOSE:
            verdict["scores"] = score_choices(problem, sample["logprobs"])
        elif "error" not in sample:
            verdict["scores"], verdict["weights"] = score_document(problem.prompt, sample["logprob"], sample["tokens"])
        if error := sample.get("error"):
            verdict |= {"error": error, "scores": verdict.get("scores", {})}
        self.folder.add_verdict(verdict)
        self.show()
