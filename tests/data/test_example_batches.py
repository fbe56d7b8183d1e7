"""Batches of examples: rows and targets by hand, the same global batch at any world size, and what an event says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from chat_files import talk, write_lines, write_tokenizer
from chat_templates import plain_template
from lmworks.data import Batch, open_batches
from lmworks.data.example_batches import ExampleBatches, PromptBatches
from lmworks.data.window import describe, rows_at, text_of
from lmworks.spec.errors import SpecError
from lmworks.spec.run import DataSpec

EOT = 256
SHORT = [{"prompt": "ab", "completion": "cd"}, {"prompt": "e", "completion": "fgh"}, {"prompt": "i", "completion": "j"}]


def spec(path: Path, kind: str = "conversations", **more: Any) -> DataSpec:
    given = {"kind": kind, "path": str(path), "tokenizer": "bytes", "seq": 16, "micro_batch": 2, "val_fraction": 0.0}
    return DataSpec(**(given | more))


def decoded(ids: torch.Tensor) -> str:
    return "".join({EOT: "|", -100: "."}.get(i) or chr(i) for i in ids.tolist())


def test_packed_rows_by_hand(tmp_path: Path) -> None:
    batches = ExampleBatches(spec(write_lines(tmp_path / "a.jsonl", SHORT), micro_batch=1), seed=0, shuffle=False)
    (batch,) = batches.at(0)
    assert (batches.windows, batches.report.rows, batches.report.fill) == (1, 1, round(13 / 16, 4))
    assert decoded(batch.tokens[0]) == "abcd|efgh|ij||||"
    assert decoded(batch.targets[0]) == ".cd|.fgh|.j|...."
    assert batch.documents is not None and batch.documents[0].tolist() == [0] * 5 + [1] * 5 + [2] * 3 + [3] * 3
    assert batch.counted == batch.count() == 3 + 4 + 2 and batch.extras == {}
    assert batches.bytes_per_token == len("cdfghj") / 9


def test_rows_without_packing_are_one_example_each(tmp_path: Path) -> None:
    data = spec(write_lines(tmp_path / "a.jsonl", SHORT), packing=False, micro_batch=3)
    (batch,) = ExampleBatches(data, seed=0, shuffle=False).at(0)
    assert [decoded(row) for row in batch.tokens] == ["abcd|" + "|" * 11, "efgh|" + "|" * 11, "ij|" + "|" * 13]
    assert [decoded(row) for row in batch.targets] == [".cd|" + "." * 12, "fgh|" + "." * 12, "j|" + "." * 14]
    assert batch.documents is None and batch.counted == 9


def test_completion_that_ends_with_end_of_text_has_one(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"prompt": "a", "completion": "b<|endoftext|>"}])
    (batch,) = ExampleBatches(spec(path, micro_batch=1), seed=0).at(0)
    assert decoded(batch.tokens[0]).startswith("ab|") and batch.counted == 2


PAIRS = [
    {"prompt": "ab", "chosen": "c" * 70, "rejected": "d", "margin": 0.5},
    {"prompt": "e", "chosen": "f", "rejected": "gh", "margin": 2},
    {"prompt": "i", "chosen": "jk", "rejected": "l", "margin": 1},
]


def test_pairs_are_chosen_then_rejected(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", PAIRS)
    batches = ExampleBatches(spec(path, "preferences", seq=1000), seed=0, shuffle=False)
    batch = batches.at(0)[0]
    assert batch.tokens.shape == (4, 128)  # the longest is 73
    starts = ["ab" + "c" * 70, "ef|", "abd|", "egh|"]
    assert all(decoded(row).startswith(start) for row, start in zip(batch.tokens, starts, strict=True))
    assert decoded(batch.targets[2]) == ".d|" + "." * 125 and decoded(batch.targets[1]) == "f|" + "." * 126
    assert batch.counted == batch.count() == 71 + 2 + 2 + 3 and batch.documents is None
    assert batch.extras["margin"].tolist() == [0.5, 2.0] and batches.windows == 3
    small = ExampleBatches(spec(path, "preferences", seq=100), seed=0, shuffle=False).at(0)[0]
    assert small.tokens.shape == (4, 100)  # not beyond data.seq
    without = write_lines(tmp_path / "b.jsonl", [*PAIRS, {"prompt": "m", "chosen": "n", "rejected": "o"}])
    assert ExampleBatches(spec(without, "preferences", seq=1000), seed=0).at(0)[0].extras == {}


def test_pairs_share_the_tokens_of_their_prompt(tmp_path: Path) -> None:
    """'the an' + 'swer' would be another token than 'the an' and 'swer': both are tokenized alone then."""
    folder = write_tokenizer(tmp_path / "hf", plain_template("qwen"))
    records = [{"prompt": "the an", "chosen": "swer", "rejected": "d"}]
    batches = ExampleBatches(
        spec(write_lines(tmp_path / "a.jsonl", records), "preferences", tokenizer=str(folder), micro_batch=1, seq=64),
        seed=0,
    )
    encode = batches.split.chat.encode
    assert encode("the answer")[: len(encode("the an"))] != encode("the an")
    eos = encode("<|im_end|>")
    (ids, trained), (other, _) = (batches.split.sequence(0, which) for which in (0, 1))
    assert ids.tolist() == [*encode("the an"), *encode("swer"), *eos]
    assert other.tolist() == [*encode("the an"), *encode("d"), *eos]
    assert trained.tolist() == [False] * len(encode("the an")) + [True] * len(encode("swer") + eos)
    chats = [{"chosen": talk("q", "one"), "rejected": talk("q", "two three")}]
    batches = ExampleBatches(
        spec(write_lines(tmp_path / "b.jsonl", chats), "preferences", tokenizer=str(folder), micro_batch=1, seq=64),
        seed=0,
    )
    prompt = encode("<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n")
    for which, answer in enumerate(("one", "two three")):
        ids, trained = batches.split.sequence(0, which)
        assert ids.tolist() == [*prompt, *encode(f"{answer}<|im_end|>\n")]
        assert ids[trained].tolist() == encode(f"{answer}<|im_end|>")


def test_labelled_answers_and_mismatched_ones(tmp_path: Path) -> None:
    records = [{**one, "label": bool(i % 2)} for i, one in enumerate(SHORT)]
    path = write_lines(tmp_path / "a.jsonl", records)
    batch = ExampleBatches(spec(path, "unpaired", micro_batch=3), seed=0, shuffle=False).at(0)[0]
    assert [decoded(row).rstrip("|") for row in batch.tokens] == ["abcd", "efgh", "ij", "abfgh", "ej", "icd"]
    assert [decoded(row).rstrip(".") for row in batch.targets] == [".cd|", "fgh|", "j|", ".fgh|", "j|", "cd|"]
    assert batch.extras["label"].tolist() == [False, True, False]
    held_out = ExampleBatches(spec(path, "unpaired"), seed=0, shuffle=False).held_out_batch(1)
    assert [decoded(row).rstrip("|") for row in held_out.tokens] == ["ij", "icd"]  # the last one has no neighbour
    moved = batch.map_tensors(lambda tensor: tensor.to(torch.int32))
    assert moved.extras["label"].dtype == torch.int32 and moved.counted == batch.counted
    cut = ExampleBatches(spec(path, "unpaired", seq=5, micro_batch=3), seed=0, shuffle=False).at(0)[0]
    assert decoded(cut.tokens[3]) == "abfgh" and decoded(cut.targets[3]) == ".fgh."


def test_mismatched_answers_follow_from_the_global_batch(tmp_path: Path) -> None:
    """Each prompt has the answer of the next row, the last the first's: at any micro-batch and number of ranks."""
    records = [{"prompt": f"{i}=", "completion": f"{i}" * (i + 1), "label": True} for i in range(8)]
    path = write_lines(tmp_path / "a.jsonl", records)

    def mismatched(world: int, micro_batch: int) -> list[str]:
        found: list[str] = []
        for rank in range(world):
            data = spec(path, "unpaired", seq=32, micro_batch=micro_batch, global_batch=4)
            for batch in ExampleBatches(data, seed=0, rank=rank, world=world).at(1):
                found += [decoded(row).rstrip("|") for row in batch.tokens.chunk(2)[1]]
        return found

    whole = mismatched(1, 4)
    assert len(set(whole)) == 4 and all(text[0] != text[-1] for text in whole)
    assert [text[0] for text in whole] == [text[-1] for text in [whole[-1], *whole[:-1]]]
    for world, micro_batch in ((1, 1), (1, 2), (2, 1), (2, 2), (4, 1)):
        assert mismatched(world, micro_batch) == whole, (world, micro_batch)


