"""Records of TRL's formats: what is read of them, and what is named as bad, by file and line."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from chat_files import talk, write_lines, write_tokenizer
from chat_templates import plain_template
from lmworks.data.example_batches import ExampleBatches
from lmworks.data.example_split import open_split
from lmworks.data.examples import BadExample, read_example
from lmworks.spec.errors import DataError, NoSuchData, SpecError
from lmworks.spec.run import DataSpec

GOOD = talk("question", "answer")


def test_implicit_prompt_is_what_both_have_in_common() -> None:
    """As TRL's extract_prompt: messages, or characters, of which a space before the answers belongs to them."""
    pair = read_example({"chosen": talk("q", "a", "r", "b"), "rejected": talk("q", "a", "r", "c")}, "preferences")
    assert pair.prompt == talk("q", "a", "r") and pair.answers == ([talk("", "b")[1]], [talk("", "c")[1]])
    text = read_example({"chosen": "The sky is blue.", "rejected": "The sky is green."}, "preferences")
    assert (text.prompt, *text.answers) == ("The sky is", " blue.", " green.")
    explicit = read_example({"prompt": "p", "chosen": "a", "rejected": "b", "margin": 2}, "preferences")
    assert (explicit.prompt, *explicit.answers, explicit.margin) == ("p", "a", "b", 2)


def test_contents_as_parts_and_calls_as_strings() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    said = [
        {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "user", "content": "q", "tool_calls": None},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    example = read_example({"messages": said, "tools": json.dumps([{"name": "f"}])}, "conversations")
    (messages,) = example.answers
    assert messages[0] == {"role": "system", "content": "ab"}  # type: ignore[index]
    assert messages[1] == {"role": "user", "content": "q"}  # type: ignore[index]
    assert messages[2]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"x": 1}}  # type: ignore[index]
    assert example.tools == ({"name": "f"},)


def test_columns_of_prompts_reach_the_rewards() -> None:
    example = read_example({"prompt": "2+2?", "answer": "4", "level": 1}, "prompts")
    assert example.prompt == "2+2?" and example.columns == {"answer": "4", "level": 1}


BAD: list[tuple[str, Any, str, str]] = [
    ("conversations", [1], "not an object", "a list"),
    ("conversations", {"messages": talk("q")}, "no assistant turn", "no message of the role 'assistant'"),
    ("conversations", {"messages": []}, "no assistant turn", ""),
    ("conversations", {"messages": talk("q", " ")}, "empty completion", r"messages\[1\]: the assistant says nothing"),
    ("conversations", {"messages": talk("q", "a")[1:]}, "empty prompt", "no message of a user"),
    ("conversations", {"messages": "text"}, "wrong type", "must be a list of messages"),
    ("conversations", {"messages": [{"role": "bot", "content": "a"}]}, "unknown role", "role 'bot'; known: system"),
    ("conversations", {"messages": [{"role": "asistant", "content": "a"}]}, "unknown role", "did you mean 'assistant'"),
    ("conversations", {"messages": [{"from": "human", "value": "a"}]}, "missing column", "ShareGPT's 'from'"),
    ("conversations", {"messages": [{"role": "user", "content": 3}]}, "wrong type", "its content is a number"),
    (
        "conversations",
        {"messages": [{"role": "user", "content": [{"type": "image", "image": "x"}]}]},
        "wrong type",
        "'image', and only texts",
    ),
    (
        "conversations",
        {"conversations": GOOD},
        "missing column",
        "'messages' .'conversations' would have to be renamed",
    ),
    ("conversations", {"instruction": "a", "output": "b"}, "missing column", "'prompt' .'instruction'"),
    ("conversations", {"prompt": "a", "completoin": "b"}, "missing column", "'completion' .'completoin'"),
    ("conversations", {"prompt": "a", "completion": GOOD}, "wrong type", "must both be texts"),
    ("conversations", {"prompt": " ", "completion": "b"}, "empty prompt", "'prompt' is empty"),
    ("conversations", {"prompt": "a", "completion": ""}, "empty completion", "'completion' is empty"),
    ("conversations", {"messages": GOOD, "tools": "no"}, "wrong type", "OpenAI's format"),
    ("preferences", {"prompt": "a", "chosen": "b", "rejected": "b"}, "equal pair", "are equal"),
    ("preferences", {"chosen": GOOD, "rejected": GOOD}, "equal pair", "are equal"),
    ("preferences", {"chosen": "abc", "rejected": "xyz"}, "empty prompt", "no common beginning"),
    ("preferences", {"chosen": GOOD}, "missing column", "'rejected'"),
    ("preferences", {"prompt": "a", "chosen": "b", "rejected": "c", "margin": "d"}, "wrong type", "'margin'"),
    ("unpaired", {"prompt": "a", "completion": "b", "label": 1}, "label not boolean", "a number 1"),
    ("unpaired", {"prompt": "a", "completion": "b"}, "missing column", "'label'"),
    ("prompts", {"question": "a"}, "missing column", "'prompt' .'question' would"),
    ("prompts", {"prompt": []}, "empty prompt", ""),
]


