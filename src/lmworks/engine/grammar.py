"""Answers of a given shape: before each token, the set of those that can still lead to one.

llguidance keeps a parser for each sequence and computes that set as a row of bits. What a stranger sends is compiled
within limits, of its text before, of the work that compiling it takes (`engine.trial`) and of the parser's work after,
so that no schema can hold up the others: one that is too large or too complex, or that no answer can fit, is refused
with the request; one that grows too complex on the way ends its own answer (`Matcher.error`).
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..data.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer
from ..spec import LMWorksError, SpecError
from .params import SamplingParams
from .trial import Trial

if TYPE_CHECKING:
    import llguidance

KEPT = 64  # compiled grammars that are kept for the next request with the same
MOST_TEXT = 64 * 1024  # characters of a schema, a regex, or all choices together
MOST_NESTING = 48  # levels of a schema; the library's own recursion is safe below 128
MOST_OPTIONAL = 256  # optional properties of one object: work grows with their square
# Between two parts of a JSON text. With more, a model that likes blanks fills its answer with them.
WHITESPACE = r"[\x20\x0A]"
# A fraction of the library's own, which let a regex such as ((a{100}){100}){100} run for two seconds before a token.
LIMITS = {
    "initial_lexer_fuel": 500_000,
    "step_lexer_fuel": 50_000,
    "step_max_items": 50_000,
    "max_items_in_row": 2000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 100_000,
    "verbose_errors": False,
}


class Matcher:
    """How far one answer has come."""

    def __init__(self, inner: llguidance.LLMatcher) -> None:
        self.inner = inner

    def accept(self, token: int) -> None:
        """The token that was picked. One that the mask forbade, or too much work, leaves an `error`."""
        self.inner.consume_token(token)

    @property
    def done(self) -> bool:
        """The answer is complete and nothing can follow: end it, whether or not an end of text was picked."""
        return self.inner.is_stopped() and not self.inner.is_error()

    @property
    def complete(self) -> bool:
        """The answer may end here; more may be able to follow."""
        return self.inner.is_accepting() and not self.inner.is_error()

    @property
    def error(self) -> str | None:
        return explained(self.inner.get_error()) if self.inner.is_error() else None


class Grammars:
    """Compiles what requests ask for, against one tokenizer. Safe to call from several threads."""

    def __init__(self, tokenizer: Tokenizer, valid: int, ends: Sequence[int] = ()) -> None:
        """The mask is for `valid` tokens; `ends` are tokens that end a text, besides the tokenizer's own."""
        self.tokenizer, self.vocab = tokenizer, max(valid, tokenizer.vocab_size)
        self.ends = sorted({tokenizer.eot, *ends})
        self.lock, self.trial = threading.Lock(), Trial(LIMITS)
        self.compiled: OrderedDict[str, llguidance.LLMatcher] = OrderedDict()  # the least used first
        self.inner: llguidance.LLTokenizer | None = None
        self.executor: llguidance.LLExecutor | None = None

    def matcher(self, params: SamplingParams) -> Matcher | None:
        """For one sequence; None: its answer may have any shape. A shape that cannot be used raises SpecError."""
        if params.json_schema is None and params.regex is None and params.choice is None:
            return None
        text = grammar(params)
        with self.lock:
            pristine = self.compiled.get(text)
            if self.inner is None:
                self.inner = adapted(self.tokenizer, self.vocab, self.ends)
        if pristine is None:
            self.trial.check(text)
            pristine = compiled(self.inner, text)
        with self.lock:
            self.compiled[text] = pristine
            self.compiled.move_to_end(text)
            while len(self.compiled) > KEPT:
                self.compiled.popitem(last=False)
            return Matcher(pristine.deep_copy())

    def masks(self, matchers: Sequence[Matcher | None], device: torch.device | str) -> Tensor | None:
        """(rows, words) int32 on the device, a bit for each token. None: every row allows every token.

        A row without a matcher allows all of them, one whose matcher is left with an `error` none.
        """
        rows = [(each.inner, i) for i, each in enumerate(matchers) if each is not None]
        if not rows:
            return None
        on_gpu = torch.device(device).type == "cuda"
        words = (self.vocab + 31) // 32
        masks = torch.full((len(matchers), words), -1, dtype=torch.int32, pin_memory=on_gpu)
        if self.executor is None:
            self.executor = imported().LLExecutor()
        self.executor.unsafe_compute_mask_ptr(rows, masks.data_ptr(), words * 4, len(matchers))
        for inner, i in rows:
            if inner.is_error():
                masks[i] = 0  # the library would let it end here, as if the answer were complete
        return masks.to(device, non_blocking=True)


