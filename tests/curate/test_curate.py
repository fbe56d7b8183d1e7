"""The machinery of curation: the same result for any number of workers and after kill -9, nothing lost."""

from __future__ import annotations

import gzip
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from first_words import FirstWords
from typer.testing import CliRunner

from lmworks.cli.main import app
from lmworks.curate.curate import curate
from lmworks.curate.dedup import Exact, Lines, NearDuplicates
from lmworks.curate.documents import Stage
from lmworks.curate.normalise import Normalise
from lmworks.curate.pipeline import OutputSpec, Pipeline, ReadingSpec
from lmworks.data import prepare, progress
from lmworks.data.sources import Part, Reading, documents_of, parts_of
from lmworks.spec.errors import DataError, SpecError

SMALL = ReadingSpec(part_bytes=300)
WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa"]


def texts(count: int = 60) -> list[str]:
    rng = random.Random(0)
    return [f"{rng.choice(WORDS)} document {number}\r\n{'é' * (number % 9)}" for number in range(count)]


@pytest.fixture
def jsonl(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"text": text, "url": "https://a.org/x"}) + "\n" for text in texts()))
    return path


def pipeline(
    source: Path, out: Path, *, stages: Sequence[Stage] = (), reading: ReadingSpec = SMALL, **output: object
) -> Pipeline:
    given = tuple(stages) or (Normalise(), FirstWords(), FirstWords(tasks=3))
    return Pipeline((str(source),), out, given, reading, OutputSpec(**{"shard_bytes": 800, **output}))  # type: ignore[arg-type]


def documents(out: Path) -> list[dict[str, object]]:
    files = sorted(out.glob("documents-*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]


def contents(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(out.iterdir())}


def test_first_of_each_word_is_kept_and_all_are_counted(jsonl: Path, tmp_path: Path) -> None:
    done = curate(pipeline(jsonl, tmp_path / "out"), workers=1)
    expected: dict[str, str] = {}
    for text in texts():
        expected.setdefault(text.split()[0], text.replace("\r\n", "\n"))
    kept = documents(tmp_path / "out")
    assert [one["text"] for one in kept] == list(expected.values())
    assert kept[0]["meta"] == {"source": str(jsonl), "url": "https://a.org/x"}
    assert kept[0]["id"] == f"{jsonl}#0"
    assert done.index["read"]["documents"] == 60
    assert done.index["kept"] == {
        "documents": len(expected),
        "bytes": sum(len(text.encode()) for text in expected.values()),
    }
    assert done.index["dropped"] == {"same_first_word": 60 - len(expected)}
    assert done.index["dedup_rate"] == (60 - len(expected)) / 60
    assert len(done.index["shards"]) > 1
    card = json.loads((tmp_path / "out" / "card.json").read_text())
    assert card["stages"]["normalise"]["changed"] == {"documents": 60, "line_ends": 60}
    assert card["stages"]["first_words"]["report"] == {"words": len(expected)}
    assert card["stages"]["first_words#2"]["kept"]["documents"] == len(expected)
    assert len(card["stages"]["first_words"]["samples"]["same_first_word"]) == 5
    assert card["statistics"]["domains"] == {"a.org": [len(expected), done.index["kept"]["bytes"]]}
    assert not (tmp_path / "out" / ".work").exists()


def test_result_does_not_depend_on_workers_or_parts(jsonl: Path, tmp_path: Path) -> None:
    results = []
    for name, workers, part_bytes in (("a", 1, 300), ("b", 4, 300), ("c", 2, 10**6)):
        out = tmp_path / name
        curate(pipeline(jsonl, out, reading=ReadingSpec(part_bytes=part_bytes), shard_bytes=10**9), workers=workers)
        results.append(contents(out))
    assert results[0] == results[1]
    for name in ("documents-00000.jsonl", "card.json", "card.html"):
        assert results[0][name] == results[2][name]


def test_second_run_does_nothing(jsonl: Path, tmp_path: Path) -> None:
    asked = pipeline(jsonl, tmp_path / "out")
    curate(asked, workers=1)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("[!.]*")}
    assert curate(asked, workers=2).up_to_date
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("[!.]*")} == before


