"""Exact, line-level and near deduplication, against definitions written out in plain Python."""

from __future__ import annotations

import itertools
import random
import re
from pathlib import Path

import numpy as np
import pytest
from corpus_stages import decisions, kept

from lmworks.curate import clusters, key_files
from lmworks.curate.dedup import Exact, Lines, NearDuplicates
from lmworks.curate.documents import KEPT
from lmworks.curate.key_files import REPEAT, components, connected, read_part, write_pairs
from lmworks.curate.minhash import CODE, PROSE, MinHash, band_keys, parameters, signatures
from lmworks.curate.shingles import PIECE, shingles

MASK = 2**64 - 1
LETTERS = random.Random(0)
WORDS = ["".join(LETTERS.choices("abcdefghijklmnopqrstuvwxyz", k=LETTERS.randint(1, 12))) for _ in range(20_000)]


def words(count: int, draw: random.Random) -> list[str]:
    return draw.choices(WORDS, k=count)


def planted(similarity: float, draw: random.Random, size: int = 200) -> tuple[str, str]:
    """Two texts whose 5-grams have this Jaccard similarity, as near as whole words allow."""
    own = round((size - 4) * (1 - similarity) / (1 + similarity))
    common = words(size - own, draw)
    return " ".join(common + words(own, draw)), " ".join(common + words(own, draw))


def jaccard(one: str, other: str) -> float:
    a, b = (set(zip(*(text.split()[at:] for at in range(5)), strict=False)) for text in (one, other))
    return len(a & b) / len(a | b)


def mixed(value: int) -> int:
    value = value * 0x9E3779B97F4A7C15 & MASK
    value ^= value >> 32
    value = value * 0xD6E8FEB86659FD93 & MASK
    return value ^ value >> 32


def reference_shingles(text: str, fold: bool) -> list[int]:
    """Word by word, without numpy."""
    found = re.findall(r"[a-z0-9]+" if fold else r"\w+", re.sub(r"\d", "0", text.lower()) if fold else text)
    hashes = []
    for word in found:
        raw = word.encode()
        value = mixed(int.from_bytes(raw[:8], "little"))
        for at in range(8, min(len(raw), 64), 8):
            value = mixed(value * 0xD6E8FEB86659FD93 + int.from_bytes(raw[at : at + 8], "little") & MASK)
        if len(raw) > 64:
            value = mixed(value * 0xD6E8FEB86659FD93 + len(raw) & MASK)
        hashes.append(value)
    result = []
    for at in range(len(hashes) - 4):
        total = 0
        for value in hashes[at : at + 5]:
            total = total * 0xD6E8FEB86659FD93 + value & MASK
        result.append(mixed(total) >> 32)
    return result


@pytest.mark.parametrize("fold", [False, True])
def test_shingles_are_those_of_plain_loops(fold: bool) -> None:
    source = Path(random.__file__).read_text()
    texts = ["", "one two", source, "a b c d e", "x" * 63 + " " + "y" * 64 + " " + "z" * 65 + " A_b 12", source[:997]]
    found = shingles(texts, 5, fold)
    assert source.isascii()
    for at, text in enumerate(texts):
        mine = found.values[found.starts[at] : found.starts[at + 1]].tolist()
        assert mine == reference_shingles(text, fold)


def test_scripts_without_spaces_have_a_word_for_each_character() -> None:
    counts = np.diff(shingles(["我們今天去看電影。", "naïve café – “déjà” vu", "a\udcffb c d e f"], 5, True).starts)
    assert counts.tolist() == [8 - 4, 4 - 4, 6 - 4]


def test_signature_is_the_least_hash_of_each_function() -> None:
    texts = [Path(random.__file__).read_text(), "too short", "the quick brown fox jumps over the lazy dog"]
    signature, filled = signatures(texts, PROSE)
    factors, shifts, _ = parameters(PROSE)
    assert filled.tolist() == [True, False, True]
    for at in (0, 2):
        values = reference_shingles(texts[at], True)
        for number in (0, 1, 57, 111):
            a, b = int(factors[number]), int(shifts[number])
            assert signature[at, number] == min((a * value + b) % 2**32 for value in values)


