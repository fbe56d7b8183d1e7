"""Examples of post-training in TRL's columns: files of records → checked examples, or why a record is none.

    conversations   messages (and tools); or prompt and completion
    preferences     chosen and rejected, with or without prompt (without: what both have in common at the beginning)
    unpaired        prompt, completion, label
    prompts         prompt; every other column reaches the rewards

Prompts and answers are texts, or lists of messages.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..spec.align import CONVERSATIONS, METHOD_DATA, PREFERENCES, PROMPTS, UNPAIRED
from ..spec.errors import near_names, suggestion
from .chat_template import Message, Tools

Text = str | list[Message]
ROLES = ("system", "developer", "user", "assistant", "tool")
# Names that other formats have for a column of ours.
OTHER_NAMES = {
    "messages": ("conversations", "conversation", "dialog", "dialogue", "chat"),
    "prompt": ("instruction", "question", "query", "input", "problem"),
    "completion": ("response", "output", "answer", "solution"),
    "chosen": ("preferred", "winner", "accepted"),
    "rejected": ("dispreferred", "loser"),
    "label": ("desirable", "preference"),
}
COLUMNS = {
    CONVERSATIONS: "'messages', or 'prompt' and 'completion'",
    PREFERENCES: "'chosen' and 'rejected', with or without 'prompt'",
    UNPAIRED: "'prompt', 'completion' and 'label'",
    PROMPTS: "'prompt'",
}
REQUIRED = {  # the narrowest first: a record may have those of several
    UNPAIRED: ("prompt", "completion", "label"),
    PREFERENCES: ("chosen", "rejected"),
    CONVERSATIONS: ("messages",),
    PROMPTS: ("prompt",),
}


class BadExample(Exception):
    """Why a record cannot be used: the reason that is counted, and what is wrong with this one."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail


@dataclass(frozen=True)
class Example:
    """One record. An answer is the completion, or the chosen one followed by the rejected one; prompts have none."""

    prompt: Text
    answers: tuple[Text, ...] = ()
    tools: Tools = ()
    label: bool = False
    margin: float | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)  # of prompts: all other columns

    @property
    def conversational(self) -> bool:
        return isinstance(self.prompt, list)


def read_example(record: Any, kind: str) -> Example:
    """Raises BadExample."""
    if not isinstance(record, dict):
        raise BadExample("not an object", f"the record is {type_name(record)}, not an object with columns")
    tools = read_tools(record.get("tools"))
    if kind == CONVERSATIONS and "messages" in record:
        messages = read_text(record, "messages")
        if isinstance(messages, str):
            raise BadExample("wrong type", "'messages' is a text; it must be a list of messages")
        check_answer(messages, "messages")
        if not any(one["role"] == "user" or one["role"] == "tool" for one in messages):
            raise BadExample("empty prompt", "no message of a user to answer")
        return Example([], (messages,), tools)
    if kind == PREFERENCES:
        return read_pair(record, tools)
    prompt = read_prompt(record, kind)
    if kind == PROMPTS:
        columns = {name: value for name, value in record.items() if name not in ("prompt", "tools")}
        return Example(prompt, tools=tools, columns=columns)
    answer = read_answer(record, "completion", prompt, kind)
    if kind == CONVERSATIONS:
        return Example(prompt, (answer,), tools)
    label = column(record, "label", kind)
    if not isinstance(label, bool):
        raise BadExample("label not boolean", f"'label' is {type_name(label)} {label!r:.40}; it must be true or false")
    return Example(prompt, (answer,), tools, label)


def read_pair(record: Mapping[str, Any], tools: Tools) -> Example:
    if "prompt" in record:
        prompt = read_prompt(record, PREFERENCES)
        chosen, rejected = (read_answer(record, name, prompt, PREFERENCES) for name in ("chosen", "rejected"))
    else:
        for name in ("chosen", "rejected"):
            column(record, name, PREFERENCES)
        prompt, chosen, rejected = common_prompt(read_text(record, "chosen"), read_text(record, "rejected"))
        for name, answer in (("chosen", chosen), ("rejected", rejected)):
            check_answer(answer, name)
        if not prompt:
            raise BadExample("empty prompt", "no 'prompt', and 'chosen' and 'rejected' have no common beginning")
    if chosen == rejected:
        raise BadExample("equal pair", "'chosen' and 'rejected' are equal")
    margin = record.get("margin")
    if margin is not None and (isinstance(margin, bool) or not isinstance(margin, int | float)):
        raise BadExample("wrong type", f"'margin' is {type_name(margin)}; it must be a number")
    return Example(prompt, (chosen, rejected), tools, margin=margin)


def common_prompt(chosen: Text, rejected: Text) -> tuple[Text, Text, Text]:
    """What both have in common at the beginning, as TRL has it: a space before the answers belongs to them."""
    if type(chosen) is not type(rejected):
        raise BadExample("wrong type", "'chosen' and 'rejected' must both be texts, or both lists of messages")
    if chosen == rejected:
        raise BadExample("equal pair", "'chosen' and 'rejected' are equal")
    length = 0
    for one, other in zip(chosen, rejected, strict=False):
        if one != other:
            break
        length += 1
    if isinstance(chosen, str) and length and chosen[length - 1] == " ":
        length -= 1
    return chosen[:length], chosen[length:], rejected[length:]


# --- columns ---------------------------------------------------------------------------------------------