def test_prompts_come_with_their_columns(tmp_path: Path) -> None:
    records: list[dict[str, Any]] = [{"prompt": f"{i}+{i}=", "answer": 2 * i} for i in range(10)]
    records.append({"prompt": talk("7+7?"), "answer": 14})
    path = write_lines(tmp_path / "a.jsonl", records)
    batches = PromptBatches(spec(path, "prompts", seq=64, global_batch=4), seed=0, rank=1, world=2, shuffle=False)
    examples = batches.examples(1)
    assert [(bytes(one.ids).decode(), one.columns) for one in examples] == [
        ("6+6=", {"answer": 12}),
        ("7+7=", {"answer": 14}),
    ]
    assert examples[0].place == f"{path} line 7" and examples[0].prompt == "6+6="
    last = PromptBatches(spec(path, "prompts", seq=64), seed=0, shuffle=False).example(10)
    assert bytes(last.ids).decode() == "User: 7+7?\nAssistant:" and last.prompt == talk("7+7?")
    seen = [
        one.place
        for cursor in range(11)
        for one in PromptBatches(spec(path, "prompts", seq=64), seed=3).examples(cursor)
    ]
    assert len(set(seen[:11])) == 11 and seen[:11] != seen[11:22]  # every prompt once an epoch, in another order
    with pytest.raises(SpecError, match="cut the end of prompts"):
        PromptBatches(spec(path, "prompts", seq=4, overlong="truncate"), seed=0)
    skipped = PromptBatches(spec(path, "prompts", seq=5, overlong="skip"), seed=0)
    assert skipped.windows == 10 and skipped.report.left_out == {"over-long": 1}


