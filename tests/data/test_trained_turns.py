"""Templates render as `transformers` renders them, and the trained tokens are its `assistant_masks`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chat_files import talk, write_sentencepiece, write_tokenizer
from chat_templates import TEMPLATES, plain_template, tagged
from lmworks.data.chat_template import DIALOGUE, Chat, Message, compile_template, plain
from lmworks.data.chat_tokenizer import ChatTokenizer, Encoded
from lmworks.data.trained_turns import TurnRenderer, Untrainable
from lmworks.spec import SpecError
from lmworks.spec.run import DataSpec

transformers = pytest.importorskip("transformers")

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Paris 数"}}}
CALLS: list[Message] = [
    {"role": "user", "content": "what is the weather?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "assistant: 21 naïve degrees"},
    {"role": "assistant", "content": "It is 21 degrees 🙂"},
]
TALK = talk("Hi <b>you</b>", "  Hello 🙂  ", "naïve 数?", "one two three", "and this?", "the answer\nis a number")
SYSTEM: Message = {"role": "system", "content": "Be kind."}
CASES: dict[str, dict[str, Any]] = {
    "turns": {"messages": TALK},
    "one": {"messages": TALK[:2]},
    "question": {"messages": TALK[:3]},
    "system": {"messages": [SYSTEM, *TALK]},
    "calls": {"messages": CALLS, "tools": TOOLS},
    "tools": {"messages": TALK, "tools": TOOLS},
}
NOT_FOR = {  # what a template refuses, in transformers and here
    ("gemma", "system"),
    ("gemma", "calls"),
    ("mistral", "calls"),
}


@pytest.fixture(scope="module", params=["byte-level", "prepend", "metaspace"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tokenizer")
    return (
        write_tokenizer(root)
        if request.param == "byte-level"
        else write_sentencepiece(root, request.param == "metaspace")
    )


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    return transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), bos_token="<s>", eos_token="<|im_end|>"
    )


def chat_of(folder: Path, template: str, tmp_path: Path) -> ChatTokenizer:
    path = tmp_path / "template.jinja"
    path.write_text(template, encoding="utf-8")
    return ChatTokenizer.open(DataSpec(tokenizer=str(folder), chat_template=str(path)), "")


def trained_texts(chat: ChatTokenizer, messages: list[Message], tools: Any = ()) -> list[list[str]]:
    """The spans of each text that the conversation becomes."""
    return [[one.text[start:stop] for start, stop in one.trained] for one in chat.renderer.turns(messages, tools)]


@pytest.mark.parametrize("folder", ["byte-level"], indirect=True)  # text, before any tokenizer sees it
@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("prompt", [True, False])
def test_rendering_equals_transformers(theirs: Any, name: str, case: str, prompt: bool) -> None:
    config = {"bos_token": "<s>", "eos_token": "<|im_end|>"}
    render = compile_template(plain_template(name), config)
    messages, tools = CASES[case]["messages"], CASES[case].get("tools", ())

    def expected() -> str:
        text: str = theirs.apply_chat_template(
            messages,
            tools=list(tools) or None,
            chat_template=plain_template(name),
            add_generation_prompt=prompt,
            tokenize=False,
        )
        return text

    if (name, case) in NOT_FOR:
        with pytest.raises(Exception, match=r"support|alternate"):
            expected()
        with pytest.raises(SpecError, match="refuses these messages"):
            render(messages, tools)
        return
    assert render(messages, tools, {"add_generation_prompt": prompt}) == expected()
    assert compile_template(tagged(name), config)(messages, tools, {"add_generation_prompt": prompt}) == expected()


def assistant_masks(theirs: Any, name: str, case: str) -> tuple[list[int], list[int]]:
    made = theirs.apply_chat_template(
        CASES[case]["messages"],
        tools=CASES[case].get("tools"),
        chat_template=tagged(name),
        return_assistant_tokens_mask=True,
        return_dict=True,
    )
    return made["input_ids"], made["assistant_masks"]


def as_lists(encoded: Encoded) -> tuple[list[int], list[int]]:
    return encoded.ids.tolist(), encoded.trained.astype(int).tolist()


MASKED = [
    (name, case) for name in TEMPLATES for case in CASES if "[[" in TEMPLATES[name] and (name, case) not in NOT_FOR
]


@pytest.mark.parametrize(("name", "case"), MASKED)
def test_generation_masks_equal_transformers(folder: Path, theirs: Any, tmp_path: Path, name: str, case: str) -> None:
    chat = chat_of(folder, tagged(name), tmp_path)
    (encoded,) = chat.turns(CASES[case]["messages"], CASES[case].get("tools", ()))
    ids, masks = assistant_masks(theirs, name, case)
    assert as_lists(encoded) == (ids, masks) and any(masks)


@pytest.mark.parametrize(("name", "case"), MASKED)
def test_masks_without_generation_equal_those_with(
    folder: Path, theirs: Any, tmp_path: Path, name: str, case: str
) -> None:
    """The tags are put where the assistant's part is; without them the same tokens are found by rendering."""
    chat = chat_of(folder, plain_template(name), tmp_path)
    found = chat.turns(CASES[case]["messages"], CASES[case].get("tools", ()))
    ids, masks = assistant_masks(theirs, name, case)
    if (name, case) == ("mistral", "tools"):
        assert len(found) == 3  # the tools stand before the last question: see below
        return
    (encoded,) = found
    if name == "phi" and case != "question":  # what closes the conversation is trained, as a last turn ends with it
        closing = masks[::-1].index(1)
        assert encoded.ids[-1:].tolist() == chat.encode("<|im_end|>") and closing >= 2
        masks[-closing:] = [1] * closing
    assert as_lists(encoded) == (ids, masks)


