"""Our engine as a model of lm-evaluation-harness, in process:

lm_eval.simple_evaluate(model=HarnessModel(LLM("runs/demo")), tasks=["hellaswag"])
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lm_eval.api.model import TemplateLM

from .engine_model import EngineModel, TextEngine
from .models import Completion, Likelihood, Prompt
from .scoring import truncated

MAX_TOKENS = 256  # of an answer, where a task does not say


class HarnessModel(TemplateLM):
    def __init__(self, llm: TextEngine) -> None:
        super().__init__()
        self.model = EngineModel(llm, {})

    @property
    def eot_token_id(self) -> int:
        return self.model.tokenizer.eot

    @property
    def max_length(self) -> int:
        return self.model.llm.context

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        return list(self.model.tokenizer.encode(string))

    def _loglikelihood_tokens(self, requests: Sequence[Any], **kwargs: Any) -> list[tuple[float, bool]]:
        found: dict[int, Likelihood] = {}
        asked = [(list(context) + list(continuation), len(context)) for _, context, continuation in requests]
        self.model.score(asked, found.__setitem__)
        return [(found[place].logprob, found[place].greedy) for place in range(len(asked))]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        found: dict[int, Likelihood] = {}
        self.model.text_likelihoods([request.args[0] for request in requests], found.__setitem__)
        return [found[place].logprob for place in range(len(requests))]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Temperature, top_p, until and max_gen_toks of a task are followed; it is greedy unless a task samples."""
        prompts = [prompt_of(*request.args) for request in requests]
        found: dict[int, Completion] = {}
        self.model.generate(prompts, found.__setitem__)
        return [truncated(found[place].text, prompt.stop, 0) for place, prompt in enumerate(prompts)]


def prompt_of(context: str, options: dict[str, Any]) -> Prompt:
    until = options.get("until") or []
    sampled = bool(options.get("do_sample", options.get("temperature", 0)))
    return Prompt(
        text=context,
        seed=int(options.get("seed", 0)),
        max_tokens=int(options.get("max_gen_toks", MAX_TOKENS)),
        temperature=float(options.get("temperature", 1.0)) if sampled else 0.0,
        top_p=float(options.get("top_p", 1.0)),
        stop=[until] if isinstance(until, str) else list(until),
    )
