"""Models with an engine of this server: the other APIs are translated for these alone."""

from __future__ import annotations

from ..limits import APIError
from ..serving import Caller, LocalModel, Serving, Upstream


def find_local(serving: Serving, caller: Caller, name: str) -> tuple[LocalModel, str | None]:
    model, adapter = serving.find(caller, name)
    if isinstance(model, Upstream):
        message = f"the model {name[:80]!r} is on an upstream server: ask for it by /v1/chat/completions"
        raise APIError(400, "not_local", message, "model")
    return model, adapter