def test_tool_results_and_prompts_are_not_trained(folder: Path, tmp_path: Path) -> None:
    chat = chat_of(folder, plain_template("qwen"), tmp_path)
    assert trained_texts(chat, CALLS, TOOLS) == [
        ['<tool_call>weather{"city": "Paris 数"}</tool_call><|im_end|>', "It is 21 degrees 🙂<|im_end|>"]
    ]
    llama = chat_of(folder, plain_template("llama3"), tmp_path)
    assert trained_texts(llama, [SYSTEM, *TALK[:4]]) == [["Hello 🙂<|eot_id|>", "one two three<|eot_id|>"]]


def test_only_the_completion_is_trained(folder: Path, tmp_path: Path) -> None:
    for template in (plain_template("qwen"), tagged("qwen")):
        renderer = chat_of(folder, template, tmp_path).renderer
        (rendered,) = renderer.turns(TALK, first=3)
        assert [rendered.text[a:b] for a, b in rendered.trained] == [
            "one two three<|im_end|>",
            "the answer\nis a number<|im_end|>",
        ]


def test_dropped_reasoning_gives_a_text_for_each_turn(folder: Path, tmp_path: Path) -> None:
    """Each trained turn stands as it is generated, after the prompt that is given at that time."""
    chat = chat_of(folder, plain_template("qwen-thinking"), tmp_path)
    said = talk("q1", "<think>\nr1\n</think>\n\na1", "q2", "<think>\nr2\n</think>\n\na2")
    first, last = chat.renderer.turns(said)
    assert (
        first.text == "<|im_start|>user\nq1<|im_end|>\n<|im_start|>assistant\n<think>\nr1\n</think>\n\na1<|im_end|>\n"
    )
    assert "r1" not in last.text and last.text.startswith(chat.renderer.prompt(said[:3]))
    assert trained_texts(chat, said) == [
        ["<think>\nr1\n</think>\n\na1<|im_end|>"],
        ["<think>\nr2\n</think>\n\na2<|im_end|>"],
    ]
    named = [*talk("q1"), {"role": "assistant", "reasoning": "r1", "content": "a1"}]
    assert trained_texts(chat, named) == [["<think>\nr1\n</think>\n\na1<|im_end|>"]]