def column(record: Mapping[str, Any], name: str, kind: str) -> Any:
    if name in record:
        return record[name]
    near = [other for other in OTHER_NAMES.get(name, ()) if other in record] or near_names(name, sorted(record))
    hint = f" ({near[0]!r} would have to be renamed)" if near else ""
    there = ", ".join(record) or "none"
    wanted = f"wanted: {COLUMNS[kind]}{for_other_methods(record, kind)}"
    raise BadExample("missing column", f"no column {name!r}{hint}; it has {there}; {wanted}")


def for_other_methods(record: Mapping[str, Any], kind: str) -> str:
    """Methods that these columns are for."""
    for other, names in REQUIRED.items():
        if other != kind and all(name in record for name in names):
            methods = [method for method, of in METHOD_DATA.items() if of == other]
            return f"; its columns are those of {other}, for align.method = {', '.join(methods)}"
    return ""


def read_prompt(record: Mapping[str, Any], kind: str) -> Text:
    if kind == CONVERSATIONS and "prompt" not in record:
        named = [name for name in ("messages", "prompt") if any(other in record for other in OTHER_NAMES[name])]
        column(record, named[0] if named else "messages", kind)
    column(record, "prompt", kind)
    prompt = read_text(record, "prompt")
    if not (prompt.strip() if isinstance(prompt, str) else any(content_of(one).strip() for one in prompt)):
        raise BadExample("empty prompt", "'prompt' is empty")
    return prompt


def read_answer(record: Mapping[str, Any], name: str, prompt: Text, kind: str) -> Text:
    column(record, name, kind)
    answer = read_text(record, name)
    if type(answer) is not type(prompt):
        raise BadExample("wrong type", f"'prompt' and {name!r} must both be texts, or both lists of messages")
    check_answer(answer, name)
    return answer


def check_answer(answer: Text, name: str) -> None:
    """An answer has at least one assistant turn, and none is empty."""
    if isinstance(answer, str):
        if not answer.strip():
            raise BadExample("empty completion", f"{name!r} is empty")
        return
    turns = [number for number, one in enumerate(answer) if one["role"] == "assistant"]
    if not turns:
        raise BadExample("no assistant turn", f"{name!r} has no message of the role 'assistant'")
    for number in turns:
        if not content_of(answer[number]).strip() and not answer[number].get("tool_calls"):
            raise BadExample("empty completion", f"{name}[{number}]: the assistant says nothing and calls no tool")


def content_of(message: Message) -> str:
    content: str = message["content"]
    return content


def read_text(record: Mapping[str, Any], name: str) -> Text:
    value = record[name]
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise BadExample("wrong type", f"{name!r} is {type_name(value)}; it must be a text or a list of messages")
    return [read_message(one, f"{name}[{number}]") for number, one in enumerate(value)]


def read_message(message: Any, where: str) -> Message:
    """With the content as one text; arguments of tool calls as objects, as templates expect them."""
    if not isinstance(message, dict):
        raise BadExample("wrong type", f"{where} is {type_name(message)}, not a message with 'role' and 'content'")
    if "role" not in message:
        hint = " (ShareGPT's 'from' and 'value' have to be renamed)" if "from" in message else ""
        raise BadExample("missing column", f"{where} has no 'role'; it has {', '.join(message) or 'nothing'}{hint}")
    role = message["role"]
    if role not in ROLES:
        near = suggestion(near_names(str(role), ROLES)) or f"; known: {', '.join(ROLES)}"
        raise BadExample("unknown role", f"{where} has the role {role!r:.40}{near}")
    calls = message.get("tool_calls")
    content = read_content(message.get("content"), bool(calls), where)
    # Columns of a parquet table are there in every message, empty where it has none.
    kept = {name: value for name, value in message.items() if value is not None}
    read: dict[str, Any] = {**kept, "role": "system" if role == "developer" else role, "content": content}
    if calls:
        read["tool_calls"] = [read_call(call, where) for call in calls] if isinstance(calls, list) else calls
    return read


def read_content(content: Any, calls: bool, where: str) -> str:
    if isinstance(content, str):
        return content
    if content is None and calls:
        return ""
    if isinstance(content, list):
        texts = []
        for part in content:
            if not isinstance(part, dict) or not isinstance(part.get("text"), str):
                kind = part.get("type") if isinstance(part, dict) else type_name(part)
                raise BadExample(
                    "wrong type", f"{where}: a part of its content is {kind!r}, and only texts are supported"
                )
            texts.append(part["text"])
        return "".join(texts)
    raise BadExample(
        "wrong type", f"{where}: its content is {type_name(content)}; it must be a text or a list of texts"
    )


def read_call(call: Any, where: str) -> Any:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadExample("wrong type", f"{where}: a tool call needs a function with a 'name' and 'arguments'")
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return call
    try:
        parsed = json.loads(arguments)
    except ValueError:
        parsed = arguments
    named = {**function, "arguments": parsed}
    return {**call, "function": named} if "function" in call else named


def read_tools(tools: Any) -> Tools:
    if tools is None:
        return ()
    if isinstance(tools, str):  # tables keep nested schemas as JSON
        try:
            tools = json.loads(tools)
        except ValueError:
            tools = None
    if not isinstance(tools, Sequence) or not all(isinstance(one, dict) for one in tools):
        raise BadExample("wrong type", "'tools' must be a list of functions in OpenAI's format")
    return tuple(tools)


def type_name(value: Any) -> str:
    names = {str: "a text", bool: "a boolean", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return "null" if value is None else names.get(type(value), type(value).__name__)
