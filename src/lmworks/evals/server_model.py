"""Any server with OpenAI's API as the model that is evaluated."""

from __future__ import annotations

import http.client
import json
import os
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any, TypeVar

from ..spec.errors import LMWorksError, SpecError
from .models import Completion, Likelihood, OnCompletion, OnLikelihood, Pair, Prompt

STOPS = 4  # that OpenAI's API takes; others are cut here
RETRIES, PAUSE_S = 4, 1.0  # of busy servers
BUSY = (429, 500, 502, 503, 504)
KEY = "OPENAI_API_KEY"

Found = TypeVar("Found")


class ServerModel:
    def __init__(self, url: str, model: str, chat: bool = False, concurrency: int = 32, timeout_s: float = 600) -> None:
        if not url.startswith(("http://", "https://")):
            raise SpecError(f"--server {url!r}: an address is expected, e.g. http://127.0.0.1:8000/v1")
        base = url.rstrip("/")
        self.url = base if base.endswith("/v1") else f"{base}/v1"
        self.model, self.chat, self.concurrency, self.timeout_s = model, chat, concurrency, timeout_s

    @property
    def facts(self) -> dict[str, Any]:
        return {"model": self.model, "server": self.url, "chat": self.chat}

    def generate(self, prompts: Sequence[Prompt], on_result: OnCompletion) -> None:
        self.each(prompts, self.complete, on_result)

    def complete(self, prompt: Prompt) -> Completion:
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": prompt.max_tokens,
            "temperature": prompt.temperature,
            "top_p": prompt.top_p,
            "seed": prompt.seed % 2**31,
            "stop": list(prompt.stop[:STOPS]) or None,
        }
        if self.chat:
            body["messages"] = [{"role": "user", "content": prompt.text}]
        else:
            body["prompt"] = prompt.text
            body |= {"suffix": prompt.suffix} if prompt.suffix is not None else {}
        answer, error = self.post("chat/completions" if self.chat else "completions", body)
        if error:
            return Completion("", error=error, finish_reason="error")
        choice = answer["choices"][0]
        text = choice["message"].get("content") if self.chat else choice["text"]
        used = (answer.get("usage") or {}).get("completion_tokens") or 0
        return Completion(text or "", used, choice.get("finish_reason") or "")

    def likelihoods(self, pairs: Sequence[Pair], on_result: OnLikelihood) -> None:
        self.each(pairs, lambda pair: self.score(*pair), on_result)

    def text_likelihoods(self, texts: Sequence[str], on_result: OnLikelihood) -> None:
        self.each(texts, lambda text: self.score("", text), on_result)

    def score(self, context: str, continuation: str) -> Likelihood:
        """The prompt is echoed with its log-probabilities; tokens that end behind the context are counted."""
        whole = context + continuation
        body = {"model": self.model, "prompt": whole, "echo": True, "logprobs": 1, "max_tokens": 0, "temperature": 0}
        answer, error = self.post("completions", body)
        if error:
            return Likelihood(float("-inf"), 0, error=error)
        scored = (answer["choices"][0].get("logprobs")) or {}
        if not scored.get("token_logprobs") or not scored.get("text_offset"):
            raise LMWorksError(
                f"{self.url} gives no log-probabilities of a prompt (echo with logprobs), which this suite needs"
            )
        offsets = [*scored["text_offset"], len(whole)]
        kept = len(context.rstrip())
        found = [
            (logprob, top)
            for logprob, top, end in zip(
                scored["token_logprobs"],
                scored.get("top_logprobs") or [None] * len(scored["token_logprobs"]),
                offsets[1:],
                strict=False,
            )
            if end > kept and logprob is not None
        ]
        greedy = all(top is not None and logprob >= max(top.values()) for logprob, top in found)
        return Likelihood(sum(logprob for logprob, _ in found), len(found), greedy)

    def each(
        self,
        requests: Sequence[Any],
        ask: Callable[[Any], Found],
        on_result: Callable[[int, Found], None],
    ) -> None:
        """As many at once as `concurrency`. The first failure ends it; what came before is kept."""
        ended = threading.Event()

        def guarded(request: Any) -> Found | None:
            return None if ended.is_set() else ask(request)

        with ThreadPoolExecutor(min(self.concurrency, max(1, len(requests)))) as threads:
            places = {threads.submit(guarded, request): place for place, request in enumerate(requests)}
            try:
                for future in as_completed(places):
                    found = future.result()
                    if found is not None:
                        on_result(places[future], found)
            except BaseException:
                ended.set()
                raise

    def post(self, path: str, body: dict[str, Any]) -> tuple[dict[str, Any], str]:
        """The answer, or what the server refused in this one request. A server that is away is an error of all."""
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(KEY):
            headers["Authorization"] = f"Bearer {key}"
        sent = json.dumps({name: value for name, value in body.items() if value is not None}).encode()
        for attempt in range(RETRIES):
            request = urllib.request.Request(f"{self.url}/{path}", sent, headers)
            try:
                with urllib.request.urlopen(request, timeout=self.timeout_s) as response:
                    return json.loads(response.read()), ""
            except urllib.error.HTTPError as error:
                said = message_of(error)
                if error.code in (400, 413, 422):
                    return {}, said
                if error.code not in BUSY or attempt == RETRIES - 1:
                    raise LMWorksError(f"{self.url}/{path}: {error.code} {said}") from None
            except (urllib.error.URLError, http.client.HTTPException, OSError, ValueError) as error:
                if attempt == RETRIES - 1:
                    reason = getattr(error, "reason", error)
                    raise LMWorksError(
                        f"{self.url} does not answer ({reason}); run the same command again to go on"
                    ) from None
            time.sleep(PAUSE_S * 2**attempt)
        raise AssertionError


def message_of(error: urllib.error.HTTPError) -> str:
    raw = error.read().decode(errors="replace")
    try:
        found = json.loads(raw)
        return str((found.get("error") or found).get("message") or raw)[:300]
    except (ValueError, AttributeError):
        return raw[:300] or error.reason
