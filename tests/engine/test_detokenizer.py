"""Text that comes token by token is the text of all tokens at once, and stop strings are found across borders."""

from __future__ import annotations

import codecs
import random
import time
from itertools import accumulate, groupby

import pytest
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Inner

from lmworks.data.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer, train_bpe
from lmworks.engine.core.detokenizer import IncrementalDetokenizer, decode
from variations import with_slow

WORDS = ["▁", "▁▁", "▁the", "▁cat", "s", "at", "é", "▁名", "前", ",", ".", "a", "b"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def byte_level() -> FileTokenizer:
    inner = Inner.from_str(train_bpe(["the cat sat, naïve — 名前 🙂 " * 20], 400))
    inner.add_tokens([AddedToken("two words", special=False), AddedToken("naïf", special=False)])
    inner.add_special_tokens(["<|im_end|>"])
    return FileTokenizer(inner, eot=0)


def sentence_pieces(decoder: decoders.Decoder | None) -> FileTokenizer:
    vocabulary = {piece: i for i, piece in enumerate(["<unk>", "</s>", *BYTES, *WORDS])}
    inner = Inner(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    if decoder is not None:
        inner.decoder = decoder
    inner.add_special_tokens(["<unk>", "</s>"])
    inner.add_tokens(["<tool>"])
    return FileTokenizer(inner, eot=1)


def word_pieces() -> FileTokenizer:
    pieces = ["[UNK]", "[EOS]", "the", "cat", "##s", "##at", ".", ",", "don", "'", "t"]
    inner = Inner(models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s"), "removed")
    inner.decoder = decoders.WordPiece(cleanup=True)
    return FileTokenizer(inner, eot=1)


def llama() -> decoders.Decoder:
    return decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )


SENTENCES = sentence_pieces(llama())
FALLBACK = ["llama", "gemma"]  # which have bytes for characters that they have no piece of
TOKENIZERS: dict[str, Tokenizer] = {
    "bytes": ByteTokenizer(),
    "byte-level": byte_level(),
    "llama": SENTENCES,
    "gemma": sentence_pieces(decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])),
    "metaspace": sentence_pieces(decoders.Metaspace()),
    "no decoder": sentence_pieces(None),
    "word pieces": word_pieces(),
}


def shown(text: IncrementalDetokenizer, ids: list[int]) -> list[str]:
    return [*(text.push(token) for token in ids), text.flush()]


def mended(ids: list[int]) -> list[int]:
    """Ids of `sentence_pieces` in which every byte that belongs to no character is U+FFFD, written in byte tokens."""
    codecs.register_error("each byte", lambda error: ("\ufffd" * (error.end - error.start), error.end))
    found: list[int] = []
    spoken = [i for i in ids if 2 <= i < SENTENCES.vocab_size]
    for is_byte, group in groupby(spoken, key=lambda i: i < 2 + 256):
        run = list(group)
        if is_byte:
            run = [2 + byte for byte in bytes(i - 2 for i in run).decode("utf-8", "each byte").encode()]
        found += run
    return found


@pytest.mark.parametrize("name", TOKENIZERS)
def test_incremental_text_equals_full_decode(name: str) -> None:
    """Random ids: broken characters, runs of bytes, special tokens, ids that no token has."""
    tokenizer, draw = TOKENIZERS[name], random.Random(0)
    for _ in range(400):
        # Mostly from a few ids, so that runs, repetitions and leading spaces come up.
        few = [draw.randrange(tokenizer.vocab_size + 3) for _ in range(4)] + [tokenizer.vocab_size - 2]
        ids = [draw.choice(few) if draw.random() < 0.6 else draw.randrange(tokenizer.vocab_size) for _ in range(25)]
        text = IncrementalDetokenizer(tokenizer)
        parts = shown(text, ids)
        expected = tokenizer.decode(mended(ids) if name in FALLBACK else ids)
        assert "".join(parts) == text.text == decode(tokenizer, ids) == expected, ids


@pytest.mark.parametrize("name", with_slow(FALLBACK, ("gemma",)))
def test_characters_in_byte_tokens(name: str) -> None:
    """Random texts in bytes and pieces, special tokens in between: shown as soon as they are there, and as decoded."""
    tokenizer, draw = TOKENIZERS[name], random.Random(2)
    pieces = [[2 + 256 + i] for i in range(len(WORDS))]
    for _ in range(400):
        letters = "".join(draw.choice("a\n é名🙂▁\ufffd") * draw.choice([1, 1, 1, 12]) for _ in range(12))
        units = [[2 + byte for byte in letter.encode()] for letter in letters]
        units = [unit if draw.random() < 0.9 else draw.choice(pieces) for unit in units]
        text, so_far = IncrementalDetokenizer(tokenizer), []
        for unit in units:
            for token in unit:
                text.push(token)
                text.push(1)
            so_far += unit
            assert text.text == tokenizer.decode(so_far), so_far
        assert text.flush() == ""


@pytest.mark.parametrize("name", FALLBACK)
def test_invalid_byte_does_not_affect_neighbours(name: str) -> None:
    text = IncrementalDetokenizer(TOKENIZERS[name])
    assert [text.push(2 + byte) for byte in b"\n\xc3\xa9\xe2\x82A\xff\xc3"] == ["\n", "", "é", "", "", "��A", "�", ""]
    assert text.flush() == "�"


