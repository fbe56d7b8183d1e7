"""Beams equal those of transformers' `generate(num_beams=…)`: tokens and scores."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hf_reference import answers, make_engine, random_prompts, reference_model

from lmworks.engine.beam_search import beam_search
from lmworks.engine.core.engine import Engine
from lmworks.engine.core.request import Result
from lmworks.engine.core.sampling_params import SamplingParams
from lmworks.llm import LLM
from lmworks.spec import SpecError

COUNT = 9
ENDS = [*range(0, 96, 12)]  # many, so that beams end early


def ours(engine: Engine, prompt: list[int], ends: list[int], width: int, **options: Any) -> Any:
    def generate(prompts: list[list[int]], params: SamplingParams) -> list[Result]:
        return answers(engine, prompts, [params] * len(prompts))

    return beam_search(generate, prompt, ends, width, COUNT, **options)


def theirs(prompt: list[int], ends: list[int], width: int, **options: Any) -> list[tuple[list[int], float]]:
    out = reference_model("llama").generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=COUNT,
        do_sample=False,
        num_beams=width,
        num_return_sequences=width,
        eos_token_id=ends or None,
        pad_token_id=95,
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )
    rows = [row[len(prompt) :].tolist() for row in out.sequences]
    cut = [next((i + 1 for i, token in enumerate(row) if token in ends), COUNT) for row in rows]
    return [(row[:end], score) for row, end, score in zip(rows, cut, out.sequences_scores.tolist(), strict=True)]


@pytest.mark.parametrize("early_stopping", [False, True])
@pytest.mark.parametrize("length_penalty", [1.0, 0.0, 2.0])
@pytest.mark.parametrize("ends", [[], ENDS], ids=["no end", "ends"])
def test_beams_equal_those_of_transformers(ends: list[int], length_penalty: float, early_stopping: bool) -> None:
    engine = make_engine("llama")
    for prompt, width in zip(random_prompts([5, 12, 3, 7]), (1, 2, 3, 5), strict=True):
        if width == 1:
            continue  # transformers then decodes greedily, without scores
        options = {"length_penalty": length_penalty, "early_stopping": early_stopping}
        found = ours(engine, prompt, ends, width, **options)
        expected = theirs(prompt, ends, width, **options)
        assert [list(beam.token_ids) for beam in found] == [tokens for tokens, _ in expected]
        assert [beam.score for beam in found] == pytest.approx([score for _, score in expected], abs=1e-4)
    assert engine.metrics.prefix_cache_hits > 0


def test_one_beam_is_greedy() -> None:
    engine, [prompt] = make_engine("llama"), random_prompts([6])
    [beam] = ours(engine, prompt, [], 1)
    params = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True)
    assert list(beam.token_ids) == answers(engine, [prompt], [params])[0].token_ids


def test_the_offline_api() -> None:
    with LLM("tiny", device="cpu", dtype="fp32", context=64) as llm:
        [beams, _] = llm.beam_search([[1, 2, 3], [4, 5]], beam_width=3, max_tokens=4, ignore_eos=True)
        assert [len(beam.token_ids) for beam in beams] == [4, 4, 4]
        assert beams[0].score > beams[1].score > beams[2].score
        params = SamplingParams(max_tokens=1, prompt_logprobs=0)
        [scored] = llm.generate([[1, 2, 3, *beams[0].token_ids]], params)
        total = sum(each.logprob for each in (scored.prompt_logprobs or [])[3:] if each is not None)
        assert beams[0].cumulative_logprob == pytest.approx(total, abs=1e-4)
        with pytest.raises(SpecError, match="max_tokens = 0"):
            llm.beam_search([1] * 64, beam_width=2, max_tokens=4)


def test_widths_that_are_refused() -> None:
    for width in (0, 17):
        with pytest.raises(SpecError, match=f"beam_width = {width} is out of range"):
            ours(make_engine("llama"), [1, 2], [], width)