@pytest.mark.parametrize(("kind", "record", "reason", "said"), BAD)
def test_bad_records_are_named(kind: str, record: Any, reason: str, said: str) -> None:
    with pytest.raises(BadExample) as refused:
        read_example(record, kind)
    assert refused.value.reason == reason
    assert re.search(said, refused.value.detail), refused.value.detail


# --- files -----------------------------------------------------------------------------------------------


def chats(path: Path, **more: Any) -> DataSpec:
    spec = {"kind": "conversations", "path": str(path), "tokenizer": "bytes", "seq": 64, "val_fraction": 0.0}
    return DataSpec(**(spec | more))


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """Line 2 is no JSON, 4 is empty, 5 has no answer, 6 is too long."""
    good = json.dumps({"messages": GOOD})
    long = json.dumps({"messages": talk("q", "a" * 100)})
    path = tmp_path / "chats.jsonl"
    path.write_text(f"{good}\nnot json\n{good}\n\n{json.dumps({'messages': GOOD[:1]})}\n{long}\n{good}")
    return path


def test_bad_examples_are_refused_by_file_and_line(mixed: Path) -> None:
    with pytest.raises(DataError) as refused:
        open_split(chats(mixed), "")
    message = str(refused.value)
    assert message.startswith(
        f"{mixed}: 3 of 6 examples cannot be used (1 not JSON, 1 no assistant turn, 1 over-long):"
    )
    assert (
        f"{mixed} line 2: not JSON: Expecting value at character" in message
        and f"{mixed} line 5: 'messages' has no message" in message
    )
    assert f"{mixed} line 6: 121 tokens, more than 64" in message and "\n" not in message
    assert "data.bad_examples = 'skip'" in message and "data.overlong = 'skip'" in message
    with pytest.raises(DataError, match=r"1 of 6 examples cannot be used \(1 over-long\)"):
        open_split(chats(mixed, bad_examples="skip"), "")
    with pytest.raises(DataError, match=r"2 of 6 examples cannot be used \(1 not JSON, 1 no assistant turn\)"):
        open_split(chats(mixed, overlong="skip"), "")


def test_skipped_examples_are_counted(mixed: Path) -> None:
    split = open_split(chats(mixed, bad_examples="skip", overlong="skip"), "")
    assert [split.place(i) for i in range(len(split))] == [f"{mixed} line {line}" for line in (1, 3, 7)]
    report = split.report.to_dict()
    assert report["left_out"] == {"not JSON": 1, "no assistant turn": 1, "over-long": 1}
    assert report["examples"] == 3 and report["truncated"] == 0 and len(report["first_left_out"]) == 3
    text = "User: question\nAssistant: answer"
    assert report["tokens"] == 3 * (len(text) + 2) and report["trained_tokens"] == 3 * len(" answer!")
    json.dumps(report)


