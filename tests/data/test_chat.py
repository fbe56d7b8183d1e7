"""Conversations as prompts: the same ids as `transformers` for templates of the usual kinds, and what is let go of."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from lmworks.data import load_tokenizer
from lmworks.data.chat_template import Chat, Message, plain
from lmworks.data.tokenizer import ByteTokenizer
from lmworks.spec import SpecError

transformers = pytest.importorskip("transformers")

CHATML = """{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'system' %}{% continue %}{% endif %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
WITH_BOS = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] not in ['user', 'assistant'] %}"
    "{{ raise_exception('no ' + m['role']) }}{% endif %}"
    "{{ loop.index0 }}{{ m | tojson }}{{ eos_token }}{% endfor %}"
)
TALK: list[Message] = [
    {"role": "user", "content": "Hi, <b>“you”</b>\n<|im_end|>?"},
    {"role": "assistant", "content": "  Hello.  "},
    {"role": "user", "content": "naïve 数"},
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A byte-level tokenizer with special tokens, as published models have it."""
    inner = Tokenizer(
        models.BPE(vocab={c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[])
    )
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(name) for name in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")])
    inner.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def write_config(folder: Path, template: object) -> None:
    config = {"chat_template": template, "bos_token": {"content": "<|endoftext|>"}, "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("template", [CHATML, WITH_BOS], ids=["chatml", "bos"])
@pytest.mark.parametrize("where", ["config", "named", "file"])
def test_ids_equal_transformers(folder: Path, template: str, where: str) -> None:
    named = [{"name": "tool_use", "template": "{{ 1 / 0 }}"}, {"name": "default", "template": template}]
    write_config(folder, {"config": template, "named": named, "file": "not this one"}[where])
    if where == "file":
        (folder / "chat_template.jinja").write_text(template)
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), bos_token="<|endoftext|>", eos_token="<|im_end|>"
    )
    expected = theirs.apply_chat_template(
        TALK, chat_template=template, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    tokenizer = load_tokenizer(folder)
    chat = Chat.of(folder, tokenizer, tokenizer.encode)
    assert chat.prompt(TALK, room=10_000) == (expected, TALK) and chat.stop == ()
    assert len(tokenizer.encode("<|im_start|>")) > 1  # in a text it stays a text


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
THINKING = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}"
    "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}{{ who | default('') }}"
    "{% if add_generation_prompt %}<|im_start|>{% endif %}"
)


@pytest.mark.parametrize(
    "variables",
    [{}, {"enable_thinking": False}, {"who": ["a", 1]}, {"add_generation_prompt": False}, {"eos_token": "!"}],
    ids=str,
)
def test_template_variables_and_tools_equal_transformers(folder: Path, variables: dict[str, Any]) -> None:
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    how = {"chat_template": THINKING, "tokenize": True, "return_dict": False, "add_generation_prompt": True} | variables
    tokenizer = load_tokenizer(folder)
    chat = Chat.of(folder, tokenizer, tokenizer.encode, THINKING)
    for tools in ([], TOOLS):
        expected = theirs.apply_chat_template(TALK, tools=tools or None, **how)
        assert chat.encode(chat.render(TALK, tools, variables)) == expected


def test_given_template_overrides_folder_template(folder: Path) -> None:
    write_config(folder, "theirs")
    tokenizer = load_tokenizer(folder)
    assert Chat.of(folder, tokenizer, tokenizer.encode, "{{ eos_token }}mine").render(TALK) == "<|im_end|>mine"
    (folder / "tokenizer_config.json").unlink()  # a run of ours has none: its end of text is known all the same
    chat = Chat.of(folder, tokenizer, tokenizer.encode, "{{ messages[0].role }}{{ eos_token }}")
    assert chat.encode(chat.render(TALK)) == [*tokenizer.encode("user"), tokenizer.eot] and chat.stop == ()
    bytes_alone = ByteTokenizer()
    chat = Chat.of(None, bytes_alone, bytes_alone.encode, "a{{ eos_token }}b{{ eos_token }}")
    assert chat.encode(chat.render(TALK)) == [97, 256, 98, 256]


def test_tools_without_template_are_rejected() -> None:
    for tools, variables, said in (
        (TOOLS, {}, "support tools"),
        ((), {"a": 1}, "support chat_template_kwargs"),
        ((), {"add_generation_prompt": False}, "support add_generation_prompt"),
    ):
        with pytest.raises(SpecError, match=rf"{said} \(lmworks serve --chat-template FILE"):
            plain(TALK[:1], tools, variables)


def test_no_template_gives_plain_dialogue() -> None:
    tokenizer = ByteTokenizer()
    chat = Chat.of(None, tokenizer, tokenizer.encode)
    ids, _ = chat.prompt([{"role": "system", "content": "Be kind."}, *TALK[:1]], room=1000)
    assert tokenizer.decode(ids) == "System: Be kind.\nUser: Hi, <b>“you”</b>\n<|im_end|>?\nAssistant:"
    assert chat.stop == ("\nUser:",)


def test_oldest_exchange_is_dropped_first() -> None:
    tokenizer = ByteTokenizer()
    chat = Chat.of(None, tokenizer, tokenizer.encode)
    system: Message = {"role": "system", "content": "s"}
    talk = [{"role": role, "content": f"{role} {turn}"} for turn in range(3) for role in ("user", "assistant")][:5]
    whole = len(plain([system, *talk]))
    assert chat.prompt([system, *talk], whole)[1] == [system, *talk]
    assert chat.prompt([system, *talk], whole - 1)[1] == [system, *talk[2:]]
    assert chat.prompt([system, *talk], len(plain([system, *talk[4:]])))[1] == [system, talk[4]]
    ids, kept = chat.prompt([system, *talk], 3)  # too long even so: the engine says that
    assert kept == [system, talk[4]] and len(ids) > 3


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% for %}", "cannot be read"),
        ("{{ raise_exception('roles must alternate') }}", "refuses these messages: roles must alternate"),
        ("{{ messages.__class__.__mro__ }}", "refuses these messages"),  # out of the sandbox
        ("{{ messages[9].content }}", "refuses these messages"),
    ],
)
def test_bad_template_is_reported(folder: Path, template: str, said: str) -> None:
    write_config(folder, template)
    tokenizer = load_tokenizer(folder)
    with pytest.raises(SpecError, match=said):
        Chat.of(folder, tokenizer, tokenizer.encode).prompt(TALK, 100)


def test_non_text_template_is_reported(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    (folder / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(SpecError, match=r"chat_template\.jinja: cannot be read as text"):
        Chat.of(folder, tokenizer, tokenizer.encode)


@pytest.mark.parametrize("template", [["{{ a }}"], [{"template": "x"}], [{"name": "default"}], 5])
def test_config_without_template_gives_plain_dialogue(folder: Path, template: Any) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    tokenizer = load_tokenizer(folder)
    assert Chat.of(folder, tokenizer, tokenizer.encode).render is plain


def test_missing_jinja2_names_extra(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_config(folder, CHATML)
    tokenizer = load_tokenizer(folder)
    for name in ("jinja2", "jinja2.exceptions", "jinja2.sandbox"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(SpecError, match="pip install jinja2"):
        Chat.of(folder, tokenizer, tokenizer.encode)