@pytest.mark.parametrize("kind", ["conversations", "preferences", "unpaired"])
def test_global_batch_does_not_depend_on_the_world(tmp_path: Path, kind: str) -> None:
    records = [
        {"prompt": f"q{i}", "completion": "a" * (i % 7 + 1), "chosen": f"c{i}", "rejected": "d", "label": i % 3 == 0}
        for i in range(40)
    ]
    data = spec(write_lines(tmp_path / "a.jsonl", records), kind, global_batch=8, seq=24)

    def rows(world: int, cursor: int) -> list[list[int]]:
        parts = [ExampleBatches(data, seed=5, rank=rank, world=world).at(cursor) for rank in range(world)]
        return [[*row.tolist()] for part in parts for batch in part for row in batch.targets]

    for cursor in (0, 3, 17):
        assert rows(1, cursor) == rows(2, cursor) == rows(4, cursor)
    assert rows(1, 0) != rows(1, 1)
    batches = ExampleBatches(data, seed=5)
    read = list(batches.stream(2, 5, workers=2))
    for cursor, made in zip(range(2, 5), read, strict=True):
        for one, other in zip(made, batches.at(cursor), strict=True):
            assert torch.equal(one.tokens, other.tokens) and torch.equal(one.targets, other.targets)


def test_an_epoch_has_every_example_once(tmp_path: Path) -> None:
    records = [{"prompt": f"{i:03}", "completion": "x" * (i % 9 + 1)} for i in range(60)]
    batches = ExampleBatches(spec(write_lines(tmp_path / "a.jsonl", records), seq=32, micro_batch=1), seed=0)
    seen = np.concatenate(
        [row for cursor in range(batches.windows) for row in batches.locate(batches.samples_at(cursor))]
    )
    assert sorted(seen.tolist()) == list(range(60)) and batches.windows < 30
    again = ExampleBatches(spec(tmp_path / "a.jsonl", seq=32, micro_batch=1), seed=0)
    assert again.digest == batches.digest