def test_truncation_cuts_the_end_and_leaves_something_to_train(tmp_path: Path, mixed: Path) -> None:
    split = open_split(chats(mixed, bad_examples="skip", overlong="truncate"), "")
    ids, trained = split.sequence(2)
    assert bytes(ids.tolist()) == b"User: q\nAssistant: " + b"a" * 45 and trained.sum() == 46
    assert split.report.truncated == 1 and "over-long" not in split.report.left_out
    long = write_lines(tmp_path / "long.jsonl", [{"messages": talk("q" * 100, "a")}, {"messages": GOOD}])
    split = open_split(chats(long, overlong="truncate"), "")
    assert len(split) == 1 and split.report.left_out == {"over-long": 1} and split.report.truncated == 0
    assert "its first 64 tokens have none that is trained" in split.report.first_left_out[0]
    pairs = [{"prompt": "q", "chosen": "a" * 80 + end, "rejected": "a" * 80} for end in ("b", "c")]
    pairs.append({"prompt": "q", "chosen": "b" * 80, "rejected": "a" * 80})
    path = write_lines(tmp_path / "pairs.jsonl", pairs)
    split = open_split(chats(path, kind="preferences", overlong="truncate"), "")
    assert len(split) == 1 and split.report.left_out == {"over-long": 2} and split.report.truncated == 1


def test_nothing_usable_is_an_error(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"messages": talk("q")}])
    with pytest.raises(DataError, match=r"no example can be used: .* line 1: 'messages' has no message"):
        open_split(chats(path, bad_examples="skip"), "")
    with pytest.raises(NoSuchData, match=r"no such file; post-training reads \.jsonl"):
        open_split(chats(tmp_path / "none.jsonl"), "")
    with pytest.raises(NoSuchData, match=r"read from \.jsonl, \.json, \.parquet files"):
        open_split(chats(write_lines(tmp_path / "a.txt", [])), "")
    with pytest.raises(SpecError, match="post-training needs a tokenizer"):
        open_split(chats(path, tokenizer=""), "")


def test_template_refusals_count_as_bad(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "gemma", plain_template("gemma"))
    records = [{"messages": GOOD}, {"messages": [{"role": "system", "content": "s"}, *GOOD]}]
    path = write_lines(tmp_path / "a.jsonl", records)
    split = open_split(chats(path, tokenizer=str(folder), bad_examples="skip"), "")
    assert split.report.left_out == {"refused by the template": 1}
    assert "line 2" in split.report.first_left_out[0] and "System role not supported" in split.report.first_left_out[0]
    reasoner = plain_template("deepseek").replace("REASONER", "true")
    folder = write_tokenizer(tmp_path / "deepseek", reasoner)
    with pytest.raises(
        DataError, match=r"no example can be used: .* line 1, line 2: the chat template ends the prompt for"
    ):
        open_split(chats(path, tokenizer=str(folder), bad_examples="skip"), "")


def test_formats_hold_the_same_examples(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    records = [{"messages": talk(f"q{i}", f"a{i}")} for i in range(5)]
    folder = tmp_path / "folder"
    folder.mkdir()
    write_lines(folder / "a.jsonl", records[:3])
    (folder / "b.json").write_text(json.dumps(records[3:]))
    (folder / "readme.md").write_text("no examples")
    parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "c.parquet")
    lines = write_lines(tmp_path / "d.jsonl", records)
    made = [ExampleBatches(chats(path), seed=0) for path in (folder, tmp_path / "c.parquet", lines)]
    assert len({one.digest for one in made}) == 1
    assert made[0].split.place(3) == f"{folder / 'b.json'} record 1"
    (tmp_path / "e.json").write_text('{"messages": []}')
    with pytest.raises(DataError, match="a list of records is expected"):
        ExampleBatches(chats(tmp_path / "e.json"), seed=0)


