"""An engine that is made already, with a tokenizer, as `LLM` has them."""

from __future__ import annotations

from typing import Any

from ..data import Tokenizer
from ..data.chat_template import Chat
from ..engine.core.engine import Engine
from ..engine.core.request import Result, ResultCallback, ignore_result
from ..engine.offline import OfflineEngine
from ..spec import SpecError


class RunningEngine:
    def __init__(self, engine: Engine, tokenizer: Tokenizer) -> None:
        self.tokenizer: Tokenizer | None = tokenizer
        self.known = tokenizer
        self.backend = OfflineEngine(engine)

    @property
    def context(self) -> int:
        return self.backend.context

    def encode(self, prompt: Any) -> Any:
        return self.known.encode(prompt) if isinstance(prompt, str) else list(prompt)

    def empty_prompt(self) -> list[int]:
        return [self.known.eot]

    def chat(self) -> Chat:
        raise SpecError("this engine has no chat template")

    def generate(
        self, prompts: Any, params: Any = None, progress: bool = True, on_result: ResultCallback = ignore_result
    ) -> list[Result]:
        ids = [self.encode(one) for one in prompts]
        listed = params if isinstance(params, list) else [params] * len(ids)
        return self.backend.generate(ids, listed, progress, on_result)

    def close(self) -> None:
        self.backend.close()
