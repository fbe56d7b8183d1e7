"""Decisions of the stage `code` beside BigCode's own functions, file by file.

    git clone https://github.com/bigcode-project/bigcode-dataset && git -C bigcode-dataset checkout 014784c5
    pip install beautifulsoup4
    python benchmarks/code_rules.py bigcode-dataset/preprocessing FOLDER_OF_SOURCE_FILES…

The functions of their `filtering.py` are run as they are; only the script around them, which loads their data set, is
left out. Compared are the rules that both have: lengths of lines and letters and digits, XML, text of HTML, size and
letters of JSON and YAML. StarCoder2's other rules have no published code.
"""

from __future__ import annotations

import argparse
import ast
import csv
import json
import logging
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from bs4 import BeautifulSoup
from common import write_result

from lmworks.curate.code_rules import DATA, LONG_LINES, Code, code
from lmworks.curate.documents import Document
from lmworks.curate.languages import language_of

SIZES = (50, 5000)  # of JSON and YAML in StarCoder's paper; the script's own default for the least is 100
OFF: dict[str, Any] = dict.fromkeys(
    ("max_line_length", "max_text_line_length", "max_lines", "generated_lines", "min_data_characters"), 0
)
OFF |= dict.fromkeys(
    ("max_mean_line_length", "min_alphanumeric", "min_letters", "min_html_text", "min_data_letters"), 0.0
)
OFF |= dict.fromkeys(("max_data_characters", "max_data_lines", "max_encoded_run"), 2**62)
OFF |= {"xml": False, "max_encoded": 1.0}
LINES = {"max_line_length": 1000, "max_mean_line_length": 100.0, "min_alphanumeric": 0.25}
NAMES = {"html": "HTML", "json": "JSON", "yaml": "YAML"}


def their_functions(folder: Path) -> dict[str, Any]:
    tree = ast.parse((folder / "filtering.py").read_text())
    tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    args = SimpleNamespace(line_max=1000, line_mean=100, alpha_frac=0.25, min_size=SIZES[0], max_size=SIZES[1])
    names = {"np": np, "csv": csv, "logging": logging, "BeautifulSoup": BeautifulSoup, "args": args, "LANG": "language"}
    exec(compile(tree, "filtering.py", "exec"), names)
    return names


def documents(folders: list[Path], most: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """(our name of the language, the file as their functions see it), at most so many of a kind of file."""
    paths = [path for folder in folders for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    paths.sort()
    random.Random(0).shuffle(paths)
    count: dict[str, int] = {}
    for path in paths:
        if count.get(path.suffix, 0) >= most or path.stat().st_size > 2**21:
            continue
        try:
            text = path.read_bytes().decode()
        except UnicodeDecodeError:
            continue
        if not text.strip() or "\0" in text:
            continue
        count[path.suffix] = count.get(path.suffix, 0) + 1
        language = language_of(str(path), text)
        yield language, {"content": text, "path": str(path), "language": NAMES.get(language, language)}


def rules(their: dict[str, Any], folder: Path) -> dict[str, tuple[Callable[[str], bool], Code, Callable[[Any], bool]]]:
    """Name → (for which languages, our keys, whether they keep a file)."""
    table = their["load_filter_csv"](folder / "visual_inspection.csv")

    def data(example: Any) -> bool:
        return bool(
            their["basic_filters_per_extension"](example, table) and their["filter_large_and_small_files"](example)
        )

    table_data = {"min_data_characters": SIZES[0], "max_data_characters": SIZES[1], "min_data_letters": 0.5}
    return {
        "lines, letters and digits": (
            lambda language: language not in LONG_LINES | DATA,
            Code(**{**OFF, **LINES}),
            their["basic_filters"],
        ),
        "xml": (lambda language: True, Code(**{**OFF, "xml": True}), their["filter_xml"]),
        "html": (lambda language: language == "html", Code(**{**OFF, "min_html_text": 0.2}), their["filter_html"]),
        "json": (
            lambda language: language == "json",
            Code(**{**OFF, **table_data, "min_alphanumeric": 0.25}),
            data,
        ),
        "yaml": (lambda language: language == "yaml", Code(**{**OFF, **table_data, **LINES}), data),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bigcode", type=Path)
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--most", type=int, default=600, help="files of each suffix")
    given = parser.parse_args()
    their = their_functions(given.bigcode)
    compared = rules(their, given.bigcode)
    found: dict[str, dict[str, Any]] = {
        name: {"files": 0, "dropped_by_both": 0, "only_here": [], "only_there": []} for name in compared
    }
    for language, example in documents(given.folders, given.most):
        example |= their["add_stats"](example)
        for name, (applies, keys, keeps) in compared.items():
            if not applies(language):
                continue
            row = found[name]
            here = bool(code(keys, Document(example["path"], example["content"], {"language": language})))
            there = not keeps(example)
            row["files"] += 1
            row["dropped_by_both"] += here and there
            if here != there:
                row["only_here" if here else "only_there"].append(Path(example["path"]).name)
    for row in found.values():
        for side in ("only_here", "only_there"):
            row[side] = {"files": len(row[side]), "some": sorted(row[side])[:5]}
    print(json.dumps(found, indent=1))
    write_result("code_rules", {"rules": found})


if __name__ == "__main__":
    main()