def compiled(tokenizer: llguidance.LLTokenizer, text: str) -> llguidance.LLMatcher:
    library = imported()
    matcher = library.LLMatcher(tokenizer, text, log_level=0, limits=library.LLParserLimits(**LIMITS))
    if matcher.is_error():
        raise SpecError(f"the answer's shape cannot be used: {explained(matcher.get_error())}")
    trial = matcher.deep_copy()
    trial.compute_bitmask()
    if trial.is_error():
        raise SpecError(f"no answer can have the shape that was asked for: {explained(trial.get_error())}")
    return matcher


def imported() -> Any:
    try:
        import llguidance
    except ImportError:
        raise LMWorksError("json_schema, regex and choice need llguidance: pip install 'lmworks[grammar]'") from None
    return llguidance


# --- what is asked for, in the library's words ---


def grammar(params: SamplingParams) -> str:
    library = imported().LLMatcher
    if params.json_schema is not None:
        schema = checked_schema(params.json_schema)
        blanks = {"whitespace_flexible": True, "whitespace_pattern": WHITESPACE}
        try:
            return str(library.grammar_from_json_schema(schema, overrides={**blanks, "lenient": False}))
        except ValueError as error:
            raise SpecError(f"json_schema cannot be read: {explained(str(error))}") from None
    if params.regex is not None:
        check_text("regex", params.regex)
        if (len(params.regex) - len(params.regex.rstrip("\\"))) % 2:  # the library would leave it out in silence
            raise SpecError("regex ends in a lone backslash: write two for one in the answer")
        return str(library.grammar_from_regex(params.regex))
    choices = list(params.choice or ())
    if not choices or not all(isinstance(each, str) and each for each in choices):
        raise SpecError("choice must be a list of texts, at least one, none of them empty")
    check_text("choice", "|".join(choices))
    return str(library.grammar_from_regex("|".join(map(literal, choices))))


def literal(text: str) -> str:
    """A regex that matches this text alone."""
    return re.sub(r"[\\.+*?()|\[\]{}^$#&~/-]", r"\\\g<0>", text)


def check_text(name: str, text: Any) -> None:
    if not isinstance(text, str):
        raise SpecError(f"{name} must be text, not {type(text).__name__}")
    if len(text) > MOST_TEXT:
        raise SpecError(f"{name} has {len(text):,} characters: at most {MOST_TEXT:,} are compiled")
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise SpecError(f"{name} holds half of a surrogate pair: it is not Unicode text")


def checked_schema(schema: Mapping[str, Any] | str) -> str:
    """The schema as text, once it is known to be small and flat enough to be looked at."""
    if isinstance(schema, str):
        check_text("json_schema", schema)
        if text_depth(schema) > MOST_NESTING:
            raise SpecError(f"json_schema is nested more than {MOST_NESTING} levels deep")
        try:
            schema = json.loads(schema)
        except ValueError as error:
            raise SpecError(f"json_schema is not JSON: {error}") from None
    if not isinstance(schema, Mapping):
        raise SpecError(f"json_schema must be an object, not {type(schema).__name__}")
    for part in parts(schema):
        properties, required = part.get("properties"), part.get("required")
        if isinstance(properties, Mapping):
            needed = {each for each in required if isinstance(each, str)} if isinstance(required, list | tuple) else ()
            optional = len(properties.keys() - needed)
            if optional > MOST_OPTIONAL:
                raise SpecError(f"json_schema has an object of {optional} optional properties: {MOST_OPTIONAL} at most")
    try:
        text = json.dumps(schema, default=dict)
    except (TypeError, ValueError) as error:
        raise SpecError(f"json_schema cannot be written as JSON: {error}") from None
    check_text("json_schema", text)
    return text