def test_a_document_longer_than_a_piece_has_the_least_of_its_pieces() -> None:
    draw = random.Random(3)
    long = " ".join(words(PIECE // 4, draw))
    assert len(long) > PIECE
    whole, _ = signatures([long, "a b c d e f"], PROSE)
    cut, _ = signatures([long[at : at + PIECE] for at in range(0, len(long), PIECE)], PROSE)
    assert (whole[0] == cut.min(axis=0)).all()


@pytest.mark.parametrize("config", [PROSE, CODE, MinHash(4, 3)], ids=["prose", "code", "4x3"])
@pytest.mark.parametrize("similarity", [0.3, 0.5, 0.6, 0.7, 0.75, 0.8, 0.9])
def test_recall_is_what_theory_gives(config: MinHash, similarity: float) -> None:
    draw = random.Random(f"{config} {similarity}")
    pairs = [planted(similarity, draw) for _ in range(600)]
    exact = jaccard(*pairs[0])
    assert abs(exact - similarity) < 0.01
    keys = band_keys(signatures([text for pair in pairs for text in pair], config)[0], config)
    found = int((keys[::2] == keys[1::2]).any(axis=1).sum())
    chance = config.chance(exact)
    error = (len(pairs) * chance * (1 - chance)) ** 0.5
    assert abs(found - len(pairs) * chance) <= 4 * error + 1


def test_estimated_jaccard_is_unbiased() -> None:
    draw = random.Random(1)
    pairs = [planted(0.8, draw) for _ in range(600)]
    signature, _ = signatures([text for pair in pairs for text in pair], PROSE)
    estimate = (signature[::2] == signature[1::2]).mean(axis=1)
    exact = jaccard(*pairs[0])
    deviation = (exact * (1 - exact) / 112) ** 0.5  # of one estimate from 112 independent hashes
    assert abs(estimate.mean() - exact) < 4 * deviation / 600**0.5
    assert 0.85 * deviation < estimate.std() < 1.15 * deviation


def test_bands_of_code_are_the_best_for_jaccard_0_7() -> None:
    """The least sum of false positives below 0.7 and false negatives above, among all with at most 256 hashes."""
    at = (np.arange(1000) + 0.5) / 1000

    def mistakes(bands: int, rows: int) -> float:
        chance = 1 - (1 - at**rows) ** bands
        return float(chance[at < 0.7].sum() + (1 - chance)[at >= 0.7].sum())

    shapes = [(bands, rows) for bands in range(1, 257) for rows in range(1, 256 // bands + 1)]
    assert min(shapes, key=lambda shape: mistakes(*shape)) == (CODE.bands, CODE.rows)


def near(text: str, draw: random.Random) -> str:
    """One word changed."""
    changed = text.split()
    changed[draw.randrange(len(changed))] = "changed"
    return " ".join(changed)


def corpus(draw: random.Random) -> list[str]:
    """Families of near-duplicates, also in chains of small changes, among documents of their own."""
    texts = [" ".join(words(300, draw)) for _ in range(40)]
    for at in range(0, 40, 4):
        for _ in range(draw.randint(1, 4)):
            texts.append(near(draw.choice([texts[at], texts[-1] if len(texts) > 40 else texts[at]]), draw))
    draw.shuffle(texts)
    return [*texts, "short", "short"]


def roots_of(texts: list[str], least: float) -> list[int]:
    """The first of each text's component, by the exact Jaccard similarity of all pairs."""
    root = list(range(len(texts)))
    for b in range(len(texts)):
        for a in range(b):
            if len(texts[a].split()) > 5 and len(texts[b].split()) > 5 and jaccard(texts[a], texts[b]) > least:
                one, other = root[a], root[b]
                root = [min(one, other) if at in (one, other) else at for at in root]
    return root


def first_of_components(texts: list[str], least: float) -> list[str]:
    return [text for at, (text, root) in enumerate(zip(texts, roots_of(texts, least), strict=True)) if root == at]


@pytest.mark.parametrize(("records", "cut"), [(3, 9), (2**19, 1), pytest.param(2**19, 100, marks=pytest.mark.slow)])
def test_near_duplicates_keep_the_first_of_each_component(
    records: int, cut: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However the corpus is cut, and however little memory the merge has."""
    monkeypatch.setattr(key_files, "RECORDS", records)
    texts = corpus(random.Random(5))
    expected = first_of_components(texts, 0.8)
    assert 40 < len(expected) < len(texts) - 10
    parts = [texts[at : at + cut] for at in range(0, len(texts), cut)]
    for preset in ("prose", "code"):
        assert kept(NearDuplicates(preset=preset), parts, tmp_path / preset) == expected


def test_verified_pairs_are_those_of_the_exact_similarity(tmp_path: Path) -> None:
    """20 bands of one row make candidates of nearly all pairs: their similarity decides alone."""
    draw = random.Random(6)
    pairs = [planted(similarity, draw, 120) for similarity in (0.3, 0.5, 0.68, 0.7, 0.72, 0.9) for _ in range(5)]
    pairs.append(planted(0.9, draw, 50_000))  # longer than a piece
    texts = [text for pair in pairs for text in pair]
    stage = NearDuplicates(bands=20, rows=1, verify=0.7)
    found = [why != KEPT for part in decisions(stage, [texts[:23], texts[23:]], tmp_path) for why, _ in part]
    assert found == [again and jaccard(*pair) >= 0.7 for pair in pairs for again in (False, True)]
    assert 5 < sum(found) < 20


@pytest.mark.parametrize(("records", "cut"), [(3, 9), (2**19, 1), pytest.param(2**19, 100, marks=pytest.mark.slow)])
def test_clusters_are_the_components(records: int, cut: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_files, "RECORDS", records)
    monkeypatch.setattr(clusters, "RECORDS", records)
    texts = corpus(random.Random(5))
    root = dict(enumerate(roots_of(texts, 0.8)))
    members = [[at for at in root if root[at] == first] for first in sorted(set(root.values()))]
    members = sorted((one for one in members if len(one) > 1), key=lambda one: (-len(one), one[0]))
    kept(NearDuplicates(), [texts[at : at + cut] for at in range(0, len(texts), cut)], tmp_path)
    report = NearDuplicates().report([], tmp_path / "concluded")["clusters"]
    assert report["clusters"] == len(members)
    assert report["documents"] == sum(map(len, members))
    ranges = {"2": range(2, 3), "3-4": range(3, 5), "5-8": range(5, 9), "9-16": range(9, 17)}
    sizes = {name: sum(len(one) in sizes for one in members) for name, sizes in ranges.items()}
    assert report["sizes"] == {name: count for name, count in sizes.items() if count}
    names = [f"{at // cut}-{at % cut}" for at in range(len(texts))]
    assert report["largest"] == [
        {
            "size": len(one),
            "kept": {"id": names[one[0]], "text": texts[one[0]][:300]},
            "others": [{"id": names[at], "text": texts[at][:300]} for at in one[1:4]],
        }
        for one in members[:10]
    ]


@pytest.mark.parametrize("records", [2, 10, 1000])
def test_components_of_random_graphs(records: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_files, "RECORDS", records)
    for number in range(30):
        draw = random.Random(number)
        parts, size = draw.randint(1, 8), draw.randint(1, 9)
        nodes = [part << 32 | at for part in range(parts) for at in range(size)]
        edges = [draw.sample(nodes, 2) for _ in range(draw.randint(0, len(nodes)))] if len(nodes) > 1 else []
        edges += [list(pair) for pair in itertools.pairwise(nodes) if draw.random() < 0.3]
        folder = tmp_path / str(number)
        folder.mkdir()
        pairs = np.array([(max(edge), min(edge)) for edge in edges], REPEAT)
        write_pairs(folder / "edges", iter([pairs]))
        connected([folder / "edges"], parts, folder)
        root = {node: node for node in nodes}
        for a, b in edges:
            low, high = sorted((root[a], root[b]))
            root = {node: low if at == high else at for node, at in root.items()}
        dropped = {part << 32 | int(at) for part in range(parts) for at in read_part(folder, part)}
        assert dropped == {node for node in nodes if root[node] != node}


def test_a_long_chain_is_one_component() -> None:
    order = np.random.default_rng(0).permutation(5000)
    assert not components(order[:-1], order[1:], 5000).any()


@pytest.mark.parametrize("records", [3, 2**19])
def test_exact_keeps_the_first(records: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_files, "RECORDS", records)
    draw = random.Random(2)
    texts = [f"document {draw.randint(0, 60)}\nline" for _ in range(100)]
    expected = list(dict.fromkeys(texts))
    texts = [text.replace("\n", "  \r\n\n \t\n") if texts.index(text) < at else text for at, text in enumerate(texts)]
    for cut in (1, 9, 100):
        parts = [texts[at : at + cut] for at in range(0, 100, cut)]
        assert kept(Exact(), parts, tmp_path / str(cut)) == expected


def test_indentation_is_content(tmp_path: Path) -> None:
    assert len(kept(Exact(), [["if a:\n    b()\nc()", "if a:\n    b()\n    c()"]], tmp_path)) == 2


def test_lines_that_were_seen_before_are_removed(tmp_path: Path) -> None:
    licence = "Permission is hereby granted, free of charge, to any person"
    one = f"{licence}\nint main(void)\n{{\n    return compute_the_answer_of_this_program(1, 2);\n}}\n"
    two = f"  {licence}\nint other(void)\n{{\n    return another_function_of_the_same_program(3, 4, 5, 6, 7);\n}}\n"
    three = f"{licence}\n{licence}\nshort"
    found = decisions(Lines(), [[one], [two, three, ""]], tmp_path)
    assert found[0] == [("", one)]
    assert found[1][0] == ("", two.partition("\n")[2])
    assert found[1][1] == ("lines_mostly_repeated", three)
    assert found[1][2] == ("", "")


def test_stages_are_found_by_name() -> None:
    from lmworks.curate.stages import make_stage

    assert make_stage({"stage": "minhash", "preset": "code"}) == NearDuplicates(preset="code")
    assert make_stage("exact") == Exact()
