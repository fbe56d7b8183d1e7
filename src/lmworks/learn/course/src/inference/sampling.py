"""From logits to a token: truncation, and checking what a smaller model has guessed."""

from __future__ import annotations

from torch import Tensor

from lmworks.learn import unfinished  # noqa: F401 - what is not written yet runs as the reference does


def truncated(logits: Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """(vocab) logits → the probabilities to sample from (vocab).

    top_k keeps the k likeliest tokens (0: all). top_p keeps, of the probabilities within those, the fewest that sum to
    top_p or more. Tokens as likely as the last one kept are kept, too.
    """
    # exercise top_k_top_p(logits, temperature, top_k, top_p)
    scaled = logits / temperature
    ordered = scaled.sort(descending=True).values[: top_k or None]
    probabilities = ordered.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    kept = max(1, int((before < top_p).sum()))
    return scaled.masked_fill(scaled < ordered[kept - 1], float("-inf")).softmax(dim=-1)
    # end top_k_top_p


def accept(draft: list[int], q: Tensor, p: Tensor, chances: list[float]) -> tuple[int, Tensor]:
    """How many draft tokens are accepted, and the distribution (vocab) that the token after them is sampled from.

    Draft token i was sampled from q[i]; the model's own distribution there is p[i]. p has a row more than q: after the
    last draft token. chances[i] is uniform in [0, 1): token i is accepted if it is below p / q of that token.
    """
    # exercise speculative(draft, q, p, chances)
    for index, token in enumerate(draft):
        if chances[index] * q[index, token] >= p[index, token]:
            rest = (p[index] - q[index]).clamp(min=0)
            return index, rest / rest.sum()
    return len(draft), p[len(draft)]
    # end speculative
