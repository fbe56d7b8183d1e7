"""What a request may need, before a server has seen it."""

from __future__ import annotations

from typing import NamedTuple

from ..exchange import Exchange
from ..request_body import RequestBody

FIRST_GUESS = 0.25  # tokens a byte
LEARNING = 0.1  # how much one answer changes what is known of its model
MOST_MODELS = 4096
BOUNDS = ("max_completion_tokens", "max_tokens", "max_output_tokens")


class Demand(NamedTuple):
    prompt_tokens: int
    completion_tokens: int


class PromptSizes:
    """Tokens for each byte of a body, by model, as servers counted them."""

    def __init__(self) -> None:
        self.rates: dict[str, float] = {}

    def demand(self, exchange: Exchange, assumed_output: int) -> Demand:
        rate = self.rates.get(exchange.rule.name, FIRST_GUESS)
        prompt = max(1, round(len(exchange.body.raw) * rate))
        return Demand(prompt, most_generated(exchange.body, exchange.path, assumed_output))

    def learn(self, exchange: Exchange, prompt_tokens: int) -> None:
        if len(self.rates) < MOST_MODELS or exchange.rule.name in self.rates:
            known = self.rates.get(exchange.rule.name, FIRST_GUESS)
            seen = prompt_tokens / max(1, len(exchange.body.raw))
            self.rates[exchange.rule.name] = known + LEARNING * (seen - known)


GENERATING = {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"}


def most_generated(body: RequestBody, path: str, assumed: int) -> int:
    if path not in GENERATING:
        return 0
    given = [value for name in BOUNDS if name in body.fields and isinstance(value := body.get(name), int)]
    answers = max((value for name in ("n", "best_of") if isinstance(value := body.get(name), int)), default=1)
    return max(0, given[0] if given else assumed) * max(1, answers) * prompts_of(body)


def prompts_of(body: RequestBody) -> int:
    """Of a completion: text, tokens, or a list of either."""
    prompt = body.json("prompt").lstrip()[:16]
    inside = prompt[1:].lstrip()[:1]
    if not prompt.startswith(b"[") or inside not in (b'"', b"["):
        return 1
    found = body.get("prompt")
    return max(1, len(found)) if isinstance(found, list) else 1
