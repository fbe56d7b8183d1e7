from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import tokenizers

from lmworks.data.tokenizer import (
    ByteTokenizer,
    FileTokenizer,
    Tokenizer,
    bpe_size,
    load_tokenizer,
    read_tokenizer,
    train_bpe,
)
from lmworks.spec import DataError, SpecError


def random_text(rng: random.Random) -> str:
    """Any characters at all but surrogates: control codes, combining marks, private use, beyond 16 bits."""
    ranges = [(0, 0x7F), (0x80, 0x2FF), (0x300, 0x36F), (0x4E00, 0x9FFF), (0xE000, 0xF8FF), (0x1F300, 0x1FAFF)]
    return "".join(chr(rng.randint(*rng.choice(ranges))) for _ in range(rng.randint(0, 60)))


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    path.write_text(train_bpe(["def f(x):\n    return x + 1\n" * 50, "for i in range(10): print(i)\n" * 50], 280))
    return path


@pytest.fixture(params=["bytes", "bpe"])
def tokenizer(request: pytest.FixtureRequest, bpe: Path) -> Tokenizer:
    return load_tokenizer("bytes" if request.param == "bytes" else bpe)


def test_encode_decode_round_trip(tokenizer: Tokenizer) -> None:
    rng = random.Random(0)
    for text in ["", " ", "\r\n\t", "a\0b", *(random_text(rng) for _ in range(300))]:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert all(0 <= i < tokenizer.vocab_size for i in ids)


def test_end_token_name_in_text_is_plain_text(tokenizer: Tokenizer) -> None:
    text = "before <|endoftext|> after"
    ids = tokenizer.encode(text)
    assert tokenizer.eot not in ids
    assert tokenizer.decode(ids) == text


def test_split_character_is_replaced(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a🙂")
    assert tokenizer.decode(ids[:-1]) == "a\ufffd"


def test_end_of_text_decodes_to_nothing(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([*tokenizer.encode("ab"), tokenizer.eot]) == "ab"


def test_byte_tokenizer_ids() -> None:
    tokenizer = load_tokenizer("bytes")
    assert (tokenizer.vocab_size, tokenizer.eot) == (257, 256)
    assert tokenizer.encode("aé") == [97, 0xC3, 0xA9]


def test_bpe_has_requested_size_and_merges(bpe: Path) -> None:
    tokenizer = load_tokenizer(bpe)
    assert tokenizer.vocab_size == 280
    assert len(tokenizer.encode("return x")) < len("return x")


def test_bpe_training_is_deterministic() -> None:
    texts = [f"def name{i}(a, b): return a * {i} + b\n" * 3 for i in range(40)]
    assert train_bpe(texts, 400) == train_bpe(texts, 400)


def with_specials(path: Path, *names: str) -> Path:
    inner = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 1}, []))
    inner.add_special_tokens(list(names))
    inner.save(str(path))
    return path


@pytest.mark.parametrize("name", ["</s>", "<|end_of_text|>", "<eos>"])
def test_common_end_tokens_are_found(tmp_path: Path, name: str) -> None:
    tokenizer = read_tokenizer(with_specials(tmp_path / "t.json", "<pad>", name))
    assert isinstance(tokenizer, FileTokenizer)
    assert tokenizer.eot == 3
    assert tokenizer.vocab_size == 4


def test_unusual_end_token_needs_eot_option(tmp_path: Path) -> None:
    path = with_specials(tmp_path / "t.json", "<finis>")
    with pytest.raises(DataError, match=r"t\.json has none of the usual.*--eot"):
        read_tokenizer(path)
    assert read_tokenizer(path, "<finis>").eot == 2
    with pytest.raises(DataError, match="no token '<nope>'"):
        read_tokenizer(path, "<nope>")


@pytest.mark.parametrize("name", ["bpe:", "bpe:x", "bpe:256", "bpe:-5", "bpe:1e4"])
def test_wrong_bpe_size_is_rejected(name: str) -> None:
    with pytest.raises(SpecError, match="at least 257"):
        bpe_size(name)


def test_invalid_tokenizer_file_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text("{}")
    with pytest.raises(DataError, match=r"t\.json is not a tokenizer\.json"):
        load_tokenizer(path)
    with pytest.raises(DataError, match=r"no tokenizer at .*gone\.json"):
        load_tokenizer(tmp_path / "gone.json")


def test_texts_are_encoded_one_after_another_when_they_are_asked_for() -> None:
    asked = []

    def lines() -> Iterator[str]:
        for line in ("ab\n", "", "ü"):
            asked.append(line)
            yield line

    ids = ByteTokenizer().encode_iterable(lines())
    assert next(ids) == ord("a") and asked == ["ab\n"]
    assert [ord("a"), *ids] == ByteTokenizer().encode("ab\nü")
