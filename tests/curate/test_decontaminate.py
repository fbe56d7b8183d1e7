"""Decontamination: planted items of an evaluation set are found and listed, and only they."""

from __future__ import annotations

import gzip
import json
import random
import re
import sysconfig
from pathlib import Path

import pytest
from corpus_stages import decisions

from lmworks.curate.decontaminate import LIST, Decontaminate
from lmworks.spec.errors import DataError, SpecError

ITEMS = {
    f"task/{number}": f'def solve_{number}(values):\n    """Return the {word} of all values that are not zero, in the '
    f'order in which they were given to it first.\n    >>> solve_{number}([1, 2])\n    """\n'
    for number, word in enumerate(["sum", "product", "median", "largest", "smallest"])
}


@pytest.fixture
def suite(tmp_path: Path) -> str:
    path = tmp_path / "suite.jsonl"
    lines = [json.dumps({"task_id": name, "prompt": text, "tests": 3}) for name, text in ITEMS.items()]
    path.write_text("\n".join(lines) + "\n\n")
    return str(path)


def sources(count: int) -> list[str]:
    folder = Path(sysconfig.get_paths()["stdlib"])
    return [path.read_text() for path in sorted(folder.glob("[a-d]*.py"))[:count]]


def listed(folder: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in (folder / "concluded" / LIST).read_text().splitlines()]


def test_planted_items_are_found_whatever_their_case_and_marks(suite: str, tmp_path: Path) -> None:
    texts = sources(12)
    planted = {2: "task/1", 5: "task/3", 11: "task/4"}
    for at, item in planted.items():
        lines = texts[at].splitlines()
        lines.insert(random.Random(at).randrange(len(lines)), ITEMS[item].upper().replace(", ", " -- "))
        texts[at] = "\n".join(lines)
    parts = [texts[:4], texts[4:6], [], texts[6:]]
    found = decisions(Decontaminate(against=[suite]), parts, tmp_path / "work")
    reasons = [why for part in found for why, _ in part]
    assert reasons == ["contaminated" if at in planted else "" for at in range(12)]
    hits = listed(tmp_path / "work")
    places = {"0-2": "task/1", "1-1": "task/3", "3-5": "task/4"}
    own = {hit["document"]: hit["item"] for hit in hits if hit["item"] != "task/0"}
    assert own == places  # task/0 is listed for the phrases that all items share
    assert all(len(hit["ngram"].split()) == 13 for hit in hits)
    assert all(hit["ngram"] in " ".join(re.findall(r"\w+", ITEMS[hit["item"]].lower())) for hit in hits)


def test_fewer_words_than_n_in_a_row_are_no_hit(suite: str, tmp_path: Path) -> None:
    phrase = "return the sum of all values that are not zero in the order in which they"
    words = phrase.split()
    texts = [" ".join(["other", *words[:12], "other"]), " ".join(["other", *words[:13], "other"])]
    over_the_end = [" ".join(words[:7]), " ".join(words[7:])]
    found = decisions(Decontaminate(against=[suite]), [texts + over_the_end], tmp_path / "work")
    assert [why for why, _ in found[0]] == ["", "contaminated", "", ""]


def test_what_many_documents_share_is_a_phrase(suite: str, tmp_path: Path) -> None:
    stage = Decontaminate(against=[suite], max_documents=3)
    common = "that are not zero, in the order in which they were given to it"
    texts = [f"text number {at} {common}" for at in range(4)]
    found = decisions(stage, [texts[:2], [*texts[2:], ITEMS["task/2"]]], tmp_path / "work")
    assert [why for part in found for why, _ in part] == ["", "", "", "", "contaminated"]
    merged = [tmp_path / "work" / "merged-0"]
    report = stage.report(merged, tmp_path / "work" / "concluded")
    assert set(report["common_phrases"]) == {
        "that are not zero in the order in which they were given to",
        "are not zero in the order in which they were given to it",
    }
    assert (report["items"], {hit["document"] for hit in report["hits"]}) == (5, {"1-2"})


def test_short_items_count_whole(tmp_path: Path) -> None:
    path = tmp_path / "questions.txt.gz"
    path.write_bytes(gzip.compress(b"Which river flows through the city of Vienna?"))
    texts = ["which river flows through the city of vienna", "which river flows through the city", "river " * 20]
    found = decisions(Decontaminate(against=[str(path)]), [texts], tmp_path / "work")
    assert [why for why, _ in found[0]] == ["contaminated", "", ""]


def test_numbers_and_repeated_words_say_nothing(tmp_path: Path) -> None:
    path = tmp_path / "suite.jsonl"
    numbers = ", ".join(map(str, range(40)))
    path.write_text(json.dumps({"id": 1, "text": f"[{numbers}] " + "0 a " * 20 + " ".join(ITEMS.values())}))
    found = decisions(Decontaminate(against=[str(path)]), [[numbers, "0 a " * 30, "x " * 50]], tmp_path / "work")
    assert [why for why, _ in found[0]] == ["", "", ""]


def test_bad_sets_are_named(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"a": 1}\nnot json\n')
    (tmp_path / "short.txt").write_text("too short")
    with pytest.raises(DataError, match=r"bad.jsonl line 2 is not JSON"):
        Decontaminate(against=[str(tmp_path / "bad.jsonl")]).require()
    with pytest.raises(DataError, match="line 1: no text in field 'prompt'; it has a"):
        Decontaminate(against=[str(tmp_path / "bad.jsonl")], fields=["prompt"]).require()
    with pytest.raises(DataError, match="no item has 8 words in a row"):
        Decontaminate(against=[str(tmp_path / "short.txt")]).require()
    with pytest.raises(DataError, match=r"cannot read the evaluation set .*none.jsonl"):
        Decontaminate(against=[str(tmp_path / "none.jsonl")]).require()
    with pytest.raises(SpecError, match="names no evaluation set"):
        Decontaminate().require()
    with pytest.raises(SpecError, match=r"stages.decontaminate.min_words = 8 is more than ngram = 5"):
        Decontaminate(ngram=5)
