"""Checkpoints whose every digest is right and whose content is not: refused by name, and the older one is used."""

from __future__ import annotations

import copy
import json
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from crafted import Change, replace_file, rewrite_index, rewrite_manifest
from lmworks.checkpoint.format.index import ITEM_BYTES, Piece, check_coverage
from lmworks.checkpoint.format.manifest import INDEX, DamagedError
from lmworks.checkpoint.format.survey import verify_all
from lmworks.model.tensor_files import DTYPES
from lmworks.spec import CheckpointError, DataError, SpecError
from lmworks.train import Trainer
from lmworks.train.export import export
from lmworks.train.load_run import load_trained
from tiny import built, differences, live, make_spec, saved, train
from variations import with_slow

SHARD = "rank-00000.safetensors"
NOTHING = {"dtype": "F32", "shape": [0], "pieces": []}
WEIGHT, OTHER = "model.embed.weight", "model.norm.weight"
Craft = Callable[[Path], None]
Numbers = tuple[int, ...]


@pytest.fixture(scope="module")
def trained(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints of steps 2 and 4."""
    run = tmp_path_factory.mktemp("malformed") / "run"
    train(make_spec(dataset, "optim.steps=4", "checkpoint.every=2", "model.vocab=258"), run)
    return run


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    shutil.copytree(trained, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture(scope="module")
def reader(dataset: Path, trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    """One trainer that loads all of them."""
    return built(Trainer.resume(trained, quiet=True).spec, tmp_path_factory.mktemp("reader") / "run")


def newest(run: Path) -> Path:
    return run / "checkpoints" / "step-000004"


def load(reader: Trainer, run: Path) -> list[str]:
    """As a resume does it; returns why checkpoints were refused. Memory holds what no checkpoint would."""
    refused: list[str] = []
    reader.checkpoints.root = run / "checkpoints"
    reader.checkpoints.record_refused = lambda folder, reason: refused.append(reason)  # type: ignore[method-assign]
    with torch.no_grad():
        for shard in reader.parallel_model.shards:
            shard.leaf.fill_(-1e30)
    position = reader.checkpoints.load_checkpoint(None)
    assert position is not None
    reader.step, reader.cursor = position.step, position.cursor
    return refused


# --- every kind ---------------------------------------------------------------------------------------------


def in_index(change: Change) -> Craft:
    return lambda folder: rewrite_index(folder, change)


def in_manifest(change: Change) -> Craft:
    return lambda folder: rewrite_manifest(folder, change)


def of_tensor(change: Callable[[dict[str, Any]], object], name: str = WEIGHT) -> Craft:
    def act(index: dict[str, Any]) -> None:
        change(index["tensors"][name])

    return in_index(act)


def of_piece(position: int, value: Any) -> Craft:
    def act(tensor: dict[str, Any]) -> None:
        tensor["pieces"][0][position] = value

    return of_tensor(act)


def of_meta(key: str, value: Any) -> Craft:
    def act(manifest: dict[str, Any]) -> None:
        manifest["meta"][key] = value

    return in_manifest(act)


def of_file(key: str, value: Any, name: str = SHARD) -> Craft:
    def act(manifest: dict[str, Any]) -> None:
        manifest["files"][name][key] = value

    return in_manifest(act)


def of_field(key: str, value: Any) -> Craft:
    return in_manifest(lambda manifest: {**manifest, key: value})


def without(key: str) -> Change:
    return lambda table: {name: value for name, value in table.items() if name != key}


def lacking(start: str) -> Change:
    """No tensor whose name begins so."""
    return lambda index: {
        "tensors": {name: one for name, one in index["tensors"].items() if not name.startswith(start)}
    }


def renamed(name: str) -> Craft:
    def act(manifest: dict[str, Any]) -> None:
        manifest["files"][name] = manifest["files"].pop(SHARD)

    return in_manifest(act)


def halves(first: tuple[int, int], second: tuple[int, int]) -> Craft:
    """The embedding in two pieces, of rows [start, stop)."""

    def act(tensor: dict[str, Any]) -> None:
        ((file, start, _, (_, width)),) = tensor["pieces"]
        tensor["pieces"] = [[file, start, [a, 0], [b - a, width]] for a, b in (first, second)]

    return of_tensor(act)


def over_another(index: dict[str, Any]) -> None:
    index["tensors"][OTHER]["pieces"][0][1] = index["tensors"][WEIGHT]["pieces"][0][1]


def add(name: str, value: Any) -> Change:
    def act(index: dict[str, Any]) -> None:
        index["tensors"][name] = value

    return act


def twice(index: dict[str, Any]) -> bytes:
    text = json.dumps(index)
    entry = f'"{WEIGHT}": {json.dumps(index["tensors"][WEIGHT])}'
    return text.replace(entry, f"{entry}, {entry}").encode()


def rng_words(folder: Path) -> None:
    """Random states of the right shape with values that no generator takes."""
    index = json.loads((folder / INDEX).read_text())["tensors"]["rng.python"]
    (_, start, _, (count,)) = index["pieces"][0]
    content = bytearray((folder / SHARD).read_bytes())
    content[start : start + 8 * count] = (-1).to_bytes(8, "little", signed=True) * count
    replace_file(folder, SHARD, bytes(content))


def nan_weight(folder: Path) -> None:
    (_, start, _, _) = json.loads((folder / INDEX).read_text())["tensors"][WEIGHT]["pieces"][0]
    content = bytearray((folder / SHARD).read_bytes())
    content[start : start + 4] = b"\x00\x00\xc0\x7f"
    replace_file(folder, SHARD, bytes(content))


KINDS: dict[str, tuple[Craft, str]] = {
    # index.json
    "no pieces": (of_tensor(lambda one: one.update(pieces=[])), f"the pieces of {WEIGHT} have 0 elements, but 8256"),
    "half of the pieces": (halves((0, 100), (200, 258)), "elements, but 8256 belong there"),
    "pieces that overlap": (halves((0, 129), (100, 229)), f"pieces of {WEIGHT} overlap at"),
    "pieces over one another in a file": (halves((0, 129), (129, 258)), "overlap in rank-00000"),
    "tensors over one another": (in_index(over_another), "overlap in rank-00000.safetensors"),
    "another shape": (of_tensor(lambda one: one.update(shape=[129, 64])), "is no part of"),
    "another shape of as many": (
        of_tensor(lambda one: (one.update(shape=[32, 258]), one["pieces"][0].__setitem__(3, [32, 258]))),
        r"model.embed.weight is \(32, 258\) there, but \(258, 32\) in this run",
    ),
    "a shape too large for memory": (of_tensor(lambda one: one.update(shape=[2**40, 2**40])), "is no part of|elements"),
    "a shape that is no list": (of_tensor(lambda one: one.update(shape="258")), "which is no shape"),
    "a shape below zero": (of_tensor(lambda one: one.update(shape=[-258, -32])), "which is no shape"),
    "a shape of fractions": (of_tensor(lambda one: one.update(shape=[258.0, 32])), "which is no shape"),
    "a type that there is none of": (of_tensor(lambda one: one.update(dtype="F7")), "dtype = 'F7', which is no type"),
    "a type that is a list": (of_tensor(lambda one: one.update(dtype=["F32"])), "which is no type"),
    "whole numbers for a weight": (
        of_tensor(lambda one: one.update(dtype="I32")),
        "is torch.int32 there, but torch.float",
    ),
    "a wider type": (of_tensor(lambda one: one.update(dtype="F64")), "is not inside|overlap"),
    "a tensor that is no object": (in_index(add(WEIGHT, 7)), f"{WEIGHT} is 7 instead of an object"),
    "a tensor without a type": (of_tensor(lambda one: one.pop("dtype")), "dtype = None"),
    "a tensor without pieces": (of_tensor(lambda one: one.pop("pieces")), "pieces = None instead of a list"),
    "a path of another": (of_tensor(lambda one: one.update(path=["model", "x"])), "has the path of another tensor"),
    "no path": (of_tensor(lambda one: one.update(path=[])), "instead of a section and a name"),
    "a missing tensor": (
        in_index(lambda index: {"tensors": without(WEIGHT)(index["tensors"])}),
        f"does not have {WEIGHT}",
    ),
    "a missing optimizer state": (
        in_index(lacking("optim.embed.weight.exp_avg")),
        "does not have optim.embed.weight.exp_avg",
    ),
    "a tensor too many": (
        in_index(add("model.more", {**NOTHING, "path": ["model", "more"]})),
        "has model.more, which this run does not have",
    ),
    "a tensor inside another": (
        in_index(
            add(f"{WEIGHT}.x", {"path": ["model", "embed.weight", "x"], "dtype": "F32", "shape": [0], "pieces": []})
        ),
        "is inside another tensor",
    ),
    "a tensor twice": (in_index(twice), "comes twice"),
    "an offset below zero": (of_piece(2, [-1, 0]), "is no part of"),
    "an offset too many": (of_piece(2, [0, 0, 0]), "is no part of"),
    "a piece in a missing file": (of_piece(0, "rank-00009.safetensors"), "which is no file of this checkpoint"),
    "a piece in a file elsewhere": (of_piece(0, "../step-000002/rank-00000.safetensors"), "which is no file of this"),
    "a piece in the index": (of_piece(0, INDEX), "which is no file of this checkpoint"),
    "a piece at a byte below zero": (of_piece(1, -8), "is not inside rank-00000.safetensors"),
    "a piece at a byte that is text": (of_piece(1, "8"), "is not inside rank-00000.safetensors"),
    "a piece behind the end": (of_piece(1, 10**15), "is not inside rank-00000.safetensors"),
    "a piece that is short": (of_tensor(lambda one: one.update(pieces=[[SHARD, 8]])), "instead of"),
    "no tensors": (in_index(lambda index: {}), "tensors = None is not an object"),
    "tensors in a list": (in_index(lambda index: {"tensors": []}), r"tensors = \[\] is not an object"),
    "an index that is a list": (in_index(lambda index: []), "instead of a JSON object"),
    "an index that is no JSON": (lambda folder: replace_file(folder, INDEX, b"\xff{"), "cannot be read as JSON"),
    "an index nested deeply": (lambda folder: replace_file(folder, INDEX, b"[" * 10**5), "nested too deeply|as JSON"),
    "an empty index": (lambda folder: replace_file(folder, INDEX, b""), "cannot be read as JSON"),
    "no random states": (
        in_index(lacking("rng")),
        "rng.python is missing",
    ),
    "random states that are none": (rng_words, "random states are malformed"),
    "a weight that is NaN": (nan_weight, f"{WEIGHT} has 1 values that are NaN or Inf"),
    # manifest.json
    "an unknown version": (of_field("format", 99), "has format 99; this version of LMWorks reads 2"),
    "an unknown hash": (of_field("hash", "md5"), "hash = 'md5' is not known; it must be sha256 or xxh3"),
    "a hash that is a list": (of_field("hash", ["sha256"]), "is not known; it must be sha256 or xxh3"),
    "an unknown key": (of_field("more", 1), "has a key 'more'"),
    "no files": (in_manifest(without("files")), "it has no 'files'"),
    "files in a list": (of_field("files", []), r"files = \[\] is not an object"),
    "no index among the files": (
        in_manifest(lambda m: m["files"].pop(INDEX) and None),
        "files does not list index.json",
    ),
    "no chunk": (of_field("chunk", 0), "chunk = 0 is not a number of bytes"),
    "a chunk that is text": (of_field("chunk", "16"), "chunk = '16' is not a number of bytes"),
    "another chunk": (of_field("chunk", 1000), "digests for"),
    "no meta": (in_manifest(without("meta")), "it has no 'meta'"),
    "meta in a list": (of_field("meta", []), r"meta = \[\] is not an object"),
    "a step that is text": (of_field("step", "4"), "step = '4' is not a whole number"),
    "a step that is true": (of_field("step", True), "step = True is not a whole number"),
    "a file of no bytes": (of_file("bytes", -1), "bytes = -1 instead of a whole number"),
    "a file without a rank": (of_file("rank", None), "rank = None instead of a whole number"),
    "a file without digests": (of_file("digests", []), "0 digests for"),
    "digests that are numbers": (of_file("digests", [7]), "are not those of sha256"),
    "digests that are short": (of_file("digests", ["abc"]), "are not those of sha256"),
    "a file that is no object": (in_manifest(lambda m: m["files"].update({SHARD: 7})), "is not an object"),
    "a file elsewhere": (renamed("../../escaped"), "names a file '../../escaped': it is a path"),
    "a file of the machine": (renamed("/etc/hostname"), "names a file '/etc/hostname': it is a path"),
    "a file without a name": (renamed(""), "names a file '': it does not name a file"),
    "a manifest nested deeply": (in_manifest(lambda m: b"[" * 10**5), "nested too deeply|cannot be read as JSON"),
    "a manifest of a number": (in_manifest(lambda m: 7), "holds 7 instead of a JSON object"),
    # what the run remembers
    "no cursor": (in_manifest(lambda m: m["meta"].pop("cursor") and None), "meta.cursor = None"),
    "a cursor below zero": (of_meta("cursor", -4), "meta.cursor = -4 is not where the data can stand at step 4"),
    "a cursor before the step": (of_meta("cursor", 3), "meta.cursor = 3 is not where the data can stand at step 4"),
    "a cursor beyond all data": (of_meta("cursor", 10**30), "meta.cursor = "),
    "no spec": (of_meta("spec", None), "meta.spec = None is not a spec"),
    "no digest of the data": (of_meta("data", None), "meta.data = None"),
    "a loss scale that is text": (of_meta("loss_scale", {"scale": "big", "good": 0}), "is not a loss scale"),
    "health that is text": (of_meta("health", "good"), "meta.health = 'good' is not an object"),
    "losses that are text": (of_meta("health", {"losses": ["low"]}), "meta.health.losses"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_malformed_checkpoint_is_refused_by_name_and_the_older_one_is_used(
    trained: Path, run: Path, reader: Trainer, kind: str
) -> None:
    craft, why = KINDS[kind]
    craft(newest(run))
    (reason,) = load(reader, run)
    assert (reader.step, reader.cursor) == (2, 2)
    assert "step-000004" in reason and "\n" not in reason and len(reason) < 600
    assert re.search(why, reason), reason
    kept = {name: value for name, value in saved(trained, 2).items() if name.startswith(("model.", "optim."))}
    assert differences(live(reader), kept) == []


def test_every_reader_refuses_what_a_resume_refuses(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`eval` and `generate`, `export`, `checkpoint verify`, and whoever asks for that very step."""
    KINDS["no pieces"][0](newest(run))
    assert load_trained(run).step == 2
    assert f"the pieces of {WEIGHT} have 0 elements" in capsys.readouterr().err
    assert export(run, tmp_path / "exported").step == 2
    new, old = verify_all([newest(run), run / "checkpoints" / "step-000002"], lambda *_: None)
    assert (new.status, old.status) == ("damaged", "intact") and f"the pieces of {WEIGHT}" in new.wrong[0].reason
    with pytest.raises(CheckpointError, match=r"no usable checkpoint .* have 0 elements"):
        load_trained(run, step=4)


def test_a_model_that_spec_toml_changed_is_no_damage(run: Path) -> None:
    text = (run / "spec.toml").read_text()
    (run / "spec.toml").write_text(text.replace("hidden = 32", "hidden = 64").replace("head_dim = 16", "head_dim = 32"))
    with pytest.raises(SpecError, match=r"has model.head_dim = 32, was 16; .*model.hidden = 64, was 32 in step 4"):
        load_trained(run)


# --- any kind -----------------------------------------------------------------------------------------------

JUNK = (None, True, -1, 0, 1, 2**63, 2**70, 1.5, -0.0, "", "x", "../x", "\0", [], [[]], [-1], {}, {"a": 1}, [2**70, 2])


def mutate(tree: Any, luck: random.Random) -> tuple[Any, list[Any]]:
    """Parsed JSON with one thing in it replaced, removed, doubled or renamed; and where that was."""
    tree, path = copy.deepcopy(tree), list[Any]()
    place = tree
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = luck.choice(keys)
        path.append(key)
        if not isinstance(place[key], dict | list) or not place[key] or luck.random() < 0.15:
            break
        place = place[key]
    act = luck.choice(("replace", "replace", "remove", "double", "rename"))
    if act == "remove":
        del place[key]
    elif act == "double" and isinstance(place, list):
        place.insert(key, copy.deepcopy(place[key]))
    elif act == "rename" and isinstance(place, dict):
        place[luck.choice(("", "x", "..", "a/b", f"{key} "))] = place.pop(key)
    else:
        place[key] = copy.deepcopy(luck.choice(JUNK))
    return tree, path


@pytest.mark.parametrize("seed", with_slow(range(4), (1, 2, 3)))
def test_no_change_of_a_manifest_or_an_index_is_an_error_of_ours_or_alters_a_state(
    trained: Path, run: Path, reader: Trainer, seed: int
) -> None:
    """Refused by name with the older one in its place, or without effect: as long as the digests are right."""
    luck, folder, whole = random.Random(seed), newest(run), newest(trained)
    index, manifest = (json.loads((whole / name).read_text()) for name in ("index.json", "manifest.json"))
    expected = {2: dict[str, Any](), 4: dict[str, Any]()}
    for step in expected:
        expected[step] = {k: v for k, v in saved(trained, step).items() if k.startswith(("model.", "optim."))}
    outcomes = {2: 0, 4: 0}
    for _ in range(60):
        before, rewrite = luck.choice(((index, rewrite_index), (manifest, rewrite_manifest)))
        changed, path = mutate(before, luck)
        rewrite(folder, lambda _, changed=changed: json.dumps(changed).encode())
        try:
            refused = load(reader, run)
        except (SpecError, DataError):  # it was saved with another spec, or other data: no damage
            assert path[0] == "meta" and path[1] in ("spec", "data")
            continue
        finally:
            for name in ("index.json", "manifest.json", "COMMITTED"):
                shutil.copy(whole / name, folder / name)
        outcomes[reader.step] += 1
        assert len(refused) == (reader.step == 2) and all("step-000004" in why for why in refused), (path, refused)
        assert differences(live(reader), expected[reader.step]) == [], path
    assert min(outcomes.values()) > 0


# --- coverage -----------------------------------------------------------------------------------------------


def test_types_have_the_sizes_of_torchs() -> None:
    assert {DTYPES[dtype]: dtype.itemsize for dtype in DTYPES} == ITEM_BYTES


def cut(
    shape: tuple[int, ...], luck: random.Random, at: tuple[int, ...] = ()
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """A box cut in two again and again, at random places along random dimensions."""
    at = at or (0,) * len(shape)
    axis = luck.randrange(len(shape))
    if shape[axis] < 2 or luck.random() < 0.2:
        return [(at, shape)]
    middle = luck.randrange(1, shape[axis])
    low = tuple(middle if dim == axis else size for dim, size in enumerate(shape))
    high = tuple(size - middle if dim == axis else size for dim, size in enumerate(shape))
    return cut(low, luck, at) + cut(high, luck, tuple(a + (middle if d == axis else 0) for d, a in enumerate(at)))


def test_coverage_is_exact() -> None:
    """Any cut of a tensor covers it; with one box moved, larger, left out or there twice it does not."""
    luck, path = random.Random(0), Path("index.json")
    tried = 0
    for _ in range(200):
        shape = tuple(luck.randint(1, 9) for _ in range(luck.randint(1, 3)))
        boxes = [Piece("f", 8, at, size) for at, size in cut(shape, luck)]
        empty = Piece("f", 8, shape, (0,) * len(shape))  # of a rank that has no rows
        luck.shuffle(boxes)
        check_coverage("x", shape, [*boxes, empty], path)
        for wrong in (boxes[1:], [*boxes, boxes[0]], [*boxes[1:], boxes[-1]] if len(boxes) > 1 else []):
            counted = torch.zeros(shape, dtype=torch.int)
            for box in wrong:
                counted[tuple(slice(a, a + n) for a, n in zip(box.offsets, box.sizes, strict=True))] += 1
            if (counted == 1).all():
                continue
            tried += 1
            with pytest.raises(DamagedError, match="pieces of x"):
                check_coverage("x", shape, wrong, path)
    assert tried > 400
    check_coverage("x", (), [Piece("f", 8, (), ())], path)
    with pytest.raises(DamagedError, match="have 2 elements, but 1"):
        check_coverage("x", (), [Piece("f", 8, (), ())] * 2, path)
