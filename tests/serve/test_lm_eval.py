"""lm-eval's `local-completions` against our server, offline, on a task made on the spot."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import tiny_engine
import torch
from api_server import MODEL, Api, twin

from lmworks import LLM
from lmworks.data import load_tokenizer
from lmworks.engine.offline import OfflineEngine
from lmworks.evals import load_suite, run_suite
from lmworks.evals.engine_model import EngineModel
from lmworks.evals.server_model import ServerModel

ROWS = [
    {"question": "Two and two?", "choices": ["four", "five", "a hat"], "answer": 0},
    {"question": "The sky is", "choices": ["green", "blue"], "answer": 1},
    {"question": "A cat says", "choices": ["moo", "meow", "woof"], "answer": 1},
]


def score(context: str, continuation: str) -> tuple[float, bool]:
    """By hand: log-probability of the continuation, and whether it is what greedy decoding would write."""
    before, after = list(context.encode()), list(continuation.encode())
    with torch.no_grad():
        found = twin()(torch.tensor([before + after]))[0, :, :257].float().log_softmax(-1)
    places = range(len(before) - 1, len(before) + len(after) - 1)
    greedy = all(int(found[place].argmax()) == token for place, token in zip(places, after, strict=True))
    return sum(float(found[place, token]) for place, token in zip(places, after, strict=True)), greedy


def tiny_llm() -> LLM:
    """The model that is served, in process."""
    llm = LLM.__new__(LLM)
    llm.closed, llm.folder, llm.tokenizer = False, None, load_tokenizer("bytes")
    llm.backend = OfflineEngine(tiny_engine.fragile().engine)
    return llm


def own_suite(folder: Path) -> Path:
    (folder / "own.toml").write_text('format = "multiple-choice"\ndata = "rows.jsonl"\n')
    return folder / "own.toml"


TASKS: dict[str, dict[str, Any]] = {
    "spot": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "answer",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "write": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{choices[answer]}}",
        "generation_kwargs": {"until": ["e"], "max_gen_toks": 12, "temperature": 0, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
    "read": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{question}}{{choices[0]}}",
        "metric_list": [{"metric": "bits_per_byte"}, {"metric": "word_perplexity"}],
    },
}


@pytest.fixture
def lm_eval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The harness, offline, with tasks over ROWS in a folder."""
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    found = pytest.importorskip("lm_eval")
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(rows)}},
        "test_split": "test",
    }
    for name, task in TASKS.items():
        (tmp_path / f"{name}.yaml").write_text(json.dumps({"task": name, **common, **task}))  # JSON is YAML
    return found


def evaluated(lm_eval: Any, folder: Path, model: Any, **options: Any) -> dict[str, Any]:
    from lm_eval.tasks import TaskManager

    return lm_eval.simple_evaluate(  # type: ignore[no-any-return]
        model=model,
        tasks=list(TASKS),
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        log_samples=True,
        bootstrap_iters=0,
        **options,
    )


@pytest.mark.slow
def test_custom_tasks_by_the_server_and_in_process(lm_eval: Any, api: Api, tmp_path: Path) -> None:
    """Multiple choice: its accuracy, and each log-probability that it is made of, are those by hand. Scores of all
    tasks are equal over HTTP and in process; our own suite has the same accuracies."""
    from lmworks.evals.lm_eval_model import HarnessModel

    settings = {"model": MODEL, "base_url": f"{api.url}/v1/completions", "max_length": 512, "num_concurrent": 2}
    served = evaluated(lm_eval, tmp_path, "local-completions", model_args=settings, batch_size=4)
    right = 0
    for row, sample in zip(ROWS, sorted(served["samples"]["spot"], key=lambda one: one["doc_id"]), strict=True):
        expected = [score(str(row["question"]), f" {choice}") for choice in row["choices"]]  # type: ignore[attr-defined]
        for (logprob, greedy), (asked,) in zip(expected, sample["resps"], strict=True):
            assert float(asked[0]) == pytest.approx(logprob, abs=1e-3) and str(asked[1]) == str(greedy)
        right += max(range(len(expected)), key=lambda place: expected[place][0]) == row["answer"]
    assert served["results"]["spot"]["acc,none"] == pytest.approx(right / len(ROWS))

    llm = tiny_llm()
    inside = evaluated(lm_eval, tmp_path, HarnessModel(llm))
    for task in TASKS:
        figures = {name: value for name, value in served["results"][task].items() if isinstance(value, float)}
        assert figures and {name: inside["results"][task][name] for name in figures} == pytest.approx(figures, rel=1e-4)
    texts = [[one["resps"] for one in found["samples"]["write"]] for found in (served, inside)]
    assert texts[0] == texts[1]

    suite = load_suite(str(own_suite(tmp_path)))
    ours = run_suite(EngineModel(llm, {"model": "tiny"}), suite, tmp_path / "ours")
    over_http = run_suite(ServerModel(api.url, MODEL), suite, tmp_path / "http")
    for found in (ours, over_http):
        assert found["metrics"]["accuracy"]["value"] == pytest.approx(inside["results"]["spot"]["acc,none"])
        assert found["metrics"]["accuracy_norm"]["value"] == pytest.approx(inside["results"]["spot"]["acc_norm,none"])


def test_lm_eval_requests(api: Api) -> None:
    """As its source has them: several lists of ids at once, echoed, one token, the likeliest at each place."""
    texts = [("Two and two?", " four"), ("The sky is", " blue"), ("A", " b")]
    prompts = [list((context + continuation).encode()) for context, continuation in texts]
    body: dict[str, Any] = {
        "model": MODEL,
        "prompt": prompts,
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
    }
    choices = sorted(api.post("/v1/completions", body).json()["choices"], key=lambda choice: choice["index"])
    for (context, continuation), choice in zip(texts, choices, strict=True):
        start = len(context)
        scores = choice["logprobs"]["token_logprobs"][start:-1]
        tops = choice["logprobs"]["top_logprobs"][start:-1]
        logprob, greedy = score(context, continuation)
        assert sum(scores) == pytest.approx(logprob, abs=1e-3)
        assert all(one == max(top.values()) for one, top in zip(scores, tops, strict=True)) == greedy
    until = {
        "model": MODEL,
        "prompt": prompts,
        "max_tokens": 8,
        "temperature": 0,
        "stop": ["\n\n", "<|endoftext|>"],
        "seed": 1,
    }
    assert len(api.post("/v1/completions", until).json()["choices"]) == 3
