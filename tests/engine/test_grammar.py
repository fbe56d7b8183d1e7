"""Answers have the shape that was asked for, whatever the model; hostile shapes are refused, quickly."""

from __future__ import annotations

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Inner

from lmworks.data.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer, train_bpe
from lmworks.engine.core.detokenizer import IncrementalDetokenizer
from lmworks.engine.core.request import Request, Sequence
from lmworks.engine.core.sampler import Sampler
from lmworks.engine.core.sampling_params import SamplingParams
from lmworks.engine.grammars.grammar import (
    CACHE_BYTES,
    CACHE_SIZE,
    LIMITS,
    Grammars,
    LRUCache,
    Matcher,
    grammar,
)
from lmworks.engine.grammars.grammar_sandbox import FIRST, Budget, GrammarSandbox, TooComplex, end
from lmworks.engine.grammars.one_of import check_one_of
from lmworks.engine.grammars.schemas import text_depth
from lmworks.spec import LMWorksError, SpecError
from variations import with_slow

PADDING = 40  # ids of the model that the tokenizer does not have


def bpe() -> FileTokenizer:
    words = ['{"name": "Ada", "age": 36, "tags": ["x", "é🙂"]}', "red green blue true false null [1.5, -2e3]"]
    return FileTokenizer(Inner.from_str(train_bpe(words * 20, 420)), eot=0)


def pieces() -> FileTokenizer:
    words = ["▁", "▁{", "▁}", '▁"', "▁red", "green", "▁1", "true", "▁the", '":', ",", "12", "name"]
    names = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    inner = Inner(models.BPE({name: i for i, name in enumerate(names)}, [], unk_token="<unk>", byte_fallback=True))
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    inner.add_special_tokens(["<unk>", "</s>"])
    return FileTokenizer(inner, eot=1)


def thinking() -> FileTokenizer:
    """Added tokens that are text (as Qwen's <think> and <tool_call> are), beside one that is special."""
    tokenizer = bpe()
    tokenizer.inner.add_tokens([AddedToken(name, normalized=False) for name in ("<think>", "</think>")])
    tokenizer.inner.add_special_tokens([AddedToken("<|im_end|>")])
    return FileTokenizer(tokenizer.inner, eot=0)


TOKENIZERS: dict[str, Tokenizer] = {
    "bytes": ByteTokenizer(), "byte-level": bpe(), "pieces": pieces(), "added": thinking(),
}  # fmt: skip
GRAMMARS = {name: Grammars(each, each.vocab_size + PADDING) for name, each in TOKENIZERS.items()}


def masks_of(grammars: Grammars, matchers: list[Matcher | None]) -> torch.Tensor:
    masks = torch.full((len(matchers), grammars.mask_words), -1, dtype=torch.int32)
    grammars.fill_masks(masks, matchers)
    return masks


def answer(name: str, seed: int, params: SamplingParams, most: int = 600) -> tuple[str, Matcher]:
    """What a model with random logits answers; end of text is likely, so it is taken as soon as it is allowed."""
    tokenizer, grammars = TOKENIZERS[name], GRAMMARS[name]
    vocab = tokenizer.vocab_size + PADDING
    sampler = Sampler(vocab, vocab, 1, "cpu")
    sampler.admit(0, Sequence(Request([1], params), 0, seed, [1], 1))
    matcher = grammars.matcher(params)
    assert matcher is not None
    text, draw = IncrementalDetokenizer(tokenizer), torch.Generator().manual_seed(seed)
    for place in range(most):
        logits = torch.randn(1, vocab, generator=draw) * 2
        logits[0, tokenizer.eot] += 4
        if name == "bytes":  # else most of a string would be control characters and other scripts
            logits[0, 32:127] += 3
        sampled = sampler(logits, torch.tensor([0]), torch.tensor([place]), masks_of(grammars, [matcher]))
        assert not sampled.bad.item()
        token = int(sampled.tokens)
        matcher.accept(token)
        assert matcher.error is None
        text.push(token)
        if token == tokenizer.eot:
            assert matcher.done
        if matcher.done:
            break
    text.flush()
    return text.text, matcher


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 10},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", 3, None]}, "minItems": 1, "maxItems": 3},
        "child": {"anyOf": [{"$ref": "#/$defs/pet"}, {"type": "null"}]},
    },
    "required": ["name", "age", "tags", "child"],
    "additionalProperties": False,
    "$defs": {
        "pet": {
            "type": "object",
            "properties": {"kind": {"const": "cat"}, "id": {"type": "string", "pattern": "^[a-f0-9]{4}$"}},
            "required": ["kind"],
            "additionalProperties": False,
        }
    },
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_json_fits_its_schema(name: str) -> None:
    for seed in range(6):
        text, matcher = answer(name, seed, SamplingParams(max_tokens=600, json_schema=PERSON))
        assert matcher.done, text
        jsonschema.validate(json.loads(text), PERSON)


