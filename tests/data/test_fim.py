"""Fill-in-the-middle: parts join to the text again, and a batch follows from (seed, cursor) alone."""

from __future__ import annotations

import itertools
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from corpora import make_corpus

from lmworks.data import Batches, prepare
from lmworks.data.fim import FillInMiddle, Sentinels, uniforms
from lmworks.data.loader import IGNORED, Batch
from lmworks.data.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer, load_tokenizer, read_tokenizer, train_bpe
from lmworks.spec import DataError, DataSpec, RunSpec, SpecError
from lmworks.spec.fim import FAMILIES, FimSpec

SEQ = 96
SOURCE = '''import os


def naïve(path: str) -> int:
    """日本 🙂"""
    total = 0
    for name in os.listdir(path):
        total += len(name)
    return total


class Counter:
    def add(self, n: int) -> None:
        self.n += n
'''


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents in a tokenizer that has merges and the tokens of code models."""
    root = tmp_path_factory.mktemp("code")
    make_corpus(root / "text")
    return prepare([str(root / "text")], root / "tokens", "bpe:400+code", val_fraction=0.2, workers=1).folder


@pytest.fixture(scope="module")
def bpe(code: Path) -> Tokenizer:
    return load_tokenizer(code)


def data(folder: Path, fim: dict[str, object], **changes: object) -> DataSpec:
    return DataSpec(path=str(folder), seq=SEQ, micro_batch=2, global_batch=8, fim=fim, **changes)


def parts(tokens: list[int], marks: Sentinels) -> tuple[list[int], list[int], list[int]]:
    """Prefix, middle, suffix of an example, read by its sentinels and not by the code that made it."""
    p, s, m = (tokens.index(mark) for mark in (marks.prefix, marks.suffix, marks.middle))
    stop = tokens.index(marks.end) if marks.end is not None else len(tokens)
    if s < p:  # suffix, prefix, middle
        return tokens[p + 1 : m], tokens[m + 1 : stop], tokens[s + 1 : p]
    if s == p + 1 and p == 0 and marks.joined:  # an empty prefix, or suffix first: prefix and middle are joined
        return [], tokens[m + 1 : stop], tokens[s + 1 : m]
    return tokens[p + 1 : s], tokens[m + 1 : stop], tokens[s + 1 : m]


@pytest.mark.parametrize("split", ["character", "token", "line", "syntax"])
@pytest.mark.parametrize("spm_rate", [0.0, 1.0])
@pytest.mark.parametrize("family", ["starcoder", "mellum"])
def test_parts_join_to_the_document(bpe: Tokenizer, split: str, spm_rate: float, family: str) -> None:
    if split == "syntax":
        pytest.importorskip("tree_sitter")
    made = FillInMiddle(FimSpec(rate=1.0, spm_rate=spm_rate, split=split, sentinels=family), bpe, seed=0)
    document = bpe.encode(SOURCE)
    for draw in uniforms(0, 5, 200).tolist():
        example = made.example([*document, bpe.eot], draw)
        assert example.pop() == bpe.eot  # a middle is followed by end-of-text
        prefix, middle, suffix = parts(example, made.sentinels)
        if split == "token":
            assert prefix + middle + suffix == document
        assert "".join(bpe.decode(part) for part in (prefix, middle, suffix)) == SOURCE
        if spm_rate == 0 or family == "mellum":  # as a prompt is encoded: each part for itself
            texts = [bpe.decode(part) for part in (prefix, middle, suffix)]
            assert split == "token" or [bpe.encode(text) for text in texts] == [prefix, middle, suffix]


def test_orders_of_the_parts() -> None:
    """PSM and the two suffix-first orders, as Bavarian et al. (2022) and Mellum's model card write them."""
    p, m, s = [1], [2], [3]
    joined = Sentinels(prefix=90, suffix=91, middle=92, end=None, joined=True)
    assert joined.example(p, m, s, suffix_first=False) == [90, 1, 91, 3, 92, 2]
    assert joined.example(p, m, s, suffix_first=True) == [90, 91, 3, 92, 1, 2]
    mellum = Sentinels(prefix=90, suffix=91, middle=92, end=None, joined=False)
    assert mellum.example(p, m, s, suffix_first=True) == [91, 3, 90, 1, 92, 2]
    llama = Sentinels(prefix=90, suffix=91, middle=92, end=93, joined=True)
    assert llama.example(p, m, s, suffix_first=False) == [90, 1, 91, 3, 92, 2, 93]
    assert llama.prompt(p, s) == [90, 1, 91, 3, 92]