def test_held_out_examples_stay_held_out(tmp_path: Path) -> None:
    """By content: examples that are added later move none, and a prompt is on one side with all its answers."""
    records = [{"prompt": f"question {i // 2}", "completion": f"answer {i}"} for i in range(200)]
    spec = chats(write_lines(tmp_path / "a.jsonl", records), val_fraction=0.2)

    def lines(spec: DataSpec, split: str) -> set[int]:
        made = open_split(spec, "", split)
        return {int(made.examples.places[number, 1]) for number in made.numbers}

    train, val = lines(spec, "train"), lines(spec, "val")
    assert train | val == set(range(1, 201)) and not train & val and 15 < len(val) < 70
    assert all((line % 2 == 0 and line - 1 in val) or (line % 2 and line + 1 in val) for line in val)
    more = [*records, *({"prompt": f"new {i}", "completion": "x"} for i in range(50))]
    assert {
        line for line in lines(chats(write_lines(tmp_path / "b.jsonl", more), val_fraction=0.2), "val") if line < 201
    } == val
    own = chats(tmp_path / "a.jsonl", val_path=str(write_lines(tmp_path / "v.jsonl", records[:3])), val_fraction=0.2)
    assert len(open_split(own, "", "train")) == 200 and len(open_split(own, "", "val")) == 3
    with pytest.raises(DataError, match=r"leave none to hold out \(data.val_fraction = 0\); name .* data.val_path"):
        open_split(chats(tmp_path / "a.jsonl"), "", "val")


def test_workers_and_the_cache_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lmworks.data import encode_examples

    records = [{"messages": talk(f"q{i}" * 5, f"a{i}" * 9)} for i in range(200)]
    records.insert(77, {"messages": []})
    path = write_lines(tmp_path / "a.jsonl", records)
    spec = chats(path, bad_examples="skip", overlong="skip")
    whole = ExampleBatches(spec, seed=0)
    calls: list[Any] = []
    monkeypatch.setattr(encode_examples, "encode_files", lambda *a: calls.append(a))
    assert ExampleBatches(spec, seed=0).digest == whole.digest and not calls  # from the cache
    monkeypatch.undo()
    monkeypatch.setenv("LMWORKS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(encode_examples, "CHUNK_BYTES", 1000)
    monkeypatch.setattr(encode_examples, "available_cores", lambda: 2)
    stages: list[tuple[str, int, int]] = []
    parallel = ExampleBatches(spec, seed=0, progress=lambda *stage: stages.append(stage))
    assert (
        parallel.digest == whole.digest and stages[-1][0] == "encode examples" and stages[-1][1] == stages[-1][2] > 10
    )
    assert parallel.report == whole.report and "line 78" in parallel.report.first_left_out[0]
    changed = write_lines(path, records[1:])
    assert ExampleBatches(chats(changed, bad_examples="skip", overlong="skip"), seed=0).digest != whole.digest


def test_changed_template_is_encoded_again(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"messages": GOOD}])
    template = tmp_path / "t.jinja"
    digests = set()
    for end in ("!", "?"):
        template.write_text(
            "{% for m in messages %}{% generation %}{{ m.content }}" + end + "{% endgeneration %}{% endfor %}"
        )
        split = open_split(chats(path, chat_template=str(template)), "")
        assert bytes(split.sequence(0)[0].tolist()).decode() == f"question{end}answer{end}"
        digests.add(split.examples.digest)
    assert len(digests) == 2


def test_halves_of_surrogate_pairs_become_question_marks(tmp_path: Path) -> None:
    """JSON can spell what no UTF-8 text can hold."""
    folder = write_tokenizer(tmp_path / "hf", plain_template("qwen"))
    call = {"function": {"name": "f", "arguments": {"x": "\ud800"}}}
    said = [*talk("q\ud800", "a"), {"role": "user", "content": "r"}]
    said.append({"role": "assistant", "content": "b", "tool_calls": [call]})
    path = write_lines(tmp_path / "a.jsonl", [{"messages": said}, {"prompt": "\udfff", "completion": "c"}])
    split = open_split(chats(path, tokenizer=str(folder), seq=200), "")
    texts = [split.chat.inner.decode(split.sequence(i)[0].tolist(), skip_special_tokens=False) for i in (0, 1)]
    assert "q?<|im_end|>" in texts[0] and '{"x": "?"}' in texts[0] and texts[1] == "?c<|im_end|>"
