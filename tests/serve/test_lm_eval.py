"""lm-eval's `local-completions` against our server, offline, on a task made on the spot."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from api_server import MODEL, Api, twin

ROWS = [
    {"question": "Two and two?", "choices": [" four", " five", " a hat"], "answer": 0},
    {"question": "The sky is", "choices": [" green", " blue"], "answer": 1},
    {"question": "A cat says", "choices": [" moo", " meow", " woof"], "answer": 1},
]


def score(context: str, continuation: str) -> tuple[float, bool]:
    """By hand: log-probability of the continuation, and whether it is what greedy decoding would write."""
    before, after = list(context.encode()), list(continuation.encode())
    with torch.no_grad():
        found = twin()(torch.tensor([before + after]))[0, :, :257].float().log_softmax(-1)
    places = range(len(before) - 1, len(before) + len(after) - 1)
    greedy = all(int(found[place].argmax()) == token for place, token in zip(places, after, strict=True))
    return sum(float(found[place, token]) for place, token in zip(places, after, strict=True)), greedy


@pytest.mark.slow
def test_custom_task(api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Multiple choice: its accuracy, and each log-probability that it is made of, are those by hand."""
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    lm_eval = pytest.importorskip("lm_eval")
    from lm_eval.tasks import TaskManager

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    task = {
        "task": "spot",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(rows)}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "answer",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}],
    }
    (tmp_path / "spot.yaml").write_text(json.dumps(task))  # JSON is YAML
    found = lm_eval.simple_evaluate(
        model="local-completions",
        model_args={"model": MODEL, "base_url": f"{api.url}/v1/completions", "max_length": 512, "num_concurrent": 2},
        tasks=["spot"],
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
        batch_size=4,
        log_samples=True,
        bootstrap_iters=0,
    )
    right = 0
    for row, sample in zip(ROWS, sorted(found["samples"]["spot"], key=lambda one: one["doc_id"]), strict=True):
        expected = [score(str(row["question"]), choice) for choice in row["choices"]]  # type: ignore[attr-defined]
        for (logprob, greedy), (asked,) in zip(expected, sample["resps"], strict=True):
            assert float(asked[0]) == pytest.approx(logprob, abs=1e-3) and str(asked[1]) == str(greedy)
        right += max(range(len(expected)), key=lambda place: expected[place][0]) == row["answer"]
    assert found["results"]["spot"]["acc,none"] == pytest.approx(right / len(ROWS))


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
