"""A run as a Hugging Face folder: weights and config as `transformers` reads them, and the tokenizer beside them."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from ..data import resolve
from ..data.index import TOKENIZER_FILE
from ..data.tokenizer import FileTokenizer
from ..model.hf_config import family_of_spec
from ..record import RunFolder
from ..spec import CheckpointError, SpecError
from ..spec.files import write_whole
from .load import load_trained

MARKER = "lmworks_export.json"  # where the folder comes from; what bears it may be written anew


@dataclass(frozen=True)
class Export:
    folder: Path
    step: int
    params: int
    tokenizer: bool  # whether one was there to go with it


def export(run_dir: str | Path, out: Path, step: int | None = None) -> Export:
    """Write the checkpoint of a run, whatever its layout was, for others to load."""
    refuse_others(out)
    family_of_spec(RunFolder.open(run_dir).spec().model)  # refuses what no family can express, before anything is made
    trained = load_trained(run_dir, step)
    source = resolve(next(iter(trained.spec.data.sources))) / TOKENIZER_FILE
    tokenizer = trained.tokenizer
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_whole(out / MARKER, json.dumps({"run": str(Path(run_dir).absolute()), "step": trained.step}, indent=2))
        if isinstance(tokenizer, FileTokenizer):
            shutil.copyfile(source, out / TOKENIZER_FILE)
            write_whole(out / "tokenizer_config.json", tokenizer_config(tokenizer))
    except OSError as error:
        raise CheckpointError(f"cannot write {out}: {error.strerror}") from None
    trained.model.save_hf(out, eos=tokenizer.eot)
    return Export(out, trained.step, trained.spec.model.params, isinstance(tokenizer, FileTokenizer))


def refuse_others(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise SpecError(f"{out} is a file; name a folder for the export")
    if out.is_dir() and any(out.iterdir()) and not (out / MARKER).is_file():
        raise SpecError(f"{out} is not empty and not an earlier export; name another folder")


def tokenizer_config(tokenizer: FileTokenizer) -> str:
    """Enough for AutoTokenizer to take tokenizer.json as it is."""
    end = tokenizer.inner.id_to_token(tokenizer.eot)
    return json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "add_prefix_space": False})
