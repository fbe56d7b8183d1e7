"""Our engine (or vLLM behind the same methods) as the model that is evaluated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from ..data import Tokenizer
from ..data.chat_template import Chat
from ..data.fim import find_sentinels
from ..engine.core.request import Result, ResultCallback, ignore_result
from ..engine.core.sampling_params import SamplingParams
from ..spec.errors import SpecError
from ..spec.fim import FimSpec
from .models import Completion, Likelihood, OnCompletion, OnLikelihood, Pair, Prompt

SENTINELS = 5  # tokens beside prefix and suffix, at most: three marks, begin-of-text, one to spare


class TextEngine(Protocol):
    """What `lmworks.LLM` has."""

    tokenizer: Tokenizer | None

    @property
    def context(self) -> int: ...
    def encode(self, prompt: Any) -> Any: ...
    def empty_prompt(self) -> list[int]: ...
    def chat(self) -> Chat: ...
    def generate(
        self, prompts: Any, params: Any = None, progress: bool = True, on_result: ResultCallback = ignore_result
    ) -> list[Result]: ...


class EngineModel:
    def __init__(self, llm: TextEngine, facts: dict[str, Any], chat: bool = False, fim: FimSpec | None = None) -> None:
        self.llm, self.facts = llm, {**facts, "chat": chat}
        if llm.tokenizer is None:
            raise SpecError("an evaluation needs a tokenizer, and this model has none beside it")
        self.tokenizer: Tokenizer = llm.tokenizer
        self.template = llm.chat() if chat else None
        self.sentinels = find_sentinels(self.tokenizer, fim)

    def generate(self, prompts: Sequence[Prompt], on_result: OnCompletion) -> None:
        params = [
            SamplingParams(
                temperature=one.temperature,
                top_p=one.top_p,
                seed=one.seed,
                max_tokens=one.max_tokens,
                stop=(*one.stop, *(self.template.stop if self.template else ())),
                stop_token_ids=self.ends,
            )
            for one in prompts
        ]
        self.llm.generate(
            [self.encode(one) for one in prompts],
            params,
            progress=False,
            on_result=lambda place, result: on_result(place, completion(result)),
        )

    @property
    def ends(self) -> list[int]:
        """After a middle, where a family has a token for it."""
        return [] if self.sentinels is None or self.sentinels.end is None else [self.sentinels.end]

    def encode(self, prompt: Prompt) -> Any:
        if self.template is not None:
            room = max(1, self.llm.context - prompt.max_tokens)
            return self.template.prompt([{"role": "user", "content": prompt.text}], room)[0]
        room = max(self.llm.context // 2, self.llm.context - prompt.max_tokens)
        if prompt.suffix is not None and self.sentinels is not None:
            before, after = self.tokenizer.encode(prompt.text), self.tokenizer.encode(prompt.suffix)
            after = after[: room // 4] if len(before) + len(after) + SENTINELS > room else after
            return self.begin() + self.sentinels.prompt(before[-(room - len(after) - SENTINELS) :], after)
        ids = list(self.llm.encode(prompt.text)) if prompt.text else self.llm.empty_prompt()
        return ids[-(room - 1) :]  # the end of a text that is too long

    def begin(self) -> list[int]:
        """The begin-of-text token, where a prompt of this model has one."""
        ids = list(self.llm.encode("a"))
        return ids[: len(ids) - len(self.tokenizer.encode("a"))]

    def likelihoods(self, pairs: Sequence[Pair], on_result: OnLikelihood) -> None:
        """Context and continuation are encoded together, as in lm-evaluation-harness; the continuation begins where
        tokens differ from those of the context alone: a token that reaches over the border is scored."""
        requests = []
        for context, continuation in pairs:
            kept = context.rstrip()
            context, continuation = kept, context[len(kept) :] + continuation
            before = list(self.llm.encode(context)) if context else self.llm.empty_prompt()
            whole = list(self.llm.encode(context + continuation)) if context else before + self.continued(continuation)
            requests.append((whole, common(before, whole)))
        self.score(requests, on_result)

    def continued(self, text: str) -> list[int]:
        """Without a begin-of-text token of its own."""
        return list(self.tokenizer.encode(text))

    def text_likelihoods(self, texts: Sequence[str], on_result: OnLikelihood) -> None:
        """In windows of the context, each behind the last token of the one before it."""
        room = self.llm.context - 1
        windows: list[tuple[list[int], int]] = []
        owner: list[int] = []
        for place, text in enumerate(texts):
            ids = self.llm.empty_prompt() + self.continued(text)
            for start in range(0, len(ids) - 1, room - 1):
                windows.append((ids[start : start + room], 1))
                owner.append(place)
        sums = [[0.0, 0, True] for _ in texts]
        left = [owner.count(place) for place in range(len(texts))]
        for place in (place for place, count in enumerate(left) if not count):
            on_result(place, Likelihood(0.0, 0, True))

        def add(window: int, found: Likelihood) -> None:
            place = owner[window]
            sums[place][0] += found.logprob
            sums[place][1] += found.tokens
            left[place] -= 1
            if not left[place]:
                on_result(place, Likelihood(sums[place][0], int(sums[place][1]), error=found.error))

        self.score(windows, add)

    def score(self, requests: Sequence[tuple[list[int], int]], on_result: OnLikelihood) -> None:
        """Log-probability of the tokens of each list from a place on. One that is too long keeps its end."""
        room = self.llm.context - 1
        kept = [(ids[-room:], max(1, start - max(0, len(ids) - room))) for ids, start in requests]
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
        self.llm.generate(
            [ids for ids, _ in kept],
            params,
            progress=False,
            on_result=lambda place, result: on_result(place, likelihood(result, kept[place][1])),
        )


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens both begin with; at least one, which stands before what is scored."""
    length = 0
    while length < min(len(one), len(other)) and one[length] == other[length]:
        length += 1
    return max(1, length)


def completion(result: Result) -> Completion:
    answer = result.answers[0]
    return Completion(answer.text, len(answer.token_ids), answer.finish_reason, answer.error or "")


def likelihood(result: Result, start: int) -> Likelihood:
    if result.error or result.prompt_logprobs is None:
        return Likelihood(float("-inf"), 0, error=result.error or "the engine gave no log-probabilities")
    scored = [one for one in result.prompt_logprobs[start:] if one is not None]
    greedy = all(one.token == one.top[0][0] for one in scored)
    return Likelihood(sum(one.logprob for one in scored), len(scored), greedy)