@pytest.mark.parametrize("family", FAMILIES)
def test_sentinels_are_found_by_name(family: str) -> None:
    import tokenizers

    names = FAMILIES[family]
    reserved = [name for name in (names.prefix, names.suffix, names.middle, names.end) if name]
    inner = tokenizers.Tokenizer.from_str(train_bpe([SOURCE], 300, reserved))
    tokenizer = FileTokenizer(inner, eot=0)
    assert Sentinels.of(FimSpec(sentinels=family), tokenizer).ids == list(range(1, 1 + len(reserved)))
    text = f"a {names.prefix} b"  # a document that names a sentinel has none
    assert not set(tokenizer.encode(text)) & set(range(1 + len(reserved)))


def test_cuts_are_uniform(bpe: Tokenizer) -> None:
    """Both cuts of a text of n characters are uniform on its n + 1 places: a middle has (n + 2)/3 on average."""
    made = FillInMiddle(FimSpec(rate=1.0), bpe, seed=0)
    text = "x" * 29
    spans = np.array([made.span(text, a, b) for _, _, a, b in uniforms(1, 0, 20_000).tolist()])
    counts = np.bincount(spans.ravel(), minlength=30)
    assert abs(counts / counts.sum() - 1 / 30).max() < 0.003
    expected = (30**2 - 1) / (3 * 30)  # of the distance of two uniform places out of 30
    assert abs((spans[:, 1] - spans[:, 0]).mean() - expected) < 0.1


def test_rates(bpe: Tokenizer, code: Path) -> None:
    spec = data(code, {"rate": 0.6, "spm_rate": 0.25})
    batches = Batches(spec, seed=0)
    assert batches.fim is not None
    marks = batches.fim.sentinels
    rows = [row for cursor in range(150) for b in batches.at(cursor) for row in b.tokens.tolist()]
    pieces = [piece for row in rows for piece in split(row, bpe.eot)[:-1] if len(piece) > 10]
    examples = [piece for piece in pieces if marks.middle in piece]
    assert len(pieces) > 1000
    assert abs(len(examples) / len(pieces) - 0.6) < 0.05
    joined = [piece for piece in examples if piece[:2] == [marks.prefix, marks.suffix]]
    assert abs(len(joined) / len(examples) - 0.25) < 0.06


def test_lines_and_limits(bpe: Tokenizer) -> None:
    lines = FillInMiddle(FimSpec(rate=1.0, split="line", max_middle=60), bpe, seed=0)
    short = FillInMiddle(FimSpec(rate=1.0, max_middle=10), bpe, seed=0)
    seen = set()
    for _, _, a, b in uniforms(3, 0, 300).tolist():
        first, last = lines.span(SOURCE, a, b)
        assert all(at in (0, len(SOURCE)) or SOURCE[at - 1] == "\n" for at in (first, last)) and last - first <= 60
        seen.add(SOURCE[first:last].count("\n"))
        first, last = short.span(SOURCE, a, b)
        assert 0 <= last - first <= 10
    assert len(seen) >= 3


def test_syntax_nodes(bpe: Tokenizer) -> None:
    """Middles are nodes of the tree: each is the source of something that Python's own parser knows."""
    pytest.importorskip("tree_sitter")
    import ast

    made = FillInMiddle(FimSpec(rate=1.0, split="syntax"), bpe, seed=0)
    middles = {SOURCE[slice(*made.span(SOURCE, a, b))] for _, _, a, b in uniforms(4, 0, 400).tolist()}
    known = {ast.get_source_segment(SOURCE, node) for node in ast.walk(ast.parse(SOURCE)) if hasattr(node, "lineno")}
    assert len(middles & known) >= 12  # statements, calls, names
    assert "for name in os.listdir(path):\n        total += len(name)" in middles
    assert SOURCE not in middles
    limit = FillInMiddle(FimSpec(rate=1.0, split="syntax", max_middle=30), bpe, seed=0)
    assert all(
        last - first <= 30 for first, last in (limit.span(SOURCE, a, b) for *_, a, b in uniforms(4, 0, 100).tolist())
    )


def test_missing_grammar_is_named() -> None:
    pytest.importorskip("tree_sitter")
    with pytest.raises(SpecError, match="pip install tree-sitter-klingon"):
        FillInMiddle(FimSpec(rate=1.0, split="syntax", language="klingon"), ByteTokenizer(), seed=0)