def text_depth(text: str) -> int:
    """Deepest nesting of brackets outside strings: counted before a parser, which would nest as deep, sees the text."""
    depth = deepest = 0
    # A string that has no end is one to the end of the text: nothing is looked at twice.
    for found in re.finditer(r'"(?:[^"\\]|\\.)*+"?|[\[{]|[\]}]', text, re.DOTALL):
        step = {"[": 1, "{": 1, "]": -1, "}": -1}.get(found[0], 0)
        depth += step
        deepest = max(deepest, depth)
    return deepest


def parts(schema: Any) -> Iterator[Mapping[str, Any]]:
    """All objects inside, without recursion; refuses what is nested too deep (or in itself) or has too many."""
    layer, seen = [schema], 0
    for _ in range(MOST_NESTING + 1):
        layer = [each for each in layer if isinstance(each, Mapping | list | tuple)]
        seen += len(layer)
        if seen > MOST_TEXT:
            raise SpecError(f"json_schema has more than {MOST_TEXT:,} parts")
        yield from (each for each in layer if isinstance(each, Mapping))
        layer = [inner for each in layer for inner in (each.values() if isinstance(each, Mapping) else each)]
        if not layer:
            return
    if any(isinstance(each, Mapping | list | tuple) for each in layer):
        raise SpecError(f"json_schema is nested more than {MOST_NESTING} levels deep")


def explained(error: str) -> str:
    """The library's message in one line; its own names for limits mean nothing to a user."""
    line = " ".join(error.replace("<non-verbose/>", "").split())
    if line.startswith("NoExtension"):
        return "nothing matches it"
    if "too many expressions" in line or "items; max is" in line or "fuel" in line or "too big" in line:
        return f"it is too complex ({line[:120]})"
    return line[:300]


# --- the tokenizer ---


class ByteVocabulary:
    """`ByteTokenizer` as llguidance wants it."""

    eos_token_id = ByteTokenizer.eot
    bos_token_id = None
    special_token_ids = (ByteTokenizer.eot,)

    def __init__(self, vocab: int) -> None:
        self.tokens = [*(bytes([byte]) for byte in range(256)), b"<eot>"]
        self.tokens += [b""] * (vocab - len(self.tokens))

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode("utf-8") if isinstance(text, str) else text)


class FileVocabulary:
    """`FileTokenizer` likewise. The library can read one by itself, but where an answer has to spell the name of a
    special token, it would take that token. So names are given to it in two parts.
    """

    bos_token_id = None

    def __init__(self, tokenizer: FileTokenizer, read: llguidance.LLTokenizer) -> None:
        self.eos_token_id, self.read = tokenizer.eot, read
        ids = range(read.vocab_size)
        added = tokenizer.inner.get_added_tokens_decoder()
        # The library takes every added token for special. One that is not, as <think> often is, is text.
        self.special_token_ids = [
            each for each in ids if read.is_special_token(each) and (each not in added or added[each].special)
        ]
        self.tokens = [read.decode_bytes([each]) for each in ids]
        names = "|".join(re.escape(each.content) for each in added.values() if each.special)
        self.named = re.compile(f"(?={names})") if names else None

    def __call__(self, text: str) -> list[int]:
        starts = [found.start() + 1 for found in self.named.finditer(text)] if self.named else []
        parts = (text[begin:end] for begin, end in pairwise([0, *starts, len(text)]))
        return [token for part in parts for token in self.read.tokenize_str(part)]


def adapted(tokenizer: Tokenizer, vocab: int, ends: list[int]) -> llguidance.LLTokenizer:
    """Which bytes each token stands for. Takes one to two seconds for a large vocabulary."""
    library = imported()
    try:
        if isinstance(tokenizer, FileTokenizer):
            read = library.LLTokenizer(tokenizer.inner.to_str(), n_vocab=vocab)
            known: ByteVocabulary | FileVocabulary = FileVocabulary(tokenizer, read)
        elif isinstance(tokenizer, ByteTokenizer):
            known = ByteVocabulary(vocab)
        else:
            raise SpecError("json_schema, regex and choice need a tokenizer.json, or bytes")
        return library.LLTokenizer(library.TokenizerWrapper(known), n_vocab=vocab, eos_token=ends)
    except ValueError as error:
        raise SpecError(f"json_schema, regex and choice do not work with this tokenizer: {error}") from None
