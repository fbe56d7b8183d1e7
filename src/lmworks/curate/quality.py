"""The stage that a classifier of `classifier.py` decides, and the documents that one is trained on."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import ClassVar

from ..data.sources import Reading, documents_of, parts_of
from ..spec.errors import SpecError
from ..spec.files import check_writable
from ..spec.schema import opt
from .classifier import Classifier, Trained, features, train
from .documents import KEPT, Decide, Document, DocumentStage


def train_on(chosen: Sequence[str], raw: Sequence[str], out: Path, reading: Reading, most: int) -> Trained:
    """Sources as `lmworks data prepare` reads them; at most `most` documents of each kind, from the beginning."""
    check_writable(out, "--out")
    result = train(islice(texts(chosen, reading, out), most), islice(texts(raw, reading, out), most))
    result.classifier.save(out)
    return result


def texts(sources: Sequence[str], reading: Reading, out: Path) -> Iterator[str]:
    for source in sources:
        for part in parts_of(source, reading, out):
            yield from (document.text for document in documents_of(part, reading) if document.text.strip())


@functools.lru_cache(maxsize=2)
def load(path: str) -> Classifier:
    return Classifier.load(Path(path))


@dataclass(frozen=True)
class Quality(DocumentStage):
    section: ClassVar[str] = "stages.quality"
    name: ClassVar[str] = "quality"
    about: ClassVar[str] = "drops documents that a classifier (lmworks data quality) finds unlike the chosen ones"
    source: ClassVar[str] = "GPT-3 (Brown et al. 2020), appendix A; DCLM (Li et al. 2024)"
    files: ClassVar[tuple[str, ...]] = ("model",)

    model: str = opt("", "file that `lmworks data quality` wrote")
    min_score: float = opt(0.5, "least chance of being one of the chosen documents", ge=0, le=1)

    def require(self) -> None:
        if not self.model:
            raise SpecError(f"{self.key('model')} names no classifier; make one with `lmworks data quality`")
        load(self.model)

    def open(self) -> Decide:
        classifier = load(self.model)

        def decide(document: Document) -> str:
            score = float(classifier.scores(features([document.text]))[0])
            document.meta["quality"] = round(score, 4)
            return KEPT if score >= self.min_score else "low_quality"

        return decide


STAGES = (Quality,)
