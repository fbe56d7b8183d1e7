"""MinHash signatures beside datatrove's: documents a second on one core, same words and signature size, in turns.

    OMP_NUM_THREADS=1 python benchmarks/curate_minhash.py FOLDER_OF_TEXT

Needs `pip install 'datatrove[processing]==0.10.1' spacy`. Both sides start from text and end with sorted keys on disk:
14 bands of 8 hashes over 5-grams. Datatrove is measured with

- `same words`: our words in place of its tokenizer and normalisation, so that both hash the same 5-grams;
- `split`: its normalisation, and words cut at white space;
- `default`: its normalisation and spaCy's tokenizer for English, as FineWeb was made.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from common import write_result

from lmworks.curate.dedup import BandKeys
from lmworks.curate.documents import Document
from lmworks.curate.minhash import PROSE
from lmworks.curate.shingles import word_bytes

ENDINGS = (".c", ".h", ".py", ".go", ".rst", ".md", ".txt", ".java", ".rs")


def documents(folder: Path, count: int, characters: int) -> list[str]:
    """Pieces of files of about the size of a web page."""
    found: list[str] = []
    for path in sorted(folder.rglob("*")):
        if len(found) < count and path.is_file() and path.suffix in ENDINGS:
            text = path.read_text(errors="replace")
            found += [text[at : at + characters] for at in range(0, len(text), characters)]
    return found[:count]


class OurWords:
    def word_tokenize(self, text: str) -> list[str]:
        return [word.decode("utf-8", "replace") for word in word_bytes(text, fold=True).split(b"\0") if word]


class Split:
    def word_tokenize(self, text: str) -> list[str]:
        return text.split()


def ours(texts: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        summary = BandKeys(Path(folder), PROSE)
        for number, text in enumerate(texts):
            summary.add(Document(str(number), text))
        summary.close()


def datatrove(kind: str) -> Callable[[list[str]], None]:
    from datatrove.data import Document as Theirs
    from datatrove.pipeline.dedup.minhash import MinhashConfig, MinhashDedupSignature
    from datatrove.utils.logging import logger
    from datatrove.utils.text import TextNormConfig

    logger.remove()
    norm = TextNormConfig(*[False] * 7) if kind == "same words" else TextNormConfig()

    def run(texts: list[str]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            step = MinhashDedupSignature(folder, MinhashConfig(norm_config=norm))
            if kind != "default":
                step.word_tokenizer = OurWords() if kind == "same words" else Split()
            step.run((Theirs(text, str(number)) for number, text in enumerate(texts)), 0, 1)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--documents", type=int, default=4000)
    parser.add_argument("--characters", type=int, default=3000)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    texts = documents(args.folder, args.documents, args.characters)
    kinds: dict[str, tuple[Callable[[list[str]], None], list[str]]] = {"lmworks": (ours, texts)}
    for kind in ("same words", "split"):
        kinds[f"datatrove, {kind}"] = (datatrove(kind), texts[: len(texts) // 4])
    kinds["datatrove, default"] = (datatrove("default"), texts[: len(texts) // 40])
    rates: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(args.rounds):
        for name, (run, some) in kinds.items():
            began = time.process_time()
            run(some)
            rates[name].append(len(some) / (time.process_time() - began))
    median = {name: statistics.median(rate) for name, rate in rates.items()}
    path = write_result(
        "curate_minhash",
        {
            "datatrove": importlib.metadata.version("datatrove"),
            "documents": len(texts),
            "characters": args.characters,
            "signature": "14 × 8 hashes of 5-grams; ours of 32 bits, datatrove's of 64 (its default)",
            "documents_per_s": {name: [round(one, 1) for one in rate] for name, rate in rates.items()},
            "median": {name: round(rate, 1) for name, rate in median.items()},
            "ratio": {name: round(median["lmworks"] / rate, 2) for name, rate in median.items() if name != "lmworks"},
        },
    )
    print(path.read_text())


if __name__ == "__main__":
    main()