@pytest.mark.parametrize("mask", [False, True])
def test_rows_hold_their_documents(code: Path, bpe: Tokenizer, mask: bool) -> None:
    """No part crosses a document: between two ends-of-text lies the text of the same piece, but for the last one."""
    fim, plain = (Batches(data(code, one, document_mask=mask), seed=3) for one in ({"rate": 1.0, "spm_rate": 0.0}, {}))
    assert fim.fim is not None
    marks, whole = fim.fim.sentinels, 0
    for cursor in range(40):
        for made, given in zip(fim.at(cursor), plain.at(cursor), strict=True):
            for row, old in zip(made.tokens.tolist(), given.tokens.tolist(), strict=True):
                pieces, before = split(row, bpe.eot), split(old, bpe.eot)
                for piece, text in zip(pieces[:-1], before, strict=False):
                    joined = list(itertools.chain(*parts(piece, marks))) if marks.middle in piece else piece
                    assert bpe.decode(joined) == bpe.decode(text)
                    whole += 1
    assert whole > 200


def split(row: list[int], eot: int) -> list[list[int]]:
    """Pieces of documents; all but the last are whole. What pads the row is left out."""
    pieces: list[list[int]] = [[]]
    while row[-1] == eot:
        row = row[:-1]
    for token in row:
        if token == eot:
            pieces.append([])
        else:
            pieces[-1].append(token)
    return pieces


def test_document_mask_follows_the_new_places(code: Path, bpe: Tokenizer) -> None:
    for batch in Batches(data(code, {"rate": 0.8}, document_mask=True), seed=1).at(4):
        assert batch.documents is not None
        ended = torch.cumsum(batch.tokens == bpe.eot, dim=1)
        within = torch.cat([torch.zeros(len(ended), 1, dtype=torch.int64), ended[:, :-1]], dim=1)
        trained = batch.targets != IGNORED
        assert torch.equal(batch.documents[trained], within[trained])
        assert batch.counted == int(trained.sum())


@pytest.mark.parametrize("fim", [{"rate": 0.7}, {"rate": 0.7, "split": "token"}])
def test_batches_follow_from_seed_and_cursor(code: Path, fim: dict[str, object]) -> None:
    """One rank or four, read in order or resumed in the middle, in this process or in workers: the same bits."""
    spec = data(code, fim, document_mask=True)
    alone = Batches(spec, seed=7)
    expected = [alone.at(cursor) for cursor in range(12)]
    ranks = [Batches(spec, seed=7, rank=rank, world=4) for rank in range(4)]
    for cursor, step in enumerate(expected):
        assert same(step, [batch for rank in ranks for batch in rank.at(cursor)])
    assert all(map(same, expected[5:], Batches(spec, seed=7).stream(5, 12, workers=2)))
    assert same(pickle.loads(pickle.dumps(alone)).at(3), expected[3])
    assert not same(Batches(spec, seed=8).at(0), expected[0])


def same(a: list[Batch], b: list[Batch]) -> bool:
    pairs = [
        (x, y) for one, two in zip(a, b, strict=True) for x, y in ((one.tokens, two.tokens), (one.targets, two.targets))
    ]
    return all(torch.equal(x, y) for x, y in pairs)


def test_every_epoch_is_cut_anew(code: Path) -> None:
    batches = Batches(data(code, {"rate": 1.0}, shuffle=False), seed=0)
    windows = batches.windows
    one, two = (batches.origins(np.array([sample]))[0] for sample in (0, windows))
    assert one.window == two.window and not np.array_equal(one.tokens, two.tokens)


def test_every_middle_is_followed_by_end_of_text(code: Path, bpe: Tokenizer) -> None:
    """Of the last piece of a row too, which goes on in the next window: its middle is complete."""
    batches = Batches(data(code, {"rate": 1.0, "spm_rate": 0.0}), seed=0)
    assert batches.fim is not None
    for sample in range(100):
        row = batches.origins(np.array([sample]))[0].tokens.tolist()
        last = len(row) - 1 - row[::-1].index(batches.fim.sentinels.middle)
        assert bpe.eot in row[last:]


def test_every_token_of_an_example_is_trained(code: Path, bpe: Tokenizer) -> None:
    """Sentinels, prefix, suffix, middle and the end after it: each is the target of the token before it."""
    batches = Batches(data(code, {"rate": 1.0}), seed=0)
    assert batches.fim is not None
    for batch in batches.at(0):
        for tokens, targets in zip(batch.tokens.tolist(), batch.targets.tolist(), strict=True):
            ignored = [at for at, target in enumerate(targets) if target == IGNORED]
            last = ignored[0] if ignored else len(targets)
            assert ignored == list(range(last, len(targets)))  # padding alone
            seen = min(last, len(tokens) - 1)  # the last target is beyond the row
            assert tokens[1 : seen + 1] == targets[:seen] and (last == len(targets) or tokens[last] == bpe.eot)
            assert {batches.fim.sentinels.prefix, batches.fim.sentinels.middle} <= {tokens[0], *targets}


