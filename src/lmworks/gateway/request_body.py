"""The body of a request: parsed once, as its fields; what is not changed is passed on as the bytes that came."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import msgspec

from ..serve.limits import APIError

FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
MAX_NAME_CHARS = 256


class RequestBody:
    """Fields by their names, each as JSON. `changes` are what the gateway says differently to a server."""

    def __init__(self, raw: bytes) -> None:
        self.raw = raw
        try:
            self.fields = FIELDS.decode(raw)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise APIError(400, "invalid_json", f"the body is no JSON object: {error}") from None
        self.model = self.get("model")
        if not isinstance(self.model, str) or not self.model:
            raise APIError(400, "invalid_request", "model: give the name of a model", "model")
        if len(self.model) > MAX_NAME_CHARS:
            raise APIError(404, "model_not_found", f"the model {self.model[:80]!r}… is not served", "model")
        self.stream = self.get("stream") is True
        if self.get("continuation"):  # a gateway in front of this one sends an empty one
            raise APIError(400, "invalid_request", "continuation is for gateways to send to servers", "continuation")

    def get(self, name: str) -> Any:
        """The value of a field; None where there is none."""
        found = self.fields.get(name)
        try:
            return None if found is None else msgspec.json.decode(found)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise APIError(400, "invalid_json", f"{name}: {error}", name) from None

    @property
    def wants_usage(self) -> bool:
        """The client, of a stream of OpenAI's."""
        options = self.get("stream_options")
        return isinstance(options, dict) and options.get("include_usage") is True

    def json(self, name: str) -> bytes:
        """The JSON of a field; nothing where there is none."""
        return bytes(self.fields.get(name, b""))

    def with_changes(self, changes: dict[str, Any], without: Container[str] = ()) -> bytes:
        """`without`: fields that are left out, of the changes too."""
        if not changes:
            return self.raw
        said = {**self.fields, **changes}
        return msgspec.json.encode({name: value for name, value in said.items() if name not in without})
