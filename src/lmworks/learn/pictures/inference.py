"""Pictures of inference: prefill and decode, the KV cache, batching, quantization."""

from __future__ import annotations

from collections.abc import Callable

from ..drawing import Drawing

PICTURES: dict[str, Callable[[], Drawing]] = {}
