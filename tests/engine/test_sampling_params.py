"""SamplingParams are valid by construction: what the engine could stumble over in a later step is refused here."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lmworks.engine.core.sampling_params import SamplingParams
from lmworks.spec import SpecError

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"temperature": None}, "temperature = None: a finite number"),
    ({"temperature": "1"}, "temperature = '1': a finite number"),
    ({"temperature": float("nan")}, "temperature = nan: a finite number"),
    ({"temperature": 1e300}, "temperature = 1e.300: a finite number"),  # infinite in fp32
    ({"temperature": 10**400}, "temperature = 10000.*: a finite number"),
    ({"top_p": True}, "top_p = True: a finite number"),
    ({"top_p": 0}, "top_p = 0 is out of range: it must be more than 0 and at most 1"),
    ({"top_k": 1.5}, r"top_k = 1\.5: a whole number"),
    ({"top_k": -1}, "top_k = -1 is out of range: it must be at least 0"),
    ({"max_tokens": None}, "max_tokens = None: a whole number"),
    ({"max_tokens": 4.0}, r"max_tokens = 4\.0: a whole number"),
    ({"max_tokens": 2**31}, "max_tokens = 2147483648 is out of range: it must be at least 1 and at most 2147483647"),
    ({"max_tokens": 3, "min_tokens": 4}, "min_tokens = 4 is out of range: it must be at least 0 and at most 3"),
    ({"n": 2.0}, r"n = 2\.0: a whole number"),
    ({"n": 3, "best_of": 2}, "best_of = 2 is out of range: it must be at least 3 and at most 128"),
    ({"seed": 1.5}, r"seed = 1\.5: a whole number"),
    ({"seed": 2**63}, "seed = 9223372036854775808 is out of range"),
    ({"logprobs": True}, "logprobs = True: a whole number"),
    ({"stop": 3}, "stop = 3: a list of texts"),
    ({"stop_token_ids": np.array(3)}, r"stop_token_ids = array\(3\): a list of token ids"),
    ({"stop": [3]}, r"stop = \[3\]: a list of texts"),
    ({"stop": ["a", ""]}, "stop holds an empty string"),
    ({"stop_token_ids": 3}, "stop_token_ids = 3: a list of token ids"),
    ({"stop_token_ids": ["3"]}, r"stop_token_ids = \['3'\]: a list of token ids"),
    ({"choice": "yes"}, "choice = 'yes': a list of texts"),
    ({"choice": [1]}, r"choice = \[1\]: a list of texts"),
    ({"logit_bias": [3]}, r"logit_bias = \[3\]: a mapping"),
    ({"logit_bias": {"x": 1.0}}, "logit_bias: 'x' is not a token id"),
    ({"logit_bias": {3: "1"}}, "logit_bias of token 3 is '1': it must be finite"),
    ({"logit_bias": {3: 1e300}}, "logit_bias of token 3 is 1e.300: it must be finite"),
    ({"ignore_eos": "false"}, "ignore_eos = 'false': true or false"),
    ({"adapter": ["a"]}, r"adapter = \['a'\]: the name of an adapter"),
    ({"regex": b"a"}, "regex = b'a': it must be text"),
    ({"json_schema": [1]}, r"json_schema = \[1\]: it must be an object"),
    ({"regex": "a", "choice": ["a"]}, "regex and choice cannot be combined"),
]


@pytest.mark.parametrize(("wishes", "message"), WRONG, ids=[str(wishes) for wishes, _ in WRONG])
def test_invalid_values_are_rejected(wishes: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        SamplingParams(**wishes)


def test_equivalent_spellings_of_parameters() -> None:
    plain = SamplingParams(temperature=0.5, top_k=3, seed=7, stop=("a",), stop_token_ids=(4,), logit_bias={12: -1.0})
    other = SamplingParams(
        temperature=np.float32(0.5),  # type: ignore[arg-type]
        top_k=np.int64(3),  # type: ignore[arg-type]
        seed=np.int64(7),  # type: ignore[arg-type]
        stop="a",
        stop_token_ids=np.array([4]),  # type: ignore[arg-type]
        logit_bias={"12": -1},  # type: ignore[dict-item]  # as JSON has it
    )
    assert other == plain
    nothing: dict[str, Any] = {"stop": None, "stop_token_ids": None, "logit_bias": None, "choice": None, "seed": None}
    assert SamplingParams(**nothing) == SamplingParams()
