"""Conversations that a small run was fine-tuned on are answered as they were, with the template it keeps."""

from __future__ import annotations

import json
from pathlib import Path

from lmworks import LLM, SamplingParams
from lmworks.align.post_trainer import PostTrainer
from lmworks.record import RunFolder
from lmworks.spec import RunSpec
from post_training import MODEL, write_lines

TALKS = [["2 + 2?", "4"], ["Hello", "Hi.", "Bye", "Bye!"], ["naïve?", "数🙂"]]


def test_answers_as_it_was_taught_and_stops(tmp_path: Path) -> None:
    records = [
        {"messages": [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(talk)]}
        for talk in TALKS
    ]
    path = write_lines(tmp_path / "chats.jsonl", records)
    spec = RunSpec.from_dict(
        {
            "name": "sft",
            "model": MODEL,
            "data": {"path": str(path), "val_path": str(path), "tokenizer": "bytes", "seq": 64, "micro_batch": 2},
            "optim": {"steps": 150, "lr": 1e-2, "weight_decay": 0.0},
            "align": {"method": "sft"},
            "checkpoint": {"every": 0},
            "log": {"eval_every": 0},
        }
    )
    run = tmp_path / "run"
    assert PostTrainer(spec, run, quiet=True).run().loss < 0.05
    (event,) = [event for event in RunFolder.open(run).events() if event["kind"] == "examples"]
    assert event["examples"] == 3 and event["rows"] == 2 and event["left_out"] == {}
    assert json.loads((run / "tokenizer/generation_config.json").read_text()) == {"eos_token_id": [256]}
    with LLM(run) as llm:
        chat = llm.chat()
        for talk in TALKS:
            said = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(talk)]
            for number in range(1, len(said), 2):
                ids, _ = chat.prompt(said[:number], 64)
                (result,) = llm.generate([ids], SamplingParams(temperature=0, max_tokens=20), progress=False)
                assert (result.text, result.finish_reason) == (f" {talk[number]}", "stop")
