"""Asks a completion server, and hangs up where the completion ends, which cancels the rest of it there."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx

from ..spec.errors import LMWorksError
from .prompt import CompletionPrompt
from .stops import Stop


@dataclass(frozen=True)
class CompletionClient:
    """`lmworks serve`, or another server whose /v1/completions knows `suffix`."""

    http: httpx.AsyncClient
    model: str
    max_tokens: int = 64

    async def complete(self, prompt: CompletionPrompt, stop: Stop) -> str:
        """The text for the gap; empty where the model has nothing to say."""
        body = {
            "model": self.model,
            "prompt": prompt.prompt,
            "suffix": prompt.suffix,
            "parse_special": True,
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "stream": True,
        }
        text = ""
        try:
            async with self.http.stream("POST", "/v1/completions", json=body) as response:
                if response.status_code != 200:
                    raise LMWorksError(f"the server answered {response.status_code}: {await said(response)}")
                async for piece in pieces(response):
                    text += piece
                    if (end := stop(text)) is not None:
                        return text[:end]
        except httpx.TransportError as error:
            raise LMWorksError(f"no answer from {self.http.base_url}: {error or type(error).__name__}") from None
        return text


async def pieces(response: httpx.Response) -> AsyncIterator[str]:
    async for line in response.aiter_lines():
        if not line.startswith("data: ") or line == "data: [DONE]":
            continue
        event: dict[str, Any] = json.loads(line.removeprefix("data: "))
        if "error" in event:
            raise LMWorksError(f"the server failed: {event['error'].get('message', '')}")
        for choice in event.get("choices", ()):
            yield choice["text"]


async def said(response: httpx.Response) -> str:
    raw = await response.aread()
    try:
        return str(json.loads(raw)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return raw[:200].decode("utf-8", errors="replace")


async def first_model(http: httpx.AsyncClient) -> str:
    """What the server serves, where nobody named a model."""
    try:
        response = await http.get("/v1/models")
        return str(response.json()["data"][0]["id"])
    except (httpx.TransportError, ValueError, KeyError, IndexError) as error:
        raise LMWorksError(f"{http.base_url} does not say which models it has ({type(error).__name__})") from None
