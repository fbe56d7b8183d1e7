"""The output of a response: its items, and the events by which they are streamed, in OpenAI's order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ...parsers.answer import AnswerParser
from ...parsers.base import Arguments, Call, Piece, Reasoning, named_id

Item = dict[str, Any]
Event = dict[str, Any]
Status = Literal["completed", "incomplete"]


@dataclass
class ItemWriter:
    """Events without sequence numbers. `source`: of the ids of items and calls."""

    parser: AnswerParser
    source: str
    items: list[Item] = field(default_factory=list)
    text: list[str] = field(default_factory=list)  # of the item that is open
    is_open: bool = False

    def add(self, pieces: Sequence[Piece]) -> Iterator[Event]:
        for piece in pieces:
            kind = kind_of(piece)
            if isinstance(piece, Call) or not self.is_open or self.items[-1]["type"] != kind:
                yield from self.close("completed")
                yield from self.begin(kind, piece.name if isinstance(piece, Call) else "")
            if not isinstance(piece, Call):
                self.text.append(piece.text)
                more: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
                yield self.event(f"{DELTAS[kind]}.delta", delta=piece.text, **self.place(), **more)

    def begin(self, kind: str, name: str) -> Iterator[Event]:
        source = f"{self.source}/{len(self.items)}"
        item: Item = {"id": f"{PREFIXES[kind]}_{named_id(source)}", "type": kind, "status": "in_progress"}
        if kind == "message":
            item |= {"role": "assistant", "content": []}
        elif kind == "reasoning":
            item |= {"summary": [], "content": []}
        else:
            item |= {"call_id": self.parser.call_id(source), "name": name, "arguments": ""}
        self.items.append(item)
        self.is_open = True
        yield self.event("response.output_item.added", item=dict(item))
        if kind != "function_call":
            yield self.event("response.content_part.added", **self.place(), part=content_part(kind, ""))

    def close(self, status: Status) -> Iterator[Event]:
        """Ends the item that is open."""
        if not self.is_open:
            return
        item, text = self.items[-1], "".join(self.text)
        kind = item["type"]
        self.is_open, self.text = False, []
        if kind == "function_call":
            item["arguments"] = text
            yield self.event(f"{DELTAS[kind]}.done", **self.place(), arguments=text, name=item["name"])
        else:
            part = content_part(kind, text)
            item["content"] = [part]
            more: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
            yield self.event(f"{DELTAS[kind]}.done", **self.place(), text=text, **more)
            yield self.event("response.content_part.done", **self.place(), part=part)
        item["status"] = status
        yield self.event("response.output_item.done", item=item)

    def place(self) -> dict[str, Any]:
        item = self.items[-1]
        return {"item_id": item["id"]} | ({} if item["type"] == "function_call" else {"content_index": 0})

    def event(self, kind: str, **fields: Any) -> Event:
        return {"type": kind, "output_index": len(self.items) - 1, **fields}


PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
DELTAS = {
    "message": "response.output_text",
    "reasoning": "response.reasoning_text",
    "function_call": "response.function_call_arguments",
}


def kind_of(piece: Piece) -> str:
    if isinstance(piece, Call | Arguments):
        return "function_call"
    return "reasoning" if isinstance(piece, Reasoning) else "message"


def content_part(kind: str, text: str) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