def test_held_out_rows_are_left_to_right(code: Path) -> None:
    with_fim, without = (Batches(data(code, {"rate": rate}), seed=0, split="val") for rate in (1.0, 0.0))
    assert all(map(same, with_fim.stream(0, 4), without.stream(0, 4)))


def test_a_row_may_begin_within_a_character(prepared: Path) -> None:
    """Bytes: windows cut characters in two, and every byte of a whole piece is still there, in order."""
    spec = {"rate": 1.0, "spm_rate": 0.0}
    fim, plain = (Batches(data(prepared, one, shuffle=False), seed=0) for one in (spec, {}))
    assert fim.fim is not None and fim.vocab_size == 260
    marks, cut = fim.fim.sentinels, 0
    for sample in range(fim.windows):
        row, old = (b.origins(np.array([sample]))[0].tokens.tolist() for b in (fim, plain))
        for piece, text in zip(split(row, 256)[:-1], split(old, 256), strict=False):
            if marks.middle in piece:
                assert list(itertools.chain(*parts(piece, marks))) == text
                cut += 128 <= text[0] < 192  # the rest of a character
    assert cut > 0


def test_files_of_a_repository_have_their_own_examples(bpe: Tokenizer) -> None:
    separator, repository = bpe.token_id("<file_sep>"), bpe.token_id("<repo_name>")
    assert separator is not None and repository is not None
    files = [bpe.encode(f"a/{n}.py\n{SOURCE}") for n in range(3)]
    document = [repository, *bpe.encode("a"), *itertools.chain(*([separator, *file] for file in files)), bpe.eot]
    made = FillInMiddle(FimSpec(rate=1.0, spm_rate=0.0), bpe, seed=0)
    room = np.array(document + [bpe.eot] * 80)
    row = made.row(room, np.arange(len(document), len(room)), sample=1).tokens.tolist()
    found = split_at(row[: row.index(bpe.eot)], separator)
    assert len(found) == 4
    for piece, file in zip(found[1:], files, strict=True):
        assert "".join(bpe.decode(part) for part in parts(piece, made.sentinels)) == bpe.decode(file)


def split_at(row: list[int], token: int) -> list[list[int]]:
    return [list(part) for kept, part in itertools.groupby(row, lambda one: one != token) if kept]


def test_refusals(code: Path, tmp_path: Path) -> None:
    import tokenizers

    plain = FileTokenizer(tokenizers.Tokenizer.from_str(train_bpe([SOURCE], 300)), eot=0)
    with pytest.raises(DataError, match=r"no token <fim_prefix>, <fim_suffix>, <fim_middle>.*bpe:N\+code"):
        FillInMiddle(FimSpec(rate=0.5), plain, seed=0)
    inner = tokenizers.Tokenizer.from_str(train_bpe([SOURCE], 300, ["<fim_prefix>", "<fim_suffix>", "<fim_middle>"]))
    inner.normalizer = tokenizers.normalizers.NFD()
    inner.save(str(tmp_path / "tokenizer.json"))
    changing = read_tokenizer(tmp_path / "tokenizer.json")
    with pytest.raises(DataError, match=r"data.fim.split = 'token'"):
        FillInMiddle(FimSpec(rate=0.5), changing, seed=0)
    FillInMiddle(FimSpec(rate=0.5, split="token"), changing, seed=0)
    with pytest.raises(SpecError, match=r"needs data.fim.suffix"):
        FimSpec(sentinels="own", prefix="<a>")
    with pytest.raises(SpecError, match=r"sentinels = 'own'"):
        FimSpec(prefix="<a>")
    with pytest.raises(SpecError, match=r"data.kind = 'tokens', not 'conversations'"):
        RunSpec.from_dict({"data": {"fim": {"rate": 0.5}, "path": "x.jsonl"}, "align": {"method": "sft"}})


def test_own_sentinels() -> None:
    import tokenizers

    inner = tokenizers.Tokenizer.from_str(train_bpe([SOURCE], 300, ["<A>", "<B>", "<C>"]))
    spec = FimSpec(rate=1.0, sentinels="own", prefix="<A>", suffix="<B>", middle="<C>")
    assert Sentinels.of(spec, FileTokenizer(inner, eot=0)).ids == [1, 2, 3]
