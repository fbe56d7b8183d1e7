"""Chat templates: a conversation as a prompt, by the model's Jinja template or a plain format."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ..spec import SpecError
from ..spec.files import read_json_object
from .tokenizer import END_OF_TEXT, FileTokenizer, Tokenizer

if TYPE_CHECKING:
    import tokenizers

Message = Mapping[str, Any]  # role: system, user or assistant; content; other keys of a template: tool_calls …
Tools = Sequence[Mapping[str, Any]]  # functions that the model may call, in OpenAI's format
Variables = Mapping[str, Any]  # other template variables: enable_thinking …
Encode = Callable[[str], list[int]]

CONFIG, TEMPLATE = "tokenizer_config.json", "chat_template.jinja"
NAMES = {"system": "System", "user": "User", "assistant": "Assistant"}
TOKENIZER_FOLDER = "tokenizer"  # of a run folder: the tokenizer and the template that it was post-trained with
TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
OURS = ("messages", "tools")  # template variables that callers may not set
NONE: Variables = {}
REASONING = ("reasoning_content", "thinking", "reasoning")  # names of a message's reasoning, the usual one first
TOOL_CALL = ("<tool_call>", "</tool_call>")  # around the JSON of a call, as most models write it
# Around what a template renders inside {% generation %}, where that is asked for: noncharacters of Unicode, which no
# text may interchange.
GENERATED = ("\ufdd0", "\ufdd1")
# For post-training of models without a template: `plain`, and end-of-text after each answer.
DIALOGUE = """{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- 'Assistant:' }}
        {%- generation %}{{- ' ' + message.content + eos_token }}{%- endgeneration %}
        {{- '\\n' }}
    {%- elif message.role in ('system', 'user') %}
        {{- message.role | capitalize + ': ' + message.content + '\\n' }}
    {%- else %}
        {{- raise_exception('without a chat template there is no role ' + message.role) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- 'Assistant:' }}{%- endif %}"""


class EncodeSpecial(Protocol):
    def __call__(self, text: str, add_special_tokens: bool = False) -> list[int]: ...


class Render(Protocol):
    def __call__(self, messages: Sequence[Message], tools: Tools = (), variables: Variables = NONE) -> str: ...


@dataclass(frozen=True)
class Chat:
    """How messages become token ids. `stop`: strings that mark the start of a user turn."""

    render: Render
    encode: Encode
    stop: tuple[str, ...] = ()

    @classmethod
    def of(cls, folder: Path | None, tokenizer: Tokenizer, encode: Encode, template: str | None = None) -> Chat:
        """The given template, or that of the model's folder. `encode`: for prompts without a template."""
        folder = template_folder(folder) if folder else None
        config = read_config(folder) if folder else {}
        source = template if template is not None or folder is None else find_template(folder, config)
        if source is None:
            return cls(plain, encode, (f"\n{NAMES['user']}:",))
        known = config or {"eos_token": name_of(tokenizer, tokenizer.eot)}  # a run folder has no tokenizer config
        return cls(compile_template(source, known), with_special_tokens(tokenizer))

    def with_variables(self, fixed: Variables) -> Chat:
        """The same, with variables that the template has beside the messages: enable_thinking and so on."""
        if not fixed:
            return self
        if not self.templated:
            plain((), variables=fixed)  # refuses them by name

        def render(messages: Sequence[Message], tools: Tools = (), variables: Variables = NONE) -> str:
            return self.render(messages, tools, {**fixed, **variables})

        return replace(self, render=render)

    @property
    def templated(self) -> bool:
        """Whether a template writes the prompt, with special tokens by name."""
        return self.render is not plain

    def prompt(self, messages: Sequence[Message], room: int) -> tuple[list[int], list[Message]]:
        """Ids of at most `room` tokens, and the messages in them: the oldest are dropped first.

        System messages and the last message stay; if they alone are too long, the engine rejects the prompt.
        """
        kept = list(messages)
        ids = self.encode(self.render(kept))
        while len(ids) > room:
            first = next((place for place, one in enumerate(kept[:-1]) if one["role"] != "system"), None)
            if first is None:
                break
            following = kept[first + 1]["role"]  # an answer is dropped with its question
            del kept[first : first + (2 if following == "assistant" else 1)]
            ids = self.encode(self.render(kept))
        return ids, kept


def plain(messages: Sequence[Message], tools: Tools = (), variables: Variables = NONE) -> str:
    """For models without a chat template: a plain dialogue."""
    strange = [f"role {one['role']!r}" for one in messages if one["role"] not in NAMES]
    fields = [name if name == "add_generation_prompt" else "chat_template_kwargs" for name in variables]
    unknown = ["tools"] * bool(tools) + strange + fields
    if unknown:
        how = "lmworks serve --chat-template FILE gives it one"
        raise SpecError(f"this model has no chat template and does not support {unknown[0]} ({how})")
    said = "".join(f"{NAMES[message['role']]}: {message['content']}\n" for message in messages)
    return f"{said}{NAMES['assistant']}:"


# --- templates --------------------------------------------------------------------------------------------