def test_another_pipeline_or_changed_source_is_refused(jsonl: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    curate(pipeline(jsonl, out), workers=1)
    with pytest.raises(SpecError, match="belongs to another pipeline: stages differ"):
        curate(pipeline(jsonl, out, stages=[Normalise(mojibake=False)]), workers=1)
    with jsonl.open("a") as file:
        file.write('{"text": "one more"}\n')
    with pytest.raises(SpecError, match="when the files of its sources were others"):
        curate(pipeline(jsonl, out), workers=1)
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "precious.txt").write_text("x")
    with pytest.raises(DataError, match="is not empty and was not made by"):
        curate(pipeline(jsonl, foreign), workers=1)
    assert [path.name for path in foreign.iterdir()] == ["precious.txt"]


def test_damaged_shard_is_found(jsonl: Path, tmp_path: Path) -> None:
    asked = pipeline(jsonl, tmp_path / "out")
    curate(asked, workers=1)
    shard = tmp_path / "out" / "documents-00000.jsonl"
    shard.write_bytes(b"X" + shard.read_bytes()[1:])
    with pytest.raises(DataError, match=r"documents-00000\.jsonl is missing or damaged"):
        curate(asked, workers=1)


KILLED = """
import os, signal, sys, time
sys.path.insert(0, sys.argv[5])
from pathlib import Path
from test_curate import pipeline
from lmworks.curate import run
from lmworks.curate.curate import curate
source, out, stage, count = sys.argv[1:5]
if sys.argv[6] != "1":
    perform = run.Step.perform
    run.Step.perform = lambda step, number: time.sleep(0.3) or perform(step, number)
def progress(name, done, total):
    if name == stage and done >= int(count):
        os.kill(os.getpid(), signal.SIGKILL)
curate(pipeline(Path(source), Path(out)), workers=int(sys.argv[6]), progress=progress)
"""


