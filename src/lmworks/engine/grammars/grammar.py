"""Structured output: before each token, a mask of those that the grammar allows.

llguidance keeps a parser for each sequence and computes the mask as a bitmask. Untrusted grammars are compiled within
limits on their text, on the work of compiling (`engine.grammars.grammar_sandbox`) and on the parser's work, so that no
schema can block other requests: one that is too large, too complex or unsatisfiable is rejected with its request; one
that exceeds the parser's limits while decoding ends its own answer (`Matcher.error`).
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from queue import LifoQueue
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from torch import Tensor

from ...data.tokenizer import Tokenizer
from ...spec import SpecError
from ..core.sampling_params import SHAPES, SamplingParams
from .context_free import as_lark, tag_grammar
from .grammar_sandbox import FULL, Budget, GrammarSandbox, TooComplex
from .schemas import SCHEMA_OPTIONS, check_text, checked_schema
from .token_bytes import import_llguidance, to_llguidance

if TYPE_CHECKING:
    import llguidance

CACHE_SIZE, CACHE_BYTES = 64, 2**29  # of compiled grammars
REJECTED_CACHE_SIZE = 1024  # error messages of rejected grammars
MAX_SANDBOXES = 3  # processes
SMALL = 4096  # characters of choices that are always compiled in a few milliseconds
ANY_OBJECT: dict[str, Any] = {"type": "object"}
# A fraction of the library's defaults, under which a regex such as ((a{100}){100}){100} runs for two seconds a token.
LIMITS = {
    "initial_lexer_fuel": 500_000,
    "step_lexer_fuel": 50_000,
    "step_max_items": 50_000,
    "max_items_in_row": 2000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 100_000,
    "verbose_errors": False,
}

Value = TypeVar("Value")


class LRUCache(Generic[Value]):
    """Bounded by entries and bytes. Not thread-safe."""

    def __init__(self, most: int, most_bytes: int | None = None) -> None:
        self.most, self.most_bytes = most, most_bytes
        self.values: OrderedDict[Hashable, tuple[Value, int]] = OrderedDict()  # least recently used first
        self.bytes = 0

    def __len__(self) -> int:
        return len(self.values)

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self.values)

    def get(self, key: Hashable) -> Value | None:
        if key not in self.values:
            return None
        self.values.move_to_end(key)
        return self.values[key][0]

    def put(self, key: Hashable, value: Value, size: int = 0) -> None:
        """Insert, evicting the least recently used; an entry above `most_bytes` is not cached."""
        self.drop(key)
        self.values[key] = (value, size)
        self.bytes += size
        while len(self.values) > self.most or (self.most_bytes is not None and self.bytes > self.most_bytes):
            self.drop(next(iter(self.values)))

    def drop(self, key: Hashable) -> None:
        _, size = self.values.pop(key, (None, 0))
        self.bytes -= size


class Matcher:
    """The grammar state of one sequence."""

    def __init__(self, inner: llguidance.LLMatcher) -> None:
        self.inner = inner

    def accept(self, token: int) -> None:
        """Advance by a sampled token. A token that the mask forbids, or too much work, sets `error`."""
        self.inner.consume_token(token)

    @property
    def done(self) -> bool:
        """The answer is complete and nothing can follow, whether or not end-of-text was sampled."""
        return self.inner.is_stopped() and not self.inner.is_error()

    @property
    def complete(self) -> bool:
        """The answer may end here, or continue."""
        return self.inner.is_accepting() and not self.inner.is_error()

    @property
    def error(self) -> str | None:
        return error_message(self.inner.get_error()) if self.inner.is_error() else None


class Grammars:
    """Compiles grammars for one tokenizer. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, valid: int, ends: Sequence[int] = ()) -> None:
        """`valid`: size of the mask; `ends`: end-of-text tokens beside the tokenizer's."""
        self.tokenizer, self.vocab = tokenizer, max(valid, tokenizer.vocab_size)
        self.ends = sorted({tokenizer.eot, *ends})
        self.lock, self.reading = threading.Lock(), threading.Lock()
        self.compiled: LRUCache[llguidance.LLMatcher] = LRUCache(CACHE_SIZE, CACHE_BYTES)  # by the grammar's text
        self.rejected: LRUCache[str] = LRUCache(REJECTED_CACHE_SIZE)  # why, by the digest of the text
        self.sandboxes: LifoQueue[GrammarSandbox] = LifoQueue()
        for _ in range(MAX_SANDBOXES):
            self.sandboxes.put(GrammarSandbox(LIMITS))
        self.inner: llguidance.LLTokenizer | None = None
        self.executor: llguidance.LLExecutor | None = None

    def matcher(self, params: SamplingParams, compiled: llguidance.LLMatcher | None = None) -> Matcher | None:
        """For one sequence; None without structured output. An unusable grammar raises SpecError."""
        if not params.structured:
            return None
        try:
            pristine = compiled or self.compile(grammar(params))
        except SpecError as error:
            raise naming_shape(params, error) from None
        with self.lock:
            return Matcher(pristine.deep_copy())

    def compile(self, text: str, budget: Budget | None = FULL) -> llguidance.LLMatcher:
        """The initial matcher of a grammar. One that exceeds the budget raises TooComplex; it is remembered as rejected
        only if the budget was the full one. No budget: the grammar is known to be small, and skips the sandbox.
        """
        if (found := self.known(text)) is not None:
            return found
        try:
            size = 0 if budget is None else self.check_in_sandbox(text, budget)
            found = compiled(self.tokens(), text)
        except TooComplex as error:
            if budget == FULL:
                self.reject(text, error)
            raise
        except SpecError as error:
            self.reject(text, error)
            raise
        with self.lock:
            self.compiled.put(text, found, size)
        return found

    def known(self, text: str) -> llguidance.LLMatcher | None:
        """The cached matcher, or None; raises the cached error of a rejected grammar."""
        with self.lock:
            if (why := self.rejected.get(digest(text))) is not None:
                raise SpecError(why)
            return self.compiled.get(text)

    def reject(self, text: str, error: SpecError) -> None:
        with self.lock:
            self.rejected.put(digest(text), str(error))

    def check_in_sandbox(self, text: str, budget: Budget) -> int:
        sandbox = self.sandboxes.get()
        try:
            return sandbox.check(text, budget)
        finally:
            self.sandboxes.put(sandbox)

    def tokens(self) -> llguidance.LLTokenizer:
        with self.reading:
            if self.inner is None:
                self.inner = to_llguidance(self.tokenizer, self.vocab, self.ends)
            return self.inner

    @property
    def mask_words(self) -> int:
        return (self.vocab + 31) // 32

    def fill_masks(self, masks: Tensor, matchers: Sequence[Matcher | None]) -> None:
        """Fill the rows (rows, words) int32 of those with a matcher: a bit for each token.

        A row whose matcher has an `error` allows none.
        """
        rows = [(each.inner, i) for i, each in enumerate(matchers) if each is not None]
        if not rows:
            return
        if self.executor is None:
            self.executor = import_llguidance().LLExecutor()
        self.executor.unsafe_compute_mask_ptr(rows, masks.data_ptr(), masks.shape[1] * 4, len(matchers))
        for inner, i in rows:
            if inner.is_error():
                masks[i] = 0  # the library would allow end-of-text