def test_texts_of_a_template_that_moves_tools(folder: Path, tmp_path: Path) -> None:
    chat = chat_of(folder, plain_template("mistral"), tmp_path)
    texts = chat.renderer.turns(TALK, TOOLS)
    for number, rendered in zip((1, 3, 5), texts, strict=True):
        prompt = chat.renderer.prompt(TALK[:number], TOOLS)
        assert rendered.text == f"{prompt} {TALK[number]['content']}<|im_end|>"
        assert rendered.trained == ((len(prompt), len(rendered.text)),)


def test_prompt_that_no_turn_begins_with_is_refused(folder: Path, tmp_path: Path) -> None:
    reasoner = plain_template("deepseek").replace("REASONER", "true")
    with pytest.raises(Untrainable, match=r"with '<think>\\n', and .* goes on with 'a<｜end") as refused:
        chat_of(folder, reasoner, tmp_path).renderer.turns(talk("q", "a"))
    assert "{% generation %}" in str(refused.value) and "\n" not in str(refused.value)
    silent = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    with pytest.raises(Untrainable, match="does not render the content of an assistant turn, which ends with 'a'"):
        chat_of(folder, silent, tmp_path).renderer.turns(talk("q", "a"))


def test_end_of_text_at_the_end_alone_is_learned_by_every_turn(folder: Path, tmp_path: Path) -> None:
    """If a turn in the middle were trained without it, the model would not learn to stop there."""
    template = (
        "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
        "{{ '' if add_generation_prompt else eos_token }}"
    )
    chat = chat_of(folder, template, tmp_path)
    assert trained_texts(chat, talk("q", "a", "r", "b")) == [
        ["assistant: a\n<|im_end|>"],
        ["assistant: b\n<|im_end|>"],
    ]


def test_date_does_not_depend_on_the_day() -> None:
    template = plain_template("llama3").replace("DATED", "true")
    renderer = TurnRenderer(template, {"bos_token": "<s>"}, ["<|eot_id|>"])
    assert "Today Date: 26 Jul 2024" in renderer.turns(TALK[:2])[0].text


def test_characters_of_marks_are_refused_in_messages(folder: Path, tmp_path: Path) -> None:
    chat = chat_of(folder, tagged("qwen"), tmp_path)
    with pytest.raises(SpecError, match="noncharacter"):
        chat.turns(talk("q", "a\ufdd0b"), ())


def test_nested_and_captured_generation_blocks() -> None:
    """Also where the block is in a macro or a variable, whose characters are written later."""
    template = (
        "{% macro say(m) %}{% generation %}{{ m.content }}{% generation %}!{% endgeneration %}{% endgeneration %}"
        "{% endmacro %}{% set all %}{% for m in messages %}<{% if m.role == 'assistant' %}{{ say(m) }}{% endif %}>"
        "{% endfor %}{% endset %}{{ bos_token }}{{ all }}"
    )
    (rendered,) = TurnRenderer(template, {"bos_token": "<s>"}, []).turns(talk("q", "abc", "q", "d"))
    assert rendered.text == "<s><><abc!><><d!>" and rendered.trained == ((6, 10), (14, 16))


def test_dialogue_of_models_without_template(folder: Path, tmp_path: Path) -> None:
    """What is trained is what `lmworks chat` asks of the run afterwards."""
    chat = ChatTokenizer.open(DataSpec(tokenizer="bytes"), "")
    (encoded,) = chat.turns([SYSTEM, *talk("q", "a", "r", "b")], ())
    text = "System: Be kind.\nUser: q\nAssistant: a\0\nUser: r\nAssistant: b\0\n"
    assert encoded.ids.tolist() == [256 if c == "\0" else ord(c) for c in text]
    assert "".join(text[i] for i in np.flatnonzero(encoded.trained)) == " a\0 b\0"
    assert chat.renderer.prompt(talk("q")) == plain(talk("q"))
    with pytest.raises(SpecError, match="without a chat template there is no role tool"):
        chat.turns(CALLS, ())