@pytest.mark.parametrize(
    ("stage", "count", "workers"),
    [
        ("merge first_words", 1, 1),
        ("curate", 1, 2),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("curate", 3, 1), ("write", 1, 1))),
    ],
)
def test_killed_run_continues_to_the_same_result(
    jsonl: Path, tmp_path: Path, stage: str, count: int, workers: int, forked_python: None
) -> None:
    whole, out = tmp_path / "whole", tmp_path / "out"
    here = str(Path(__file__).parent)
    command = [sys.executable, "-c", KILLED, str(jsonl), str(out), stage, str(count), here, str(workers)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert run.returncode == -signal.SIGKILL, run.stderr
    done = {path: path.stat().st_mtime_ns for path in out.glob(".work/*/done/*")}
    assert done
    curate(pipeline(jsonl, whole), workers=1)
    seen: list[tuple[str, int]] = []
    curate(pipeline(jsonl, out), workers=1, progress=lambda name, count, _: seen.append((name, count)))
    assert seen[0] != ("curate", 0)  # what was done was not done again
    assert contents(out) == contents(whole)


def test_killed_worker_is_reported_and_the_run_continues(jsonl: Path, tmp_path: Path) -> None:
    """One of two processes is killed, as by the kernel when memory is short."""
    out = tmp_path / "out"
    (tmp_path / "slow.py").write_text(
        "import os, signal, sys, time\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from pathlib import Path\n"
        "import test_curate as t\n"
        "from lmworks.curate import run\n"
        "perform = run.Step.perform\n"
        "def slow(self, number):\n"
        "    time.sleep(0.05)\n"
        "    if number == 5: os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return perform(self, number)\n"
        "run.Step.perform = slow\n"
        f"t.curate(t.pipeline(Path({str(jsonl)!r}), Path({str(out)!r})), workers=2)\n"
    )
    ended = subprocess.run([sys.executable, str(tmp_path / "slow.py")], capture_output=True, text=True, timeout=60)
    assert "DataError: a worker process was killed" in ended.stderr
    curate(pipeline(jsonl, out), workers=1)
    curate(pipeline(jsonl, tmp_path / "whole"), workers=1)
    assert contents(out) == contents(tmp_path / "whole")


def test_the_same_command_twice_shares_the_work(jsonl: Path, tmp_path: Path) -> None:
    """As on several machines with a shared folder. No task is done by both, and both end."""
    out = tmp_path / "out"
    code = (
        "import os, sys\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from pathlib import Path\n"
        "import test_curate as t\n"
        "from lmworks.curate import run\n"
        "part = run.PartTask.run\n"
        "def told(self, files):\n"
        "    import time; time.sleep(0.05)\n"
        "    print(self.phase, self.number, flush=True)\n"
        "    return part(self, files)\n"
        "run.PartTask.run = told\n"
        f"t.curate(t.pipeline(Path({str(jsonl)!r}), Path({str(out)!r})), workers=1)\n"
    )
    both = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    told = [process.communicate(timeout=60)[0].split("\n") for process in both]
    assert [process.returncode for process in both] == [0, 0]
    first, second = (set(lines) - {""} for lines in told)
    assert first and second and not first & second
    curate(pipeline(jsonl, tmp_path / "whole"), workers=1)
    assert len(first | second) == 3 * len(list_parts(jsonl))
    assert contents(out) == contents(tmp_path / "whole")


def list_parts(source: Path) -> list[Part]:
    return parts_of(str(source), SMALL.reading(), Path("nowhere"))


@pytest.mark.ray
def test_workers_of_a_ray_cluster(jsonl: Path, tmp_path: Path) -> None:
    from lmworks.curate.ray import in_ray

    curate(pipeline(jsonl, tmp_path / "a", stages=[Normalise()]), workers=1)
    curate(pipeline(jsonl, tmp_path / "b", stages=[Normalise()]), workers=2, start=in_ray)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    packed = gzip.compress(b'{"text": "a"}\n' * 1000)
    (tmp_path / "cut.jsonl.gz").write_bytes(packed[: len(packed) // 2])
    with pytest.raises(DataError, match=r"cut\.jsonl\.gz is damaged"):
        curate(pipeline(tmp_path / "cut.jsonl.gz", tmp_path / "c"), workers=2, start=in_ray)


# --- formats ----------------------------------------------------------------------------------------------


def test_every_format_gives_the_same_documents(jsonl: Path, tmp_path: Path) -> None:
    raw = jsonl.read_bytes()
    (tmp_path / "in.jsonl.gz").write_bytes(gzip.compress(raw))
    (tmp_path / "in.jsonl.zst").write_bytes(zstandard.compress(raw))
    rows = [json.loads(line) for line in raw.splitlines()]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "in.parquet", row_group_size=17)
    kept = []
    for name in ("in.jsonl", "in.jsonl.gz", "in.jsonl.zst", "in.parquet"):
        out = tmp_path / f"out-{name}"
        curate(pipeline(tmp_path / name, out), workers=1)
        kept.append([one["text"] for one in documents(out)])
    assert kept[0] == kept[1] == kept[2] == kept[3]


@pytest.mark.parametrize("form", ["jsonl", "jsonl.gz", "parquet"])
def test_prepare_reads_what_curate_writes(jsonl: Path, tmp_path: Path, form: str) -> None:
    out = tmp_path / "out"
    done = curate(pipeline(jsonl, out, format=form), workers=1)
    made = prepare([str(out)], tmp_path / "tokens", "bytes", val_fraction=0, workers=1)
    assert made.index.documents("train") == done.index["kept"]["documents"]
    assert made.index.tokens("train") == done.index["kept"]["bytes"] + done.index["kept"]["documents"]


def test_curated_folder_can_be_curated_again(jsonl: Path, tmp_path: Path) -> None:
    curate(pipeline(jsonl, tmp_path / "a"), workers=1)
    again = curate(pipeline(tmp_path / "a", tmp_path / "b", stages=[Normalise()]), workers=1)
    assert again.index["dropped"] == {}
    assert [one["text"] for one in documents(tmp_path / "b")] == [one["text"] for one in documents(tmp_path / "a")]
    assert documents(tmp_path / "b")[0]["meta"]["url"] == "https://a.org/x"  # type: ignore[index]


# --- bad input --------------------------------------------------------------------------------------------


def test_what_is_no_document_is_counted_by_reason(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    lines = [b'{"text": "good"}', b"not json", b"[1]", b'{"body": "x"}', b'{"text": 5}', b'{"text": " "}', b""]
    path.write_bytes(
        b"\n".join([*lines, b'{"text": "' + b"x" * 500 + b'"}', b'{"text": "\xff"}', b'{"text": "\\ud800"}'])
    )
    reading = ReadingSpec(part_bytes=50, max_document_bytes=400)
    done = curate(pipeline(path, tmp_path / "out", stages=[Normalise()], reading=reading), workers=1)
    assert done.index["dropped"] == {
        "not_json": 2,
        "empty": 1,
        "no_text_field": 1,
        "not_json_object": 1,
        "text_is_no_string": 1,
        "too_long": 1,
    }
    assert [one["text"] for one in documents(tmp_path / "out")] == ["good", "?"]
    (tmp_path / "bad.jsonl.gz").write_bytes(gzip.compress(path.read_bytes()))
    packed = curate(
        pipeline(tmp_path / "bad.jsonl.gz", tmp_path / "gz", stages=[Normalise()], reading=reading), workers=1
    )
    assert packed.index["dropped"] == done.index["dropped"]


def test_files_of_a_tree_that_are_no_text_are_counted(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "sub").mkdir(parents=True)
    (tree / "a.py").write_text("print(1)\n")
    (tree / "b.bin").write_bytes(b"\0\1\2")
    (tree / "c.txt").write_bytes(b"caf\xe9 \x81")
    (tree / "d.txt").write_text("x" * 200)
    (tree / "e.txt").write_text("")
    (tree / "f.txt").write_bytes("wide".encode("utf-16"))
    (tree / "g.txt").write_bytes(b"\xef\xbb\xbfmarked")
    os.symlink("loop", tree / "loop")
    os.symlink("..", tree / "sub" / "up")
    os.symlink("nowhere", tree / "gone")
    reading = ReadingSpec(max_document_bytes=100)
    done = curate(pipeline(tree, tmp_path / "out", stages=[Normalise()], reading=reading), workers=1)
    assert done.index["dropped"] == {"binary": 1, "broken_link": 2, "empty": 1, "invalid_utf8": 1, "too_long": 1}
    assert [one["text"] for one in documents(tmp_path / "out")] == ["print(1)\n", "wide", "marked"]
    assert documents(tmp_path / "out")[0]["meta"] == {"source": str(tree), "path": "a.py"}
    assert done.index["stages"]["read"]["changed"] == {"byte_order_mark": 1, "documents": 2, "utf16": 1}
    for how, text in (("replace", "caf\ufffd \ufffd"), ("cp1252", "café \x81")):
        reading = ReadingSpec(invalid_utf8=how, glob="c.txt")
        keys = Normalise(control_characters=False, max_replacement_share=1)
        curate(pipeline(tree, tmp_path / how, stages=[keys], reading=reading), workers=1)
        assert [one["text"] for one in documents(tmp_path / how)] == [text]


def test_broken_files_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "b.parquet").write_bytes(b"PAR1 nonsense")
    with pytest.raises(DataError, match=r"b\.parquet is not a readable parquet file"):
        curate(pipeline(tmp_path / "b.parquet", tmp_path / "out"), workers=1)
    table = pa.table({"text": [f"{random.Random(i).random()} {i}" for i in range(5000)]})
    pq.write_table(table, tmp_path / "torn.parquet", compression="none", use_dictionary=False)
    raw = bytearray((tmp_path / "torn.parquet").read_bytes())
    raw[4:40] = b"\xff" * 36
    (tmp_path / "torn.parquet").write_bytes(raw)
    with pytest.raises(DataError, match=r"torn\.parquet is damaged in row group 0"):
        curate(pipeline(tmp_path / "torn.parquet", tmp_path / "out"), workers=2)
    packed = gzip.compress(b'{"text": "a"}\n' * 1000)
    (tmp_path / "cut.jsonl.gz").write_bytes(packed[: len(packed) // 2])
    with pytest.raises(DataError, match=r"cut\.jsonl\.gz is damaged at byte \d+ of its text"):
        curate(pipeline(tmp_path / "cut.jsonl.gz", tmp_path / "cut"), workers=1)
    packed = gzip.compress(random.Random(0).randbytes(2000).hex().encode())
    (tmp_path / "torn.jsonl.gz").write_bytes(packed[:1000] + b"\xff" * 50 + packed[1050:])
    (tmp_path / "no.jsonl.zst").write_bytes(b"no such thing")
    for name in ("torn.jsonl.gz", "no.jsonl.zst"):
        with pytest.raises(DataError, match=rf"{name} is damaged at byte 0 of its text"):
            curate(pipeline(tmp_path / name, tmp_path / name.replace(".", "-")), workers=1)
        with pytest.raises(DataError, match=f"{name} is damaged"):
            list(documents_of(parts_of(str(tmp_path / name), Reading(), tmp_path / "out")[0], Reading()))


def test_a_part_without_documents_passes_every_corpus_stage(tmp_path: Path) -> None:
    """A link that leads nowhere is a part of its own, and holds no document."""
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "a.txt").write_text("some words that are here once and stay")
    os.symlink("nowhere", tree / "gone")
    stages = [Exact(), Lines(), NearDuplicates(verify=0.7)]
    done = curate(pipeline(tree, tmp_path / "out", stages=stages), workers=1)
    assert done.index["kept"]["documents"] == 1 and done.index["dropped"] == {"broken_link": 1}


def test_empty_corpus_says_so(tmp_path: Path) -> None:
    (tmp_path / "e.jsonl").write_text("")
    with pytest.raises(DataError, match=r"no document in .*e\.jsonl"):
        curate(pipeline(tmp_path / "e.jsonl", tmp_path / "out"), workers=1)
    (tmp_path / "folder").mkdir()
    with pytest.raises(DataError, match="no file in"):
        curate(pipeline(tmp_path / "folder", tmp_path / "out2"), workers=1)
    assert not (tmp_path / "out2").exists()


# --- the command ------------------------------------------------------------------------------------------


def test_command_and_pipeline_file_agree(jsonl: Path, tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    ran = CliRunner().invoke(app, ["data", "curate", str(jsonl), "--out", str(a), "--workers", "1", "--json"])
    assert ran.exit_code == 0, ran.output
    file = tmp_path / "p.toml"
    file.write_text(f'sources = ["{jsonl}"]\nout = "{b}"\nstages = ["normalise"]\n[reading]\npart_bytes = 500\n')
    other = CliRunner().invoke(app, ["data", "curate", str(file), "--json"])
    assert other.exit_code == 0, other.output
    assert (
        json.loads(ran.stdout)["kept"]
        == json.loads(other.stdout)["kept"]
        == {"documents": 60, "bytes": sum(len(text.replace("\r\n", "\n").encode()) for text in texts())}
    )
    assert contents(a)["documents-00000.jsonl"] == contents(b)["documents-00000.jsonl"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "a pipeline needs stages, e.g. stages ="),
        ('stages = ["gophr"]', "unknown stage 'gophr'"),
        (
            'stages = [{stage = "normalise", unicod = "NFC"}]',
            "unknown key 'stages.normalise.unicod'; did you mean 'unicode'?",
        ),
        ('stages = [{stage = "normalise", unicode = "X"}]', "stages.normalise.unicode = 'X' is not one of"),
        ('stages = ["normalise"]\nworkers = 3', "unknown key 'workers'; a pipeline has"),
        ('stages = ["normalise"]\n[reading]\nglobe = "x"', "unknown key 'reading.globe'; did you mean 'glob'?"),
    ],
)
def test_a_wrong_pipeline_is_one_line(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "p.toml"
    file.write_text(f'sources = ["x"]\nout = "{tmp_path / "out"}"\n{line}\n')
    with pytest.raises(SpecError) as error:
        Pipeline.load(file)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_time_left_is_said_in_logs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    now = iter([0.0, 0.0, 1200.0, 1200.0, 1210.0, 1210.0])
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: next(now)))  # of this module alone
    show = progress.plain_lines()
    for done in (0, 1, 4):
        show("curate", done, 4)
    assert capsys.readouterr().err.splitlines() == [
        "curate: 0 of 4",
        "curate: 1 of 4, about 60 min left",
        "curate: 4 of 4",
    ]


def test_rules_for_prose_and_for_code_are_for_their_own_documents(tmp_path: Path) -> None:
    sources = tmp_path / "in"
    sources.mkdir()
    prose = " ".join(f"The {word} of the house is not what they said that it would be." for word in WORDS)
    files = {
        "good.py": "def double(x):\n    return 2 * x\n",  # few words: Gopher's rules would drop it
        "data.py": f"x = '{'1' * 2000}'\n",
        "good.md": prose,
        "bad.txt": "too short",
        "long": prose + "\n" + "house that " * 200,  # a line of 2,200 characters: the rules for code would drop it
    }
    for name, text in files.items():
        (sources / name).write_text(text)
    words = ["data", "curate", str(sources), "--rules", "gopher_quality,code", "--out", str(tmp_path / "out"), "--json"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["dropped"] == {"long_line": 1, "gopher_short_doc": 1}
    assert [one["text"] for one in documents(tmp_path / "out")] == [files["good.md"], files["good.py"], files["long"]]
    alone = CliRunner().invoke(app, [*words[:4], "gopher_quality", *words[5:6], str(tmp_path / "prose"), "--json"])
    assert json.loads(alone.stdout)["kept"]["documents"] == 2  # named alone, a rule is for all documents
