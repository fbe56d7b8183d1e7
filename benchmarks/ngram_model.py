"""An n-gram model of tokens as something that suites can evaluate: what an infilling score has to be held against.

Greedy, with backoff: the token that most often followed the longest context seen in training. It does not look at what
comes after a gap.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmworks.data import TokenData, load_tokenizer
from lmworks.evals.models import Completion, OnCompletion, OnLikelihood, Pair, Prompt

TOKEN_BITS = 20  # of a key; the other 44 are a hash of the context
LONGEST = 6  # tokens of a context
GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class NgramModel:
    def __init__(self, folders: Sequence[Path], most_tokens: int) -> None:
        """Counts of the first tokens of each folder, as many of each."""
        self.facts: dict[str, Any] = {"model": "n-gram", "tokens": most_tokens}
        self.tokenizer = load_tokenizer(folders[0])
        share = most_tokens // len(folders)
        data = [TokenData.open(folder, "train", verify=False) for folder in folders]
        tokens = [one.read(0, min(share, len(one))).astype(np.uint64) for one in data]
        self.tables = {length: likeliest(tokens, length) for length in range(LONGEST, 0, -1)}

    def generate(self, prompts: Sequence[Prompt], on_result: OnCompletion) -> None:
        for place, prompt in enumerate(prompts):
            ids = list(self.tokenizer.encode(prompt.text))
            before, text = len(ids), ""
            for _ in range(prompt.max_tokens):
                ids.append(self.following(ids))
                text = self.tokenizer.decode(ids[before:])
                if ids[-1] == self.tokenizer.eot or any(stop in text for stop in prompt.stop):
                    break
            on_result(place, Completion(text, len(ids) - before, "stop"))

    def following(self, ids: list[int]) -> int:
        for length, (contexts, tokens) in self.tables.items():
            if len(ids) >= length:
                key = hashed(np.array(ids[-length:], np.uint64), length)[0]
                at = int(np.searchsorted(contexts, key))
                if at < len(contexts) and contexts[at] == key:
                    return int(tokens[at])
        return int(self.tokenizer.eot)

    def likelihoods(self, pairs: Sequence[Pair], on_result: OnLikelihood) -> None:
        raise NotImplementedError("the baseline of infilling generates only")

    def text_likelihoods(self, texts: Sequence[str], on_result: OnLikelihood) -> None:
        raise NotImplementedError("the baseline of infilling generates only")


def hashed(tokens: NDArray[np.uint64], length: int) -> NDArray[np.uint64]:
    """Of every `length` tokens in a row, in the upper 44 bits."""
    count = len(tokens) - length + 1
    found = np.zeros(count, np.uint64)
    for place in range(length):
        found = (found ^ tokens[place : place + count]) * GOLDEN
        found ^= found >> np.uint64(29)
    return (found * GOLDEN) >> np.uint64(TOKEN_BITS)


def likeliest(parts: list[NDArray[np.uint64]], length: int) -> tuple[NDArray[np.uint64], NDArray[np.uint32]]:
    """Contexts, sorted, and the token that followed each most often (of equals, the least)."""
    keys = [
        (hashed(part[:-1], length) << np.uint64(TOKEN_BITS)) | part[length:] for part in parts if len(part) > length
    ]
    pairs, counts = np.unique(np.concatenate(keys), return_counts=True)
    contexts = pairs >> np.uint64(TOKEN_BITS)
    order = np.lexsort((-counts, contexts))
    first = np.flatnonzero(np.r_[True, contexts[order][1:] != contexts[order][:-1]])
    best = order[first]
    return contexts[best], (pairs[best] & np.uint64(2**TOKEN_BITS - 1)).astype(np.uint32)