def template_folder(folder: Path) -> Path:
    """Where the template and the tokenizer's config of a model are."""
    kept = folder / TOKENIZER_FOLDER
    return kept if (kept / TEMPLATE).is_file() else folder


def read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    return read_json_object(path, SpecError) if path.is_file() else {}


def find_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """From its own file, or from the tokenizer's config, which may have several by name."""
    path = folder / TEMPLATE
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise SpecError(f"{path}: cannot be read as text ({error})") from None
    found = config.get("chat_template")
    if isinstance(found, list):
        named = [one for one in found if isinstance(one, dict) and one.get("name") == "default"]
        found = named[0].get("template") if named else None
    return found if isinstance(found, str) else None


def compile_template(
    source: str, config: Mapping[str, Any], *, marked: bool = False, now: Callable[[], datetime] = datetime.now
) -> Render:
    """With the variables of `transformers`, in a sandbox, as templates are untrusted.

    `marked`: what is inside {% generation %} stands between the two characters of GENERATED.
    """
    try:
        from jinja2 import nodes
        from jinja2.exceptions import TemplateError
        from jinja2.ext import Extension
        from jinja2.parser import Parser
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise SpecError("this model has a chat template, which needs jinja2: pip install jinja2") from None

    class Generation(Extension):
        tags = frozenset({"generation"})  # type: ignore[assignment]

        def parse(self, parser: Parser) -> list[nodes.Node]:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            if marked:
                first, last = (nodes.Output([nodes.TemplateData(mark)]) for mark in GENERATED)
                body = [first, *body, last]
            return [nodes.Scope(body).set_lineno(line)]

    def refuse(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )
    environment.filters["tojson"] = lambda value, **how: json.dumps(value, **{"ensure_ascii": False, **how})
    environment.globals |= {"raise_exception": refuse, "strftime_now": lambda form: now().strftime(form)}
    tokens = {name: token_text(config[name]) for name in TOKENS if config.get(name)}
    try:
        template = environment.from_string(source)
    except TemplateError as error:
        raise SpecError(f"the chat template of this model cannot be read: {error}") from None

    def render(messages: Sequence[Message], tools: Tools = (), variables: Variables = NONE) -> str:
        if taken := [name for name in OURS if name in variables]:
            raise SpecError(f"chat_template_kwargs: {taken[0]} is a field of the request itself")
        said = [with_reasoning(one) for one in messages]
        given = {**tokens, "documents": None, "add_generation_prompt": True, **variables}
        given["tools"] = [dict(one) for one in tools] or None
        try:
            return template.render({**given, "messages": said})
        except Exception as error:  # a template may fail in any way
            refused = SpecError(f"the chat template of this model refuses these messages: {error}")
        if not any(isinstance(one.get("tool_calls"), list) for one in said):
            raise refused
        try:
            return template.render({**given, "messages": [with_text_arguments(one) for one in said]})
        except Exception:
            raise refused from None

    return render


def with_reasoning(message: Message) -> dict[str, Any]:
    """Templates read a message's reasoning under one name or another."""
    reasoning = next((message[name] for name in REASONING if message.get(name) is not None), None)
    if reasoning is None:
        return dict(message)
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def with_text_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """Most templates expect arguments of tool calls as objects; some (DeepSeek's) as JSON."""

    def as_text(function: dict[str, Any]) -> dict[str, Any]:
        arguments = function.get("arguments")
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        return {**function, "arguments": text}

    if not isinstance(message.get("tool_calls"), list):
        return message
    calls = [{**call, "function": as_text(call["function"])} for call in message["tool_calls"] if "function" in call]
    return {**message, "tool_calls": calls or [as_text(call) for call in message["tool_calls"]]}


def token_text(token: Any) -> str:
    """A token is given as text, or as an object with `content`."""
    return token["content"] if isinstance(token, dict) else str(token)


def name_of(tokenizer: Tokenizer, token: int) -> str:
    """Name of a special token."""
    name = tokenizer.inner.id_to_token(token) if isinstance(tokenizer, FileTokenizer) else None
    return name or END_OF_TEXT


def with_special_tokens(tokenizer: Tokenizer) -> EncodeSpecial:
    """An encoder for the output of templates, in which "<|im_start|>" is the token of that name, unlike elsewhere.

    `add_special_tokens`: with the tokens that the model expects at the beginning of a text.
    """
    if not isinstance(tokenizer, FileTokenizer):
        return lambda text, add_special_tokens=False: around_ends(tokenizer, text)
    inner = parse_special(tokenizer)

    def encode(text: str, add_special_tokens: bool = False) -> list[int]:
        ids: list[int] = inner.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    return encode


def parse_special(tokenizer: FileTokenizer) -> tokenizers.Tokenizer:
    """A copy for which the name of a special token is that token."""
    inner = type(tokenizer.inner).from_str(tokenizer.inner.to_str())
    inner.encode_special_tokens = False
    return inner


def around_ends(tokenizer: Tokenizer, text: str) -> list[int]:
    """For a tokenizer whose only special token is end-of-text."""
    first, *rest = (tokenizer.encode(part) for part in text.split(END_OF_TEXT))
    return [*first, *(token for part in rest for token in (tokenizer.eot, *part))]
