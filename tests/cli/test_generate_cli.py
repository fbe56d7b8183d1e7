"""`lmworks generate` over files of prompts, several answers, and what goes wrong with one of them."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, Protocol

import pytest

from forked import Forked
from lmworks import LLM, SamplingParams
from lmworks.cli import generate
from lmworks.cli.main import main
from lmworks.engine.core.engine import Engine
from lmworks.engine.core.request import Answer, OutputDelta, Result, ResultCallback
from lmworks.spec import LMWorksError, SpecError
from lmworks.train.load_run import load_trained
from tiny import make_spec, train, write_adapter


class Run(Protocol):
    def __call__(self, *arguments: str | Path) -> tuple[int, str, str]: ...


@pytest.fixture
def lmworks(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    def run(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["lmworks", *map(str, arguments)])
        code: int | str | None = 0
        try:
            main()
        except SystemExit as end:
            code = end.code
        out, err = capsys.readouterr()
        return int(code or 0), out, err

    return run


@pytest.fixture(scope="module")
def run_dir(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("generate") / "run"
    train(make_spec(dataset), path)
    return path


def test_a_file_of_prompts_with_wishes_of_their_own(lmworks: Run, run_dir: Path, tmp_path: Path) -> None:
    lines = ['"def"', "[100, 101]", '{"prompt": "x", "max_tokens": 3}', "", '{"prompt": [105], "stop": ["e"]}']
    (tmp_path / "p.jsonl").write_text("\n".join(lines))
    code, out, _ = lmworks(
        "generate", run_dir, "--prompts", tmp_path / "p.jsonl", "--greedy", "--max-tokens", "8", "--json"
    )
    shown = json.loads(out)
    greedy = SamplingParams(temperature=0, max_tokens=8)
    with LLM(run_dir) as llm:
        wishes = [greedy, greedy, SamplingParams(temperature=0, max_tokens=3)]
        expected = llm.generate(["def", [100, 101], "x"], wishes)
        stopped = llm.generate([[105]], SamplingParams(temperature=0, max_tokens=8, stop="e"))[0]
    assert code == 0 and [one["prompt"] for one in shown] == ["def", [100, 101], "x", [105]]
    assert [one["text"] for one in shown] == [result.text for result in [*expected, stopped]]
    assert [len(one["tokens"]) for one in shown][:3] == [8, 8, 3]


def test_a_lone_prompt_keeps_its_own_wishes(lmworks: Run, run_dir: Path, tmp_path: Path) -> None:
    """One answer is written as it comes; several, of which the pieces come in turns, when all are there."""
    (tmp_path / "p.jsonl").write_text('{"prompt": "x", "n": 3, "max_tokens": 6, "seed": 4}')
    arguments = ("generate", run_dir, "--prompts", tmp_path / "p.jsonl", "--max-tokens", "9999", "--top-p", "1")
    with LLM(run_dir) as llm:
        wishes = SamplingParams(temperature=0.8, n=3, max_tokens=6, seed=4)
        (result,) = llm.generate("x", wishes)
    code, out, _ = lmworks(*arguments)
    assert code == 0 and out == "── 1 ──\n" + "".join(f"x{answer.text}\n" for answer in result.answers)


def test_log_probabilities_that_were_asked_for_are_told(lmworks: Run, run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "xy", "logprobs": 2, "prompt_logprobs": 0}')
    code, out, _ = lmworks(
        "generate", run_dir, "--prompts", tmp_path / "p.jsonl", "--greedy", "--max-tokens", "3", "--json"
    )
    with LLM(run_dir) as llm:
        (result,) = llm.generate("xy", SamplingParams(temperature=0, max_tokens=3, logprobs=2, prompt_logprobs=0))
    (shown,) = json.loads(out)
    assert code == 0 and result.logprobs is not None and result.prompt_logprobs is not None
    assert [one["token"] for one in shown["logprobs"]] == shown["tokens"]
    assert [one["logprob"] for one in shown["logprobs"]] == [one.logprob for one in result.logprobs]
    assert shown["logprobs"][0]["top"] == [list(pair) for pair in result.logprobs[0].top]
    assert shown["prompt_logprobs"][0] is None and shown["prompt_logprobs"][1]["token"] == ord("y")


def test_a_model_without_a_tokenizer_answers_in_ids(lmworks: Run, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text("[1, 2, 3]")
    with LLM("tiny") as llm:
        (result,) = llm.generate([1, 2, 3], SamplingParams(temperature=0, max_tokens=4))
    out = lmworks("generate", "tiny", "--prompts", tmp_path / "p.jsonl", "--greedy", "--max-tokens", "4")[1]
    assert out == f"── 1 ──\n{' '.join(map(str, result.token_ids))}\n"


def test_files_that_hold_no_prompts(lmworks: Run, tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text('["a", "b"]')
    (tmp_path / "p.txt").write_text("\n")
    code, _, err = lmworks("generate", "tiny", "--prompts", tmp_path / "p.json")
    assert code == 2 and "p.json: write one JSON value a line, and name it p.jsonl" in err
    code, _, err = lmworks("generate", "tiny", "--prompts", tmp_path / "p.txt")
    assert (
        code == 2 and err == f"lmworks: error: nothing to continue: --prompts {tmp_path / 'p.txt'} holds no prompts\n"
    )


def test_a_text_file_has_one_prompt_a_line(lmworks: Run, run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("def\n\nfor x\n")
    arguments = ("generate", run_dir, "--prompts", tmp_path / "p.txt", "--prompt", "if", "--max-tokens", "4")
    code, out, err = lmworks(*arguments)
    begun = [part.splitlines()[1][:2] for part in out.split("── ") if part.endswith("\n") and len(part) > 5]
    assert (code, err) == (0, "") and begun == ["if", "de", "fo"]
    assert [one["prompt"] for one in json.loads(lmworks(*arguments, "--json")[1])] == ["if", "def", "for x"]


def test_lines_end_with_line_feeds_and_nothing_else(lmworks: Run, run_dir: Path, tmp_path: Path) -> None:
    """JSON allows U+2028 and U+0085 as they are in a text; a form feed is common in old sources."""
    prompts = ["a\u2028b", "c\x85d", "e"]
    (tmp_path / "p.jsonl").write_bytes(
        b"\xef\xbb\xbf" + "\r\n".join(json.dumps(one, ensure_ascii=False) for one in prompts).encode()
    )
    (tmp_path / "p.txt").write_text("f\x0cg\nh\n")
    arguments = ("--max-tokens", "2", "--json")
    for file, expected in (("p.jsonl", prompts), ("p.txt", ["f\x0cg", "h"])):
        code, out, err = lmworks("generate", run_dir, "--prompts", tmp_path / file, *arguments)
        assert (code, err) == (0, "") and [one["prompt"] for one in json.loads(out)] == expected


@pytest.mark.parametrize("prompts", [["x"], ["x", "y"]])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("options", [(), ("--greedy",)])
def test_json_has_one_shape(lmworks: Run, run_dir: Path, prompts: list[str], n: int, options: tuple[str, ...]) -> None:
    """A list of as many entries as prompts, each with the same keys, whatever was asked for."""
    texts = [part for prompt in prompts for part in ("--prompt", prompt)]
    code, out, _ = lmworks("generate", run_dir, *texts, "--n", str(n), "--max-tokens", "3", "--json", *options)
    shown = json.loads(out)
    assert code == 0 and [one["prompt"] for one in shown] == prompts
    of_answer = {"text", "tokens", "finish_reason", "logprobs", "error"}
    for one in shown:
        assert one.keys() == {"prompt", "prompt_tokens", "prompt_logprobs", "answers", *of_answer}
        assert [answer.keys() for answer in one["answers"]] == [of_answer] * n
        assert {key: one[key] for key in of_answer} == one["answers"][0]
        assert one["error"] is one["logprobs"] is one["prompt_logprobs"] is None


def test_several_answers_differ_and_repeat_with_the_seed(lmworks: Run, run_dir: Path) -> None:
    arguments = ("generate", run_dir, "--prompt", "x", "--n", "3", "--temperature", "1.5", "--max-tokens", "12")
    (shown,) = json.loads(lmworks(*arguments, "--json")[1])
    texts = [answer["text"] for answer in shown["answers"]]
    assert len(set(texts)) == 3 and shown["text"] == texts[0]
    assert json.loads(lmworks(*arguments, "--json")[1]) == [shown]
    assert lmworks(*arguments)[1].count("── 1 ──") == 1


def test_the_engine_is_set_from_the_command_line(lmworks: Run, run_dir: Path) -> None:
    plain = lmworks("generate", run_dir, "--prompt", "def", "--greedy", "--max-tokens", "9")
    small = lmworks(
        "generate", run_dir, "engine.block=4", "engine.max_seqs=1", "--prompt", "def", "--greedy", "--max-tokens", "9"
    )
    assert plain == small and plain[0] == 0


def test_adapters_of_one_batch(lmworks: Run, run_dir: Path, tmp_path: Path) -> None:
    """The first is the usual one; a line may name another, or none."""
    for seed, name in enumerate(("one", "two")):
        write_adapter(tmp_path / name, load_trained(run_dir).model.spec, seed)
    (tmp_path / "p.jsonl").write_text('"x"\n{"prompt": "x", "adapter": "two"}\n{"prompt": "x", "adapter": null}\n')
    adapters = [part for name in ("one", "two") for part in ("--adapter", f"{name}={tmp_path / name}")]
    arguments = ("--prompts", tmp_path / "p.jsonl", "--greedy", "--max-tokens", "8", "--json")
    code, out, err = lmworks("generate", run_dir, *arguments, *adapters)
    assert (code, err) == (0, "")
    with LLM(run_dir) as llm:
        plain = llm.generate("x", SamplingParams(temperature=0, max_tokens=8))[0].text
        for name in ("one", "two"):
            llm.add_adapter(name, tmp_path / name)
        wishes = [SamplingParams(temperature=0, max_tokens=8, adapter=name) for name in ("one", "two", None)]
        expected = [result.text for result in llm.generate(["x"] * 3, wishes)]
    assert [one["text"] for one in json.loads(out)] == expected
    assert expected[2] == plain and len(set(expected)) == 3


def test_an_empty_prompt_begins_a_document(lmworks: Run, run_dir: Path) -> None:
    (shown,) = json.loads(lmworks("generate", run_dir, "--prompt", "", "--greedy", "--max-tokens", "5", "--json")[1])
    with LLM(run_dir) as llm:
        assert shown["text"] == llm.generate([[256]], SamplingParams(temperature=0, max_tokens=5))[0].text
    assert shown["prompt"] == "" and shown["prompt_tokens"] == 1


def test_one_bad_prompt_of_several_fails_alone(lmworks: Run, run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text(f'"x"\n{json.dumps([9999])}\n"y"\n')
    arguments = ("generate", run_dir, "--prompts", tmp_path / "p.jsonl", "--max-tokens", "4")
    code, out, _ = lmworks(*arguments, "--json")
    shown = json.loads(out)
    assert code == 1 and [one["finish_reason"] for one in shown] == ["length", "error", "length"]
    assert "token 9999" in shown[1]["error"]
    assert "error: the prompt holds token 9999" in lmworks(*arguments)[1]


GOOD = Answer([5], "fine", "length")
BAD = Answer([6, 7], "half {", "error", error="its shape cannot be followed")


def answered(monkeypatch: pytest.MonkeyPatch, *answers: Answer) -> None:
    """Every prompt has these answers."""

    def generate(self: LLM, prompts: list[object], params: object, progress: bool, told: ResultCallback) -> None:
        for place in range(len(prompts)):
            told(place, Result([1], list(answers)))

    monkeypatch.setattr(LLM, "generate", generate)


@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize("prompts", [1, 2])
def test_one_bad_answer_of_several_fails_alone(
    lmworks: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: int, prompts: int
) -> None:
    answers = [GOOD, GOOD]
    answers[bad] = BAD
    answered(monkeypatch, *answers)
    (tmp_path / "p.jsonl").write_text("[1]\n" * prompts)
    arguments = ("generate", "tiny", "--prompts", tmp_path / "p.jsonl", "--n", "2")
    code, out, err = lmworks(*arguments)
    lines = ["fine", "fine"]
    lines[bad] = f"error: {BAD.error}"
    assert (code, err) == (1, "")
    assert out.splitlines() == [line for place in range(prompts) for line in (f"── {place + 1} ──", *lines)]
    code, out, err = lmworks(*arguments, "--json")
    shown = json.loads(out)
    first = shown[0]
    assert len(shown) == prompts
    assert (code, err) == (1, "") and [one.get("error") for one in first["answers"]] == [one.error for one in answers]
    assert first.get("error") == answers[0].error  # the first one stands on top


def test_answers_that_all_fail_alike_are_said_once(
    lmworks: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered(monkeypatch, BAD, BAD)
    (tmp_path / "one.jsonl").write_text("[1]\n")
    (tmp_path / "two.jsonl").write_text("[1]\n[1]\n")
    code, out, err = lmworks("generate", "tiny", "--prompts", tmp_path / "one.jsonl", "--n", "2")
    assert (code, out, err) == (2, "", f"lmworks: error: {BAD.error}\n")
    code, out, _ = lmworks("generate", "tiny", "--prompts", tmp_path / "two.jsonl", "--n", "2")
    assert (code, out) == (1, f"── 1 ──\nerror: {BAD.error}\n── 2 ──\nerror: {BAD.error}\n")


def fail_after_the_first(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    step, done = Engine.step, []

    def failing(self: Engine) -> list[OutputDelta]:
        if done:
            raise error
        pieces = step(self)
        done.extend(piece for piece in pieces if piece.result is not None)
        return pieces

    monkeypatch.setattr(Engine, "step", failing)


def test_answers_are_not_lost_when_the_engine_fails(
    lmworks: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "p.jsonl").write_text("[1, 2]\n[3]\n[4]\n")
    prompts = ("--prompts", tmp_path / "p.jsonl", "--greedy", "--max-tokens", "3")
    arguments = ("generate", "tiny", "engine.max_seqs=1", *prompts)
    first, *others = json.loads(lmworks(*arguments, "--json")[1])
    nothing = {
        "text": "",
        "tokens": [],
        "logprobs": None,
        "prompt_tokens": None,
        "prompt_logprobs": None,
        "answers": [],
    }
    failed = [
        {"prompt": one["prompt"], **nothing, "finish_reason": "error", "error": "rank 1 is gone"} for one in others
    ]
    with monkeypatch.context() as patch:
        fail_after_the_first(patch, LMWorksError("rank 1 is gone"))
        code, out, err = lmworks(*arguments, "--json")
    assert (code, err) == (1, "lmworks: error: rank 1 is gone\n")
    assert json.loads(out) == [first, *failed]
    with monkeypatch.context() as patch:
        fail_after_the_first(patch, RuntimeError("a bug"))
        with pytest.raises(RuntimeError, match="a bug"):
            lmworks(*arguments)
    assert capsys.readouterr().out == f"── 1 ──\n{' '.join(map(str, first['tokens']))}\n"


def test_a_failure_before_any_answer_is_all_that_is_said(
    lmworks: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(self: Engine) -> None:
        raise LMWorksError("rank 1 is gone")

    monkeypatch.setattr(Engine, "step", failing)
    (tmp_path / "p.jsonl").write_text("[1, 2]\n[3]\n")
    told = lmworks("generate", "tiny", "--prompts", tmp_path / "p.jsonl", "--json")
    assert told == (1, "", "lmworks: error: rank 1 is gone\n")


def test_a_log_probability_that_is_no_number_is_null(
    lmworks: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = generate.open_llm

    def spoilt(*arguments: Any) -> LLM:
        llm = load(*arguments)
        llm.native.runner.model.embed.weight.data[7] = float("nan")  # type: ignore[attr-defined]
        return llm

    monkeypatch.setattr(generate, "open_llm", spoilt)
    (tmp_path / "p.jsonl").write_text('[1, 2]\n{"prompt": [3, 7, 4], "prompt_logprobs": 0}\n')
    code, out, _ = lmworks("generate", "tiny", "--prompts", tmp_path / "p.jsonl", "--max-tokens", "3", "--json")
    good, bad = json.loads(out, parse_constant=pytest.fail)
    assert code == 1 and len(good["tokens"]) == 3 and "not finite" in bad["error"]
    assert bad["prompt_logprobs"][2] == {"token": 4, "logprob": None, "top": []}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a disk that is always full")
def test_a_full_disk_is_said_while_text_comes(run_dir: Path) -> None:
    def full() -> None:
        os.dup2(os.open("/dev/full", os.O_WRONLY), 1)

    process = Forked("generate", run_dir, "--prompt", "x", "--max-tokens", "4", first=full)
    _, err = process.communicate()
    assert process.returncode == 1
    assert err == "lmworks: error: the result could not be written: No space left on device\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "give --prompt TEXT or --prompts FILE"),
        (["--prompt", "x", "engine.blok=3"], "unknown key 'engine.blok'"),
        (["--prompt", "x", "model.layers=3"], "'model' is no part of the engine"),
        (["--prompt", "x", "engine=3"], "'engine' is no part of the engine"),
        (["--prompt", "x", "--engine", "tgi"], "engine = 'tgi' is not one of"),
        (["--prompt", "x", "--engine", "vllm"], "write one with `lmworks checkpoint export"),
        (["--prompt", "x", "--n", "0"], "n = 0 is out of range"),
        (["--prompt", "\udcff"], "--prompt is not valid UTF-8"),
        (["--prompt", "x", "--adapter", "sql"], "--adapter sql: write NAME=FOLDER"),
        (["--prompt", "x", "--adapter", "a=b", "--adapter", "a=c"], "two adapters are called 'a'"),
        (["--prompts", "FILE/none.txt"], "none.txt: No such file"),
        (["--prompts", "FILE/bad.jsonl"], "bad.jsonl:1: not JSON"),
        (["--prompts", "FILE/what.jsonl"], "what.jsonl:2: expected a string, a list of token ids, or an object"),
        (["--prompts", "FILE/key.jsonl"], "key.jsonl:1: unknown key 'max_token'"),
        (["--prompts", "FILE/value.jsonl"], "value.jsonl:1: top_p = 2"),
        (["--prompts", "FILE/latin.txt"], "latin.txt: not valid UTF-8"),
        (["--prompts", "FILE/deep.jsonl"], "deep.jsonl:2: lists or objects within one another, too deep to be read"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    lmworks: Run, run_dir: Path, tmp_path: Path, arguments: list[str], said: str
) -> None:
    (tmp_path / "bad.jsonl").write_text("{")
    (tmp_path / "what.jsonl").write_text('"x"\n[1.5]')
    (tmp_path / "key.jsonl").write_text('{"prompt": "x", "max_token": 3}')
    (tmp_path / "value.jsonl").write_text('{"prompt": "x", "top_p": 2}')
    (tmp_path / "latin.txt").write_bytes(b"na\xefve\n")
    (tmp_path / "deep.jsonl").write_text('"x"\n' + "[" * 100_000)
    code, out, err = lmworks("generate", run_dir, *(one.replace("FILE", str(tmp_path)) for one in arguments))
    assert (code, out) == (2, "") and said in err and len(err.splitlines()) == 1


def test_a_line_too_deep_is_named_wherever_it_is_found_out() -> None:
    """At some depth it can just be read, and no longer be quoted."""
    for depth in range(800, 1100):
        with pytest.raises(SpecError, match=r"^p\.jsonl:3: "):
            generate.read_request(
                f'{{"prompt": "x", "top_p": {"[" * depth}1{"]" * depth}}}', "p.jsonl:3", SamplingParams()
            )
