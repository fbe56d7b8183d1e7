"""What a step brings back, where the head has more rows than the tokenizer has ids, and where nobody asked."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import torch

from lmworks.engine.core.engine import Engine
from lmworks.engine.core.model_runner import ModelRunner
from lmworks.engine.core.request import Request, Sequence
from lmworks.engine.core.sampler import metadata_of
from lmworks.engine.core.sampling_params import SamplingParams
from lmworks.engine.core.step_output import PromptLogprobsQuery, prompt_logprobs
from lmworks.model import GPT
from lmworks.spec import EngineSpec, ModelSpec

VALID = 300  # of 320 rows


def test_invalid_ids_are_not_listed() -> None:
    """Rows beyond the vocabulary are the likeliest of all here."""
    torch.manual_seed(0)
    model = GPT(ModelSpec.from_preset("tiny", tie_embeddings=False)).eval()
    model.init_weights(0)
    with torch.no_grad():
        model.head_weight[VALID:] = torch.randn_like(model.head_weight[VALID:])
    engine = Engine(ModelRunner(copy.deepcopy(model), EngineSpec(block=4, blocks=20), "cpu", VALID))
    prompt = [5, 17, 250, 3, 9, 120]
    engine.add(Request(prompt, SamplingParams(max_tokens=4, temperature=0, logprobs=3, prompt_logprobs=3)))
    [piece] = engine.run()
    assert piece.result is not None and piece.result.logprobs and piece.result.prompt_logprobs
    places = [*piece.result.logprobs, *(one for one in piece.result.prompt_logprobs if one is not None)]
    assert len(places) == 4 + 5
    assert all(len(one.top) == 3 and all(token < VALID for token, _ in one.top) for one in places)
    # The probability of tokens that exist is still the model's, over all its rows.
    with torch.no_grad():
        whole = model(torch.tensor([prompt])).log_softmax(dim=-1)[0]
    for index, one in enumerate(piece.result.prompt_logprobs[1:]):
        assert one is not None and abs(one.logprob - float(whole[index, one.token])) < 1e-4


def test_logprobs_are_computed_on_request() -> None:
    assert not metadata_of(SamplingParams(n=2, best_of=2), ()).logprobs  # all that are made are given
    assert metadata_of(SamplingParams(n=1, best_of=2), ()).logprobs
    assert metadata_of(SamplingParams(logprobs=0), ()).logprobs


def test_batch_invariant_prompt_logprobs() -> None:
    """A sum over a large vocabulary is cut up among threads otherwise where there are several rows."""
    states = 3 * torch.randn(29, 151_936, generator=torch.Generator().manual_seed(0))
    head: Any = SimpleNamespace(logits=lambda rows: rows, spec=SimpleNamespace(vocab=states.shape[1]))
    request = Request([*range(30)], SamplingParams(prompt_logprobs=2))
    sequence = Sequence(request, 0, 0, request.prompt, 30)

    def needs_logprobs(first: int, count: int) -> list[torch.Tensor]:
        rows = states[first : first + count]
        found = prompt_logprobs(head, 300, rows, [PromptLogprobsQuery(sequence, first + 1, 0, count)], invariant=True)
        return [part for part in found if part is not None]

    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        whole = needs_logprobs(0, 29)
        for row in range(29):
            for alone, among in zip(needs_logprobs(row, 1), whole, strict=True):
                assert torch.equal(alone[0], among[row])
    finally:
        torch.set_num_threads(threads)