def compiled(tokenizer: llguidance.LLTokenizer, text: str) -> llguidance.LLMatcher:
    library = import_llguidance()
    matcher = library.LLMatcher(tokenizer, text, log_level=0, limits=library.LLParserLimits(**LIMITS))
    if matcher.is_error():
        raise SpecError(f"the grammar is invalid: {error_message(matcher.get_error())}")
    sandbox = matcher.deep_copy()
    sandbox.compute_bitmask()
    if sandbox.is_error():
        raise SpecError(f"no answer can match this grammar: {error_message(sandbox.get_error())}")
    return matcher


# --- from sampling parameters to a grammar ---------------------------------------------------------------


def grammar(params: SamplingParams) -> str:
    library = import_llguidance().LLMatcher
    if params.json_schema is not None:
        try:
            return str(library.grammar_from_json_schema(checked_schema(params.json_schema), overrides=SCHEMA_OPTIONS))
        except ValueError as error:
            raise SpecError(f"json_schema cannot be read: {error_message(str(error))}") from None
    if params.regex is not None:
        check_text("regex", params.regex)
        if (len(params.regex) - len(params.regex.rstrip("\\"))) % 2:  # the library would drop it silently
            raise SpecError("regex ends in a single backslash: write two for one in the answer")
        return str(library.grammar_from_regex(params.regex))
    if params.grammar is not None:
        return str(library.grammar_from_lark(as_lark(params.grammar)))
    if params.structural_tag is not None:
        return str(library.grammar_from_lark(tag_grammar(params.structural_tag)))
    choices = list(params.choice or ())
    if not choices or not all(isinstance(each, str) and each for each in choices):
        raise SpecError("choice must be a list of texts, at least one, none of them empty")
    check_text("choice", "|".join(choices))
    return str(library.grammar_from_regex("|".join(map(literal, choices))))


def naming_shape(params: SamplingParams, error: SpecError) -> SpecError:
    """What is wrong, beginning with the parameter that asked for this grammar."""
    shape, message = next(name for name in SHAPES if getattr(params, name) is not None), str(error)
    return error if re.match(rf"{shape}\b", message) else SpecError(f"{shape}: {message}")


def simple(params: SamplingParams) -> bool:
    """Whether it is always compiled fast: any JSON object, or few choices."""
    if params.choice is not None:
        return sum(map(len, params.choice)) <= SMALL
    return params.json_schema == ANY_OBJECT


def digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", errors="surrogatepass")).digest()


def literal(text: str) -> str:
    """A regex that matches this text alone."""
    return re.sub(r"[\\.+*?()|\[\]{}^$#&~/-]", r"\\\g<0>", text)


def error_message(error: str) -> str:
    """The library's message in one line."""
    line = " ".join(error.replace("<non-verbose/>", "").split())
    if line.startswith("NoExtension"):
        return "nothing matches it"
    if "too many expressions" in line or "items; max is" in line or "fuel" in line or "too big" in line:
        return f"it is too complex ({line[:120]})"
    return line[:300]