def test_run_folder_answers_with_the_template_it_was_trained_with(folder: Path, tmp_path: Path) -> None:
    from lmworks.data.chat_tokenizer import copy_tokenizer, load_model_tokenizer

    run = tmp_path / "run"
    copy_tokenizer(DataSpec(tokenizer="bytes"), "", run / "tokenizer")
    tokenizer = load_model_tokenizer(run)
    chat = Chat.of(run, tokenizer, tokenizer.encode)
    trained = ChatTokenizer.open(DataSpec(), str(run))
    assert trained.template == DIALOGUE and tokenizer.vocab_size == 257
    (encoded,) = trained.turns(talk("q", "a"), ())
    answered, _ = chat.prompt(talk("q"), 100)
    assert encoded.ids[: len(answered)].tolist() == answered and encoded.trained.argmax() == len(answered)
    own = tmp_path / "own.jinja"
    own.write_text(tagged("zephyr"), encoding="utf-8")
    copy_tokenizer(DataSpec(tokenizer="bytes", chat_template=str(own)), "", run / "tokenizer")
    assert ChatTokenizer.open(DataSpec(), str(run)).template == tagged("zephyr")  # kept, for the next method
    write_tokenizer(tmp_path / "hf", plain_template("qwen"))
    copy_tokenizer(DataSpec(), str(tmp_path / "hf"), run / "tokenizer")
    tokenizer = load_model_tokenizer(run)
    chat = Chat.of(run, tokenizer, tokenizer.encode)
    assert chat.render(talk("q")) == "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
    auto = transformers.AutoTokenizer.from_pretrained(str(run / "tokenizer"))
    assert auto.apply_chat_template(talk("q"), add_generation_prompt=True)["input_ids"] == chat.prompt(talk("q"), 99)[0]


def test_turn_that_no_special_token_ends_is_refused(folder: Path, tmp_path: Path) -> None:
    """GLM's is such a template: the next turn's header ends a turn."""
    template = "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{% endfor %}"
    chat = chat_of(folder, template, tmp_path)
    with pytest.raises(Untrainable, match=r"turn as '<\|assistant\|>a': the model would not learn to stop"):
        chat.renderer.turns(talk("q", "a"))


def test_arguments_of_calls_as_objects_or_json(theirs: Any) -> None:
    """A template that joins texts (DeepSeek's) gets JSON; `tojson` with options is that of transformers."""
    joins = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}"
        "{{ c.function.name + c.function.arguments }}{% endfor %}{% endfor %}"
    )
    dumps = joins.replace("c.function.arguments", "c.function.arguments | tojson(ensure_ascii=True, indent=1)")
    assert compile_template(joins, {})(CALLS) == 'weather{"city": "Paris 数"}'
    expected = theirs.apply_chat_template(CALLS, chat_template=dumps, tokenize=False)
    assert compile_template(dumps, {})(CALLS) == expected == 'weather{\n "city": "Paris \\u6570"\n}'


@pytest.mark.parametrize(
    ("name", "end"), [("qwen", "<|im_end|>"), ("phi", "<|end|>"), ("llama3", "<|eot_id|>"), ("gemma", "<end_of_turn>")]
)
def test_answers_stop_at_the_end_of_a_turn(tmp_path: Path, name: str, end: str) -> None:
    """Also where the model's own end-of-text is another token: a base model that is tuned with a template."""
    from lmworks.data.chat_tokenizer import copy_tokenizer, end_token_ids

    hf = write_tokenizer(tmp_path / "hf", plain_template(name), eos="<|endoftext|>")
    (hf / "config.json").write_text('{"eos_token_id": [3, 4]}')
    copy_tokenizer(DataSpec(), str(hf), tmp_path / "run/tokenizer")
    encode = ChatTokenizer.open(DataSpec(), str(hf)).encode
    assert end_token_ids(tmp_path / "run/tokenizer") == (*encode("<|endoftext|>"), 3, 4, *encode(end))


def test_end_tokens_are_those_of_the_first_file_that_names_any(tmp_path: Path) -> None:
    """A generation_config.json without eos_token_id says nothing of it: `transformers` takes the model's."""
    from lmworks.data.chat_tokenizer import end_token_ids

    assert end_token_ids(tmp_path) == ()
    (tmp_path / "config.json").write_text('{"eos_token_id": [3, 4]}')
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6}')
    assert end_token_ids(tmp_path) == (3, 4)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 7}')
    assert end_token_ids(tmp_path) == (7,)
