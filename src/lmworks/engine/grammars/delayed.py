"""A grammar that begins after a text: the reasoning of an answer is free, and what follows it has a structure."""

from __future__ import annotations

from ...data.tokenizer import Tokenizer
from ..core.detokenizer import IncrementalDetokenizer
from .grammar import Matcher


class DelayedGrammar:
    def __init__(self, matcher: Matcher, tokenizer: Tokenizer, after: str) -> None:
        self.matcher, self.tokenizer = matcher, tokenizer
        self.text = IncrementalDetokenizer(tokenizer, (after,), skip_special_tokens=False)

    def push(self, token: int) -> Matcher | None:
        """The matcher, once the text is complete. What its last token has after it is part of the structure."""
        self.text.push(token)
        if self.text.stopped is None:
            return None
        for known in self.tokenizer.encode(self.text.after_stop.lstrip()) if self.text.after_stop.strip() else ():
            self.matcher.accept(known)
        return self.matcher
