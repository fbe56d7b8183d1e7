"""`lmworks chat` through a pipe and at a terminal: what the model is told, what is forgotten, how an answer stops."""

from __future__ import annotations

import io
import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lmworks import LLM, SamplingParams
from lmworks.cli.chat import ChatSession, parse_variables
from lmworks.cli.main import main
from lmworks.data.chat_template import plain
from lmworks.spec import SpecError
from tiny import make_spec, train


@pytest.fixture(scope="module")
def run_dir(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("chat") / "run"
    train(make_spec(dataset, "model.context=256"), path)
    return path


@pytest.fixture(scope="module")
def llm(run_dir: Path) -> LLM:
    return LLM(run_dir)


PARAMS = SamplingParams(temperature=0, max_tokens=6)


def talk(
    llm: LLM, lines: list[str], monkeypatch: pytest.MonkeyPatch, system: str = "", params: SamplingParams = PARAMS
) -> tuple[ChatSession, list[str]]:
    """The conversation, and every prompt that the engine got."""
    prompts: list[str] = []
    stream = LLM.stream

    def noted(self: LLM, prompt: Any, params: Any = None) -> Any:
        prompts.append(bytes(prompt).decode())
        return stream(self, prompt, params)

    monkeypatch.setattr(LLM, "stream", noted)
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    talked = ChatSession(llm, params, system)
    talked.run()
    return talked, prompts


def test_lines_of_a_pipe_are_answered(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("def\n\n/reset\n/what\nif\n/quit\nnever\n"))
    arguments = ["--temperature", "0", "--max-tokens", "6", "--system", "s"]
    monkeypatch.setattr(sys, "argv", ["lmworks", "chat", str(run_dir), *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    assert not end.value.code
    lines = capsys.readouterr().out.splitlines()
    with LLM(run_dir) as llm:
        prompts = [f"System: s\nUser: {line}\nAssistant:" for line in ("def", "if")]
        stops = SamplingParams(temperature=0, max_tokens=6, stop="\nUser:")
        answers = [result.text for result in llm.generate(prompts, stops)]
    first, second = answers[0].splitlines() or [""], answers[1].splitlines() or [""]
    assert lines == [*first, "(cleared)", next(line for line in lines if "no such command" in line), *second]


def test_what_was_said_is_told_again(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    talked, prompts = talk(llm, ["def", "if"], monkeypatch, system="kind")
    answer = talked.messages[2]["content"]
    assert prompts[0] == "System: kind\nUser: def\nAssistant:"
    assert prompts[1] == f"System: kind\nUser: def\nAssistant: {answer}\nUser: if\nAssistant:"
    assert [one["role"] for one in talked.messages] == ["system", "user", "assistant", "user", "assistant"]


def test_the_oldest_is_forgotten_when_the_context_is_full(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    talked, prompts = talk(llm, ["a" * 90, "b" * 90, "c" * 90], monkeypatch, system="kind")
    assert "b" * 90 in prompts[1] and "a" * 90 in prompts[1]
    assert "a" * 90 not in prompts[2] and "b" * 90 in prompts[2] and prompts[2].startswith("System: kind\n")
    assert "oldest messages are dropped" in capsys.readouterr().err
    assert len(plain(talked.messages)) <= llm.context


def test_a_message_that_cannot_fit_is_refused_and_the_next_is_answered(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    talked, prompts = talk(llm, ["x" * 300, "def"], monkeypatch)
    assert "the prompt has" in capsys.readouterr().err
    assert prompts[1] == "User: def\nAssistant:" and len(talked.messages) == 2


def test_a_message_that_the_template_refuses_ends_no_talk(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def picky(messages: Any, tools: Any = ()) -> str:
        if messages[-1]["content"] == "bad":
            raise SpecError("the chat template of this model refuses these messages: no")
        return plain(messages)

    monkeypatch.setattr("lmworks.data.chat_template.plain", picky)
    talked, prompts = talk(llm, ["bad", "def"], monkeypatch)
    assert "refuses these messages: no" in capsys.readouterr().err
    assert prompts == ["User: def\nAssistant:"] and len(talked.messages) == 2


def test_what_is_no_text_is_said_to_be_none(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\n"), encoding="utf-8"))
    with pytest.raises(SpecError, match="not valid UTF-8"):
        ChatSession(llm, PARAMS, "").run()


def test_an_interrupt_stops_the_answer_not_the_talk(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    step, steps = llm.native.step, 0

    def interrupted() -> Any:
        nonlocal steps
        steps += 1
        if steps == 3:
            signal.raise_signal(signal.SIGINT)
        return step()

    monkeypatch.setattr(llm.native, "step", interrupted)
    long = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    talked, prompts = talk(llm, ["def", "if"], monkeypatch, params=long)
    out = capsys.readouterr().out
    assert out.count("(stopped)") == 1 and len(prompts) == 2 and not llm.native.requests
    assert len(talked.messages[1]["content"]) < 4  # what was said until then is kept


def test_at_a_terminal_control_d_leaves(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed: Iterator[Any] = iter(["def", KeyboardInterrupt()])

    def typing(prompt: str) -> str:
        line = next(typed)
        if isinstance(line, BaseException):
            raise line
        return str(line)

    monkeypatch.setattr("builtins.input", typing)
    talked = ChatSession(llm, PARAMS, "")
    talked.interactive = True
    talked.run()
    out = capsys.readouterr().out
    assert out.startswith("/reset clears the conversation") and len(talked.messages) == 2


def test_a_model_with_a_template_is_talked_to_in_its_own_way(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lmworks.train.load_run import load_trained

    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}>"})
    )
    load_trained(run_dir).model.save_hf(tmp_path)
    with LLM(run_dir) as llm:
        llm.folder = tmp_path  # the tokenizer of the run: bytes
        _, prompts = talk(llm, ["def"], monkeypatch)
    assert prompts == ["[user] def\n>"]


def test_variables_of_the_template_are_given_by_name(run_dir: Path, tmp_path: Path) -> None:
    template = "{{ messages[0].content }}{% if not enable_thinking | default(true) %}<no thinking>{% endif %}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    said = [{"role": "user", "content": "hi"}]
    with LLM(run_dir) as llm:
        with pytest.raises(SpecError, match="no chat template and does not support chat_template_kwargs"):
            llm.chat({"enable_thinking": False})
        llm.folder = tmp_path
        assert llm.chat().render(said) == "hi"
        assert llm.chat({"enable_thinking": False}).render(said) == "hi<no thinking>"
    assert parse_variables('{"enable_thinking": false}') == {"enable_thinking": False}
    for wrong in ("[]", "enable_thinking"):
        with pytest.raises(SpecError, match="--chat-template-kwargs"):
            parse_variables(wrong)