def test_event_of_a_batch_names_file_and_line(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"prompt": f"q{i}", "completion": f"answer {i}" * 2} for i in range(40)])
    batches = open_batches(spec(path, seq=64, global_batch=4), seed=0)
    assert isinstance(batches, ExampleBatches)
    told = describe(batches, 2)
    assert json.loads(json.dumps(told))["sources"] == {str(path): 4}
    row = rows_at(batches, 2)[0]
    assert all(place.startswith(f"{path} line ") for place in row.examples) and len(row.examples) > 1
    line = int(row.examples[0].rsplit(" ", 1)[1])
    assert text_of(batches, row).startswith(f"q{line - 1}answer {line - 1}")
    assert told["odd"][0]["examples"]


def test_tokenizer_of_the_model_that_is_tuned(tmp_path: Path, prepared: Path) -> None:
    hf = write_tokenizer(tmp_path / "hf", plain_template("qwen"))
    path = write_lines(tmp_path / "a.jsonl", [{"messages": talk("q", "a")}])
    data = spec(path, tokenizer="", seq=64, micro_batch=1)
    assert "<|im_start|>assistant" in ExampleBatches(data, str(hf), seed=0).split.chat.renderer.prompt(talk("q"))
    run = tmp_path / "run"
    run.mkdir()
    (run / "spec.toml").write_text(f'[model]\npreset = "tiny"\n[data]\npath = "{prepared}"\n')
    batches = ExampleBatches(data, str(run), seed=0)
    assert batches.vocab_size == 257 and decoded(batches.at(0)[0].tokens[0]).startswith("User: q\nAssistant: a|\n")
    for wrong, said in ((str(tmp_path), "has no tokenizer.json"), (str(tmp_path / "no"), "no such folder")):
        with pytest.raises(SpecError, match=said):
            ExampleBatches(data, wrong, seed=0)
    with pytest.raises(SpecError, match=r"data.tokenizer = .* no tokenizer.json there"):
        ExampleBatches(data.replace(tokenizer=str(tmp_path)), seed=0)


def test_text_prompts_begin_as_the_model_expects(tmp_path: Path) -> None:
    """Begin-of-text before a prompt without a template, once; none with one, which writes its own."""
    from tokenizers import Tokenizer, processors

    hf = write_tokenizer(tmp_path / "hf", plain_template("qwen"))
    inner = Tokenizer.from_file(str(hf / "tokenizer.json"))
    begin = inner.token_to_id("<s>")
    inner.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", begin), ("</s>", begin + 1)]
    )
    inner.save(str(hf / "tokenizer.json"))
    records = [{"prompt": "the", "completion": "answer"}, {"messages": talk("q", "a")}]
    batches = ExampleBatches(
        spec(write_lines(tmp_path / "a.jsonl", records), tokenizer=str(hf), packing=False, seq=64),
        seed=0,
        shuffle=False,
    )
    text, chat = batches.split.sequence(0)[0].tolist(), batches.split.sequence(1)[0].tolist()
    assert text[0] == begin and text.count(begin) == 1 and begin + 1 not in text and begin not in chat
    assert isinstance(batches.at(0)[0], Batch)