@pytest.mark.parametrize("name", ["bytes", "byte-level", *FALLBACK])
def test_incomplete_characters_are_held_back(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    written = "a🙂é, 名前a"
    ids = tokenizer.encode(written) if name not in FALLBACK else [2 + byte for byte in written.encode()]
    parts = shown(IncrementalDetokenizer(tokenizer), ids)
    assert "".join(parts) == written and "\ufffd" not in "".join(parts)
    if name != "byte-level":
        assert parts == ["a", "", "", "", "🙂", "", "é", ",", " ", "", "", "名", "", "", "前", "a", ""]


def test_unfinished_character_is_replaced_at_end() -> None:
    text = IncrementalDetokenizer(ByteTokenizer())
    assert [text.push(0xF0), text.push(0x9F), text.flush()] == ["", "", "\ufffd"]


# --- stop strings ---


def stopped_at(written: str, stop: list[str]) -> str:
    """By definition: letter by letter, until one of them is complete."""
    for so_far in accumulate(written):
        complete = [each for each in stop if so_far.endswith(each)]
        if complete:
            return so_far.removesuffix(max(complete, key=len))
    return written


def test_stop_strings_across_tokens() -> None:
    """Random texts over a small alphabet, cut into random pieces: the result depends on neither cut nor tokenizer."""
    draw = random.Random(1)
    tokenizer = sentence_pieces(decoders.Fuse())
    for _ in range(500):
        stop = ["".join(draw.choices("ab,.", k=draw.randint(1, 4))) for _ in range(draw.randint(1, 3))]
        pieces = draw.choices(["a", "b", ",", ".", "at"], k=20)
        ids = [tokenizer.inner.token_to_id(piece) for piece in pieces]
        text, seen = IncrementalDetokenizer(tokenizer, stop), ""
        expected = stopped_at("".join(pieces), stop)
        for token in ids:
            seen += text.push(token)
            assert expected.startswith(seen)  # nothing is shown that has to be taken back
            if text.stopped is not None:
                break
        seen += text.flush()
        assert seen == text.text == expected, (pieces, stop)
        assert (text.stopped is None) == (expected == "".join(pieces))


def test_possible_stop_prefix_is_held_back() -> None:
    text = IncrementalDetokenizer(ByteTokenizer(), ["END", "\n\n"])
    assert [text.push(byte) for byte in b"xEN, END."] == ["x", "", "", "EN,", " ", "", "", "", ""]
    assert text.stopped == "END" and text.flush() == "" and text.text == "xEN, "


def test_include_stop_emits_stop_string() -> None:
    text = IncrementalDetokenizer(ByteTokenizer(), ["END"], include_stop=True)
    assert "".join(map(text.push, b"an END and more")) == "an END" and text.stopped == "END"


def test_unfinished_stop_prefix_is_emitted_at_end() -> None:
    text = IncrementalDetokenizer(ByteTokenizer(), ["END"])
    assert "".join(map(text.push, b"an EN")) == "an " and text.flush() == "EN" and text.stopped is None


def test_stop_string_completed_by_held_back_text() -> None:
    """The library turns the half character into U+FFFD in the end, and that may be what was looked for."""
    text = IncrementalDetokenizer(ByteTokenizer(), ["\ufffd"])
    assert text.push(ord("a")) + text.push(0xC3) + text.flush() == "a" and text.stopped == "\ufffd"


@pytest.mark.parametrize("name", FALLBACK)
def test_stop_string_in_byte_tokens(name: str) -> None:
    text = IncrementalDetokenizer(TOKENIZERS[name], ["\n", "é"])
    assert text.push(2 + ord("a")) == "a" and text.stopped is None
    assert text.push(2 + ord("\n")) == "" and text.stopped == "\n" and text.text == "a"
    text = IncrementalDetokenizer(TOKENIZERS[name], ["\n", "é"])
    assert text.push(2 + 0xC3) == "" and text.stopped is None
    assert text.push(2 + 0xA9) == "" and text.stopped == "é"


def test_no_stop_before_min_tokens() -> None:
    text = IncrementalDetokenizer(ByteTokenizer(), ["."], min_tokens=5)
    assert "".join(map(text.push, b"a.b.c.d")) == "a.b.c" and text.stopped == "."


@pytest.mark.parametrize("name", ["byte-level", "llama"])
def test_cost_per_token_is_constant(name: str) -> None:
    """Also where nothing ever settles: broken characters, spaces, a text that keeps beginning a stop string."""
    tokenizer = TOKENIZERS[name]
    assert isinstance(tokenizer, FileTokenizer)
    broken = tokenizer.inner.token_to_id("<0xE2>" if name == "llama" else "â")
    space = tokenizer.inner.token_to_id("▁" if name == "llama" else "Ġ")
    for token in (broken, space):
        text = IncrementalDetokenizer(tokenizer, [" " * 50 + "."])
        times = []
        for _ in range(20):
            start = time.process_time()
            for _ in range(1000):
                text.push(token)
            times.append(time.process_time() - start)
        assert min(times[-5:]) < 4 * max(times[:5])
