"""A corpus of source code from Debian's packages: gathered, cleaned, split, tokenized. Nothing of it is committed.

    python benchmarks/code_corpus.py code                          # some 1.3 GB of source; an hour on two slow cores
    python benchmarks/code_corpus.py code --languages go,python    # some of them
    python benchmarks/code_corpus.py code --vocab 16384 --val-fraction 0.01

It needs `apt-get` with Debian 12's package lists, and 12 GB of disk. Every step is left out when its result is there:
a run that was stopped goes on.

    code/packages/       what apt-get brought
    code/sources/LANG/   unpacked
    code/clean/LANG/     after `lmworks data curate`, with its data card
    code/tokenizer.json  of a sample of all languages
    code/tokens/LANG/    train and val, one folder a language: held-out loss by language, and the weights of a mixture

AMD's register tables, a third of the kernel's bytes, are left out before anything else is done.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from common import write_result

from lmworks.spec import dump_toml

PACKAGES = {
    "c": ("linux-source-6.1",),
    "go": ("golang-1.19-src",),
    "java": ("openjdk-17-source",),
    "python": (
        *("libpython3.11-stdlib", "libpython3.11-testsuite", "python3-django", "python3-sympy", "python3-scipy"),
        *("python3-numpy", "python3-pandas", "python3-matplotlib", "python3-sklearn", "python3-networkx"),
        *("python3-sqlalchemy", "python3-twisted", "python3-statsmodels", "python3-astropy", "python3-nltk"),
    ),
    "rust": ("rust-src",),
}
GLOBS = {"c": "**/*.[ch]", "go": "**/*.go", "java": "**/*.java", "python": "**/*.py", "rust": "**/*.rs"}
LEFT_OUT = ("drivers/gpu/drm/amd/include",)
SAMPLE_BYTES = 8_000_000  # of each language, for the tokenizer


def lmworks(*words: str) -> None:
    print("lmworks", *words, flush=True)
    subprocess.run([sys.executable, "-m", "lmworks", *words], check=True)


def gather(root: Path, language: str) -> Path:
    """The language's packages, unpacked; archives inside them too."""
    packages, out = root / "packages", root / "sources" / language
    if out.exists():
        return out
    packages.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f"{language}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for package in PACKAGES[language]:
        if not list(packages.glob(f"{package}_*.deb")):
            subprocess.run(["apt-get", "download", package], cwd=packages, check=True)
        (archive,) = packages.glob(f"{package}_*.deb")
        subprocess.run(["dpkg-deb", "-x", archive, partial / package], check=True)
    for inner in partial.rglob("*.tar.xz"):
        subprocess.run(["tar", "-C", inner.parent, "-xf", inner], check=True)
        inner.unlink()
    for inner in partial.rglob("src.zip"):
        with zipfile.ZipFile(inner) as opened:
            opened.extractall(inner.parent)
        inner.unlink()
    for name in LEFT_OUT:
        for folder in list(partial.rglob(name)):
            shutil.rmtree(folder)
    partial.rename(out)
    return out


def clean(root: Path, language: str) -> Path:
    out = root / "clean" / language
    pipeline = {
        "sources": [str(gather(root, language))],
        "out": str(out),
        "stages": [
            "normalise",
            {"stage": "code_language", "languages": [language]},
            "code",
            "exact",
            {"stage": "minhash", "preset": "code"},
            "secrets",
            "pii",
        ],
        "reading": {"glob": GLOBS[language]},
    }
    file = root / f"{language}.toml"
    file.write_text(dump_toml(pipeline), encoding="utf-8")
    lmworks("data", "curate", str(file))
    return out


def write_sample(root: Path, folders: list[Path]) -> Path:
    """As many bytes of each language, documents drawn at random, always the same ones."""
    sample = root / "sample"
    sample.mkdir(exist_ok=True)
    for folder in folders:
        lines: list[str] = []
        for shard in sorted(folder.glob("documents-*.jsonl")):
            with shard.open(encoding="utf-8", newline="\n") as opened:
                lines += opened
        random.Random(0).shuffle(lines)
        taken, size = [], 0
        for line in lines:
            size += len(line)
            if size > SAMPLE_BYTES and taken:
                break
            taken.append(line)
        (sample / f"{folder.name}.jsonl").write_text("".join(taken), encoding="utf-8")
    return sample


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--languages", default=",".join(PACKAGES))
    parser.add_argument("--vocab", type=int, default=16384)
    parser.add_argument("--val-fraction", type=float, default=0.01)
    chosen = parser.parse_args()
    root = chosen.folder.resolve()
    languages = chosen.languages.split(",")
    folders = [clean(root, language) for language in languages]
    tokenizer = root / "tokenizer.json"
    if not tokenizer.exists():
        made = root / "tokens-of-sample"
        lmworks("data", "prepare", str(write_sample(root, folders)), "--tokenizer", f"bpe:{chosen.vocab}+code",
                "--val-fraction", "0.05", "--out", str(made))  # fmt: skip
        shutil.copy(made / "tokenizer.json", tokenizer)
        shutil.rmtree(made)
    rows = {}
    for language, folder in zip(languages, folders, strict=True):
        out = root / "tokens" / language
        lmworks("data", "prepare", str(folder), "--tokenizer", str(tokenizer),
                "--val-fraction", str(chosen.val_fraction), "--out", str(out))  # fmt: skip
        card = json.loads((folder / "curated.json").read_text())
        index = json.loads((out / "index.json").read_text())
        tokens = {name: sum(shard["tokens"] for shard in shards) for name, shards in index["splits"].items()}
        rows[language] = {"read": card["read"], "kept": card["kept"], "dropped": card["dropped"], "tokens": tokens}
        print(language, json.dumps(rows[language]), flush=True)
    if set(languages) == set(PACKAGES):
        write_result("code_corpus", {"packages": PACKAGES, "languages": rows})


if __name__ == "__main__":
    main()