def test_one_of_alternatives() -> None:
    """Exactly one matches. Those that could match together are refused: a parser knows of it only at the end."""
    shapes = [
        {"type": "object", "properties": {key: {"type": "integer", "maximum": 9}}, "required": [key]} for key in "ab"
    ]
    closed = [shape | {"additionalProperties": False} for shape in shapes]
    with pytest.raises(SpecError, match=r"alternatives 0 and 1 of a oneOf may both match.*use anyOf"):
        GRAMMARS["bytes"].matcher(SamplingParams(json_schema={"oneOf": shapes}))
    for seed in range(4):
        text, _ = answer("bytes", seed, SamplingParams(max_tokens=600, json_schema={"oneOf": closed}))
        jsonschema.validate(json.loads(text), {"oneOf": closed})


def kind(name: str, **properties: Any) -> dict[str, Any]:
    """As pydantic writes a member of a discriminated union."""
    return {"type": "object", "properties": {"kind": {"const": name}, **properties}, "required": ["kind"]}


ONE_OF: list[tuple[list[Any], bool]] = [
    ([{"type": "integer"}, {"type": "string"}, {"type": ["null", "array"]}], True),
    ([{"type": "integer"}, {"type": "number"}], False),
    ([{"const": 1}, {"const": 2}], True),
    ([{"const": 1}, {"const": 1.0}], False),
    ([{"enum": ["x", "y"]}, {"enum": ["z"]}], True),
    ([{"enum": ["x", "y"]}, {"enum": ["y"]}], False),
    ([{"const": "x"}, {"type": "string"}], False),
    ([{"const": "x"}, {"type": "integer"}], True),
    ([kind("a"), kind("b")], True),
    ([kind("a"), kind("a", more={"type": "integer"})], False),
    ([{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], True),
    ([{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}], False),
    ([{"$ref": "#/$defs/endless"}, {"type": "string"}], False),
    ([{"minimum": 3}, {"maximum": 2}], False),  # both match a text
    ([kind("a"), {**kind("a"), "properties": {"kind": {"type": "integer"}}}], True),
    ([{"type": "string"}], True),
    ([{}, False], True),
    ([{}, True], False),
]


@pytest.mark.parametrize(("alternatives", "exclusive"), ONE_OF, ids=[json.dumps(each) for each, _ in ONE_OF])
def test_which_alternatives_exclude_each_other(alternatives: list[Any], exclusive: bool) -> None:
    definitions = {"a": kind("a"), "b": kind("b"), "endless": {"$ref": "#/$defs/endless"}}
    schema = {"type": "object", "properties": {"x": {"oneOf": alternatives}}, "$defs": definitions}
    if exclusive:
        check_one_of(schema)
    else:
        with pytest.raises(SpecError, match="oneOf may both match"):
            check_one_of(schema)
    # No value is found that two of them match, where that was said.
    values = [None, 1, 1.5, 2, "x", "y", "z", [], {}, {"kind": "a"}, {"kind": "b"}, {"kind": 3}]
    for value in values if exclusive else ():
        matching = [
            each
            for each in alternatives
            if jsonschema.Draft202012Validator({"$defs": definitions, "allOf": [each]}).is_valid(value)
        ]
        assert len(matching) < 2, value


def test_many_alternatives_are_refused_quickly() -> None:
    schema = {"oneOf": [{"const": number} for number in range(200)]}
    with pytest.raises(SpecError, match="more than 4096 pairs of alternatives"):
        SamplingParams(json_schema=schema) and grammar(SamplingParams(json_schema=schema))


ARITHMETIC = {
    "ebnf": 'root ::= term (("+" | "*") term)*\nterm ::= [0-9] | "(" root ")"\n',
    "lark": 'start: term (("+" | "*") term)*\nterm: /[0-9]/ | "(" start ")"\n',
}


@pytest.mark.parametrize("kind", ARITHMETIC)
@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_context_free_grammar_holds(name: str, kind: str) -> None:
    """Balanced brackets, which no regex can hold an answer to: Python's own parser accepts them."""
    for seed in range(3):
        text, matcher = answer(name, seed, SamplingParams(grammar=ARITHMETIC[kind]), most=60)
        assert re.fullmatch(r"[0-9+*()]*", text)
        if matcher.done:
            compile(text, "answer", "eval")
        else:
            assert text.count("(") >= text.count(")")


DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
NUMBER = {"type": "object", "properties": {"n": DIGIT}, "required": ["n"], "additionalProperties": False}
TAGS = {
    "type": "structural_tag",
    "triggers": ["<f="],
    "structures": [
        {"begin": "<f=add>", "schema": NUMBER, "end": "</f>"},
        {"begin": "<f=say>", "schema": {"enum": ["hi"]}, "end": "</f>"},
    ],
}  # fmt: skip


@pytest.mark.parametrize("tag", [TAGS, json.dumps(TAGS)], ids=["object", "text"])
def test_structural_tags(tag: Any) -> None:
    """Free text, until a trigger: from there the tag, its schema and its end."""
    matcher = GRAMMARS["bytes"].matcher(SamplingParams(structural_tag=tag))
    assert matcher is not None
    for byte in b"well, <b> <f=":
        assert len(allowed("bytes", matcher)) > 50
        matcher.accept(byte)
    assert allowed("bytes", matcher) == {ord("a"), ord("s")}
    for byte in b'add>{"n":':
        matcher.accept(byte)
    assert allowed("bytes", matcher) == {*b" \n0123456789"}
    for byte in b"7}</f>":
        assert byte in allowed("bytes", matcher)
        matcher.accept(byte)
    assert 256 in allowed("bytes", matcher) and ord("x") in allowed("bytes", matcher)
    assert matcher.error is None


WRONG_GRAMMARS: list[tuple[dict[str, Any], str]] = [
    ({"grammar": "((("}, "grammar is neither Lark nor EBNF"),
    ({"grammar": 'root ::= "a" undefined\n'}, "grammar"),
    ({"grammar": "x" * 70_000}, "grammar has 70,000 characters"),
    ({"structural_tag": "{"}, "structural_tag is not JSON"),
    ({"structural_tag": {"structures": []}}, "triggers must be a list of texts"),
    ({"structural_tag": {"structures": [], "triggers": ["<"]}}, "structures must be a list of 1 to 64"),
    ({"structural_tag": {**TAGS, "format": {}}}, "'format' is not known"),
    ({"structural_tag": {**TAGS, "triggers": ["<g"]}}, "starts with none of the triggers"),
    ({"structural_tag": {**TAGS, "structures": [{"begin": "<f="}]}}, "has begin, schema and end"),
    ({"structural_tag": {**TAGS, "structures": [{"begin": "<f=", "end": "", "schema": {"oneOf": [{}, {}]}}]}}, "oneOf"),
]  # fmt: skip


@pytest.mark.parametrize(("wish", "message"), WRONG_GRAMMARS, ids=[message for _, message in WRONG_GRAMMARS])
def test_grammars_that_are_refused_by_name(wish: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        GRAMMARS["bytes"].matcher(SamplingParams(**wish))


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_regex_matches_the_whole_answer(name: str) -> None:
    pattern = r"(red|green){1,3} [0-9]{2,5}(\.[0-9]+)?é?"
    for seed in range(8):
        text, matcher = answer(name, seed, SamplingParams(regex=pattern))
        assert re.fullmatch(pattern, text) and matcher.done


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_answer_is_one_of_the_choices(name: str) -> None:
    choices = ["red", "green", "redder", "a.b*c", "x/y|z", "-#&~^$", "[{(\\", "é🙂\n", "two words", '"q"']
    seen = set()
    for seed in range(40):
        text, matcher = answer(name, seed, SamplingParams(choice=choices))
        assert text in choices and matcher.done
        seen.add(text)
    assert len(seen) > 4


@pytest.mark.parametrize("name", ["byte-level", "pieces"])
def test_special_token_name_as_text(name: str) -> None:
    """By other tokens: the special one would end the text, or not be seen in it."""
    tokenizer = TOKENIZERS[name]
    assert isinstance(tokenizer, FileTokenizer)
    end = tokenizer.inner.id_to_token(tokenizer.eot)
    for text in (end, f"a{end}b", f"{end[:-1]}{end}{end}"):
        assert answer(name, 0, SamplingParams(choice=[text]))[0] == text
    assert answer(name, 0, SamplingParams(json_schema={"const": end}))[0] == json.dumps(end)


@pytest.mark.parametrize("shape", [{"choice": ["<think>"]}, {"regex": "<think>[a-z]{3}</think>x"}], ids=str)
def test_added_token_in_grammar(shape: dict[str, Any]) -> None:
    for seed in range(4):
        text, matcher = answer("added", seed, SamplingParams(**shape))
        assert matcher.done and re.fullmatch(shape.get("regex", "<think>"), text)
    assert answer("added", 0, SamplingParams(json_schema={"const": "<think>"}))[0] == '"<think>"'
    matcher = GRAMMARS["added"].matcher(SamplingParams(**shape))
    assert matcher is not None
    tokenizer = TOKENIZERS["added"]
    matcher.accept(tokenizer.encode("<think>")[0])  # and the token itself is as good as its letters
    assert matcher.error is None
    assert tokenizer.vocab_size - 1 not in allowed("added", matcher), "special tokens are never text"


def allowed(name: str, matcher: Matcher) -> set[int]:
    mask = masks_of(GRAMMARS[name], [matcher])
    return {i for i in range(TOKENIZERS[name].vocab_size + PADDING) if mask[0, i // 32].item() >> (i % 32) & 1}


def test_end_is_allowed_only_when_complete() -> None:
    matcher = GRAMMARS["bytes"].matcher(SamplingParams(regex="ab?"))
    assert matcher is not None and allowed("bytes", matcher) == {ord("a")}
    matcher.accept(ord("a"))
    assert allowed("bytes", matcher) == {ord("b"), 256} and not matcher.done
    matcher.accept(ord("b"))
    assert matcher.done and allowed("bytes", matcher) == {256}


def test_all_end_tokens_are_allowed() -> None:
    grammars = Grammars(bpe(), 500, ends=[7])
    matcher = grammars.matcher(SamplingParams(regex="x*"))
    mask = masks_of(grammars, [matcher])
    assert mask[0, 0].item() & 1 and mask[0, 0].item() >> 7 & 1


def test_forbidden_token_is_an_error() -> None:
    first, second = (GRAMMARS["bytes"].matcher(SamplingParams(choice=["yes", "no"])) for _ in range(2))
    assert first is not None and second is not None
    first.accept(ord("x"))
    assert first.error is not None and not first.done
    assert not allowed("bytes", first)  # not even its end: the answer would seem complete
    second.accept(ord("y"))
    assert second.error is None


def test_rows_without_a_grammar_allow_everything() -> None:
    grammars = GRAMMARS["byte-level"]
    matcher = grammars.matcher(SamplingParams(choice=["red"]))
    masks = masks_of(grammars, [None, matcher, None])
    assert (masks[0] == -1).all() and (masks[2] == -1).all() and (masks[1] != -1).all()
    assert (masks_of(grammars, [None, None]) == -1).all()
    assert grammars.matcher(SamplingParams()) is None


@pytest.mark.parametrize("schema", [PERSON, {"type": "object"}], ids=["schema", "any object"])
@pytest.mark.parametrize("blank", with_slow([" ", "\n", "\t", "\r"], [" ", "\t", "\r"]))
def test_json_is_not_padded(schema: dict[str, Any], blank: str) -> None:
    """A model that wants nothing but blanks gets at most one between two parts, and comes to an end."""
    matcher = GRAMMARS["bytes"].matcher(SamplingParams(json_schema=schema))
    assert matcher is not None
    quoted, padded = False, ""
    for letter in '{"name":"x","age":1,"tags":["a","b",3],"child":{"kind":"cat"}}':
        for _ in range(0 if quoted else 9):
            if ord(blank) in allowed("bytes", matcher):
                matcher.accept(ord(blank))
                padded += blank
        matcher.accept(ord(letter))
        padded, quoted = padded + letter, quoted != (letter == '"')
        assert matcher.error is None, padded
    assert matcher.done and not re.search(r"\s\s|[\t\r]", padded)
    assert padded.count(blank) == (26 if blank in " \n" else 0)
    jsonschema.validate(json.loads(padded), schema)


def test_compiled_cache_is_bounded() -> None:
    grammars = Grammars(ByteTokenizer(), 257)
    for i in range(CACHE_SIZE + 10):
        grammars.matcher(SamplingParams(choice=["always"]))
        grammars.matcher(SamplingParams(choice=[str(i)]))
    assert len(grammars.compiled) == CACHE_SIZE
    assert any("always" in text for text in grammars.compiled)
    one, two = (grammars.matcher(SamplingParams(json_schema=each)) for each in ({"type": "null"}, '{"type": "null"}'))
    assert one is not None and two is not None and len(grammars.compiled) == CACHE_SIZE


# --- hostile and mistaken shapes ---


def nested(levels: int, into: str = "items") -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "array", into: schema}
    return schema


def itself() -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "array"}
    schema["items"] = schema
    return schema


def exploding() -> dict[str, Any]:
    one = [{"properties": {f"k{i}": {"const": i}}, "required": [f"k{i}"]} for i in range(6)]
    return {"allOf": [{"anyOf": one} for _ in range(14)]}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "deep": ({"json_schema": nested(2000)}, "nested more than 48"),
    "deep text": ({"json_schema": '{"items":' * 20_000}, "characters"),
    "deep small text": ({"json_schema": '{"not":' * 5000}, "nested more than 48"),
    "in itself": ({"json_schema": itself()}, "nested more than 48"),
    "huge enum": ({"json_schema": {"enum": [f"value {i}" for i in range(100_000)]}}, "characters|parts"),
    "wide": ({"json_schema": {"properties": {f"p{i}": {} for i in range(1000)}}}, "1000 optional properties"),
    "$ref to itself": ({"json_schema": {"$ref": "#"}}, "nothing matches"),
    "$ref loop": (
        {"json_schema": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}},
        "nothing matches",
    ),
    "$ref to nowhere": ({"json_schema": {"$ref": "#/$defs/none"}}, "does not exist"),
    "$ref to elsewhere": ({"json_schema": {"$ref": "https://example.com/x.json"}}, "not present"),
    "exploding": ({"json_schema": exploding()}, "(the grammar is invalid|too complex)"),
    "never": ({"json_schema": {"type": "integer", "minimum": 5, "maximum": 4}}, "nsatisfiable"),
    "definitions that are a list": ({"json_schema": {"type": "string", "$defs": [1]}}, "defs must be an object"),
    "definitions that are text": ({"json_schema": {"definitions": "x"}}, "definitions must be an object"),
    "unknown type": ({"json_schema": {"type": "banana"}}, "banana"),
    "unknown keyword": ({"json_schema": {"not": {"type": "null"}}}, "not"),
    "a number": ({"json_schema": 5}, "must be an object"),
    "not JSON": ({"json_schema": "{"}, "not JSON"),
    "a string without an end": ({"json_schema": '"' + '\\"' * 32_000}, "not JSON"),
    "half a pair": ({"json_schema": {"const": "\ud800"}}, "json_schema"),
    "no JSON": ({"json_schema": {"const": object()}}, "cannot be written as JSON"),
    "long regex": ({"regex": "a" * 100_000}, "characters"),
    "half an escape": ({"regex": "a\\\\\\"}, "ends in a single backslash"),
    "broken regex": ({"regex": "(a"}, "unclosed group"),
    "lookahead": ({"regex": "(?=a)b"}, "look-around"),
    "impossible regex": ({"regex": "[^\\s\\S]"}, "nothing matches|(the grammar is invalid|too complex)"),
    "regex of bytes": ({"regex": b"a"}, "must be text"),
    "no choices": ({"choice": []}, "at least one"),
    "empty choice": ({"choice": ["a", ""]}, "none of them empty"),
    "many choices": ({"choice": [f"choice {i}" for i in range(50_000)]}, "characters"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_invalid_grammar_is_rejected(name: str) -> None:
    shape, message = REFUSED[name]
    grammars = GRAMMARS["byte-level"]
    start = time.process_time()
    with pytest.raises(SpecError, match=message):
        grammars.matcher(SamplingParams(**shape))
    assert time.process_time() - start < 1
    text, _ = answer("byte-level", 0, SamplingParams(choice=["red", "blue"]))  # the next request is none the wiser
    assert text in ("red", "blue")


def test_brackets_inside_strings_do_not_nest() -> None:
    assert text_depth('{"a": ["[[{", "\\"[[", {"b\\\\": [1]}]}') == 4
    assert text_depth('["a\nb", "never ends [[[') == 1


HEAVY: dict[str, dict[str, Any]] = {
    "counts of counts": {"regex": "((a{100}){100}){100}"},
    "a million": {"regex": "a{1000000}b"},
    "(x+x+)+y": {"regex": "(x+x+)+y"},
    "options": {"regex": "(a?){1000}a{1000}"},
    "subsets": {"regex": "[ab]*a[ab]{300}"},
    "nested ranges": {"regex": "(((.{1,100}){1,100}){1,100})"},
    "all letters": {"regex": "".join(f"(.*{letter})?" for letter in "abcdefghijklmnopqrstuvwxyz")},
    "pattern": {"json_schema": {"anyOf": [{"type": "string", "pattern": f".*a.{{{i}}}b"} for i in range(200)]}},
    "long string": {"json_schema": {"type": "string", "minLength": 10**6, "maxLength": 10**7}},
    "many items": {"json_schema": {"type": "array", "items": {"type": "integer"}, "minItems": 10**6}},
    "endless": {"json_schema": {"properties": {"next": {"$ref": "#"}}, "required": ["next"]}},
    "enum": {"json_schema": {"enum": [f"v{i}" for i in range(5000)]}},
    "a multiple": {"json_schema": {"type": "integer", "multipleOf": 9_999_991}},
    "words": {"regex": r"\w*" * 20_000},
    "properties": {"json_schema": {"properties": {f"p{i}": {"type": "integer"} for i in range(256)}}},
}


@pytest.mark.parametrize("name", HEAVY)
def test_complex_grammar_does_not_block_others(name: str) -> None:
    """Each either works or ends with an error of its own, and no token takes long."""
    grammars = GRAMMARS["byte-level"]
    draw, vocab = torch.Generator().manual_seed(0), TOKENIZERS["byte-level"].vocab_size
    start = time.process_time()
    try:
        matcher = grammars.matcher(SamplingParams(**HEAVY[name]))
    except SpecError as error:
        assert "complex" in str(error)
        with pytest.raises(SpecError, match="complex"):
            grammars.known(grammar(SamplingParams(**HEAVY[name])))  # the next time it is refused without a trial
        matcher = None
    times = [time.process_time() - start]
    for _ in range(25):
        if matcher is None or matcher.error is not None or matcher.done:
            break
        start = time.process_time()
        mask = masks_of(grammars, [matcher])
        assert mask is not None and bool(mask.any()) == (matcher.error is None)
        if matcher.error is None:
            bits = (mask[0].unsqueeze(1) >> torch.arange(32) & 1).flatten()[:vocab].float()
            matcher.accept(int(torch.multinomial(bits, 1, generator=draw)))
        times.append(time.process_time() - start)
    assert max(times) < 1
    if matcher is not None and matcher.error is not None:
        assert "complex" in matcher.error


def children(process: int) -> list[str]:
    return Path(f"/proc/{process}/task/{process}/children").read_text().split()


def test_the_sandbox_is_restarted_after_a_crash() -> None:
    """And nobody is left behind."""
    trial, simple = GrammarSandbox(LIMITS), json.dumps({"lark": 'start: "a"+'})
    trial.check(simple)
    first = trial.process
    assert first is not None
    trial.check(simple)
    assert trial.process is first
    with pytest.raises(SpecError, match="too complex"):
        trial.check(grammar(SamplingParams(regex=r"\w*" * 20_000)))
    assert trial.process is first and first.poll() is None and not children(first.pid), "a fork of it died"
    trial.check(simple)
    first.kill()
    first.wait()
    trial.check(simple)  # one that was killed meanwhile
    second = trial.process
    assert second is not None and second is not first
    del trial
    assert second.poll() is not None


def is_running(process: str) -> bool:
    try:
        return "(zombie)" not in Path(f"/proc/{process}/status").read_text()
    except FileNotFoundError:
        return False


def test_ended_sandbox_kills_its_fork() -> None:
    trial = GrammarSandbox(LIMITS)
    with ThreadPoolExecutor(1) as pool:
        heavy = pool.submit(trial.check, grammar(SamplingParams(regex=r"\w*" * 20_000)), Budget(1000, 2**33))
        while trial.process is None or not (forked := children(trial.process.pid)):
            time.sleep(0.01)
        end(trial.process)
        with pytest.raises(LMWorksError, match="was lost"):
            heavy.result(60)
    deadline = time.monotonic() + 10  # the kernel ends it when it is scheduled next
    while is_running(forked[0]) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_running(forked[0])


def test_small_budget_rejection_is_temporary() -> None:
    grammars = Grammars(ByteTokenizer(), 257)
    slow = grammar(SamplingParams(json_schema={"type": "integer", "multipleOf": 99_991}))  # about a second
    with pytest.raises(TooComplex, match=r"more than 0\.1 s"):
        grammars.compile(slow, FIRST)
    assert grammars.known(slow) is None, "neither compiled nor refused"
    grammars.compile(slow)
    assert grammars.known(slow) is not None
    assert 10 * 2**20 < grammars.compiled.bytes < CACHE_BYTES, "its memory was measured"


def test_rejected_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = Grammars(ByteTokenizer(), 257)
    monkeypatch.setattr(grammars.rejected, "most", 3)
    check_in_sandbox: list[str] = []
    check = GrammarSandbox.check
    monkeypatch.setattr(
        GrammarSandbox, "check", lambda trial, text, budget: check_in_sandbox.append(text) or check(trial, text, budget)
    )
    for _ in range(2):
        with pytest.raises(SpecError, match="unclosed group"):
            grammars.matcher(SamplingParams(regex="(a"))
        with pytest.raises(SpecError, match="banana"):
            grammars.matcher(SamplingParams(json_schema={"type": "banana"}))
    assert len(check_in_sandbox) == 2 and len(grammars.rejected) == 2
    for i in range(5):
        with pytest.raises(SpecError):
            grammars.matcher(SamplingParams(regex=f"({i}"))
    assert len(grammars.rejected) == 3 and len(grammars.compiled) == 0


def test_the_lru_cache_is_bounded_by_entries_and_bytes() -> None:
    kept: LRUCache[str] = LRUCache(3, 100)
    for key in "abc":
        kept.put(key, key.upper(), 30)
    assert kept.get("a") == "A" and kept.bytes == 90
    kept.put("d", "D", 10)  # the fourth: b was used least
    assert [*kept] == ["c", "a", "d"] and kept.bytes == 70
    kept.put("e", "E", 80)  # too much with those before
    assert [*kept] == ["d", "e"] and kept.get("c") is None
    kept.put("f", "F", 101)
    assert len(kept) == kept.bytes == 0, "larger than all may be"
    kept.put("g", "G", 5)
    kept.put("g", "G", 7)
    assert kept.bytes == 7
