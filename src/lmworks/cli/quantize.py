"""`lmworks quantize`: quantize a trained model; refuse if the loss rises too much."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..data.progress import activity
from ..record import RunFolder
from ..spec import DataError, LMWorksError, ModelSpec, SpecError
from ..spec.errors import NoSuchData
from .evals import LEVEL, chosen_suites, print_comparisons
from .loading import loading
from .options import Force
from .output import Json, print_json, print_table

if TYPE_CHECKING:
    from ..data import Tokenizer
    from ..engine.quantization.calibrated_rounding import LayerReport
    from ..engine.quantization.quantize import Calibration, Report
    from ..evals.compare import Comparison
    from ..evals.suite import Suite
    from ..model import GPT

SHOWN = 8  # layers in the table
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json",
    "chat_template.jinja",
)  # fmt: skip


def quantize(
    source: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, or a Hugging Face one.")],
    scheme: Annotated[str, typer.Option("--scheme", help="int8, int4 (weights) or fp8 (weights and activations).")],
    out: Annotated[Path, typer.Option("--out", help="A new folder, or that of an earlier quantization.")],
    calibration: Annotated[
        str, typer.Option("--calibration", help="Text file or prepared data folder (default: the run's held-out data).")
    ] = "",
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="How much of it is used, at most.")] = 131072,
    group: Annotated[int, typer.Option("--group", help="int4: inputs that share a scale: 128, 64, 32 or 16.")] = 128,
    limit: Annotated[
        float | None,
        typer.Option(
            "--max-loss-increase", min=0, help="Refuse if perplexity rises by more (default 0.02, int4 0.05)."
        ),
    ] = None,
    suite: Annotated[
        str, typer.Option("--suite", metavar="NAME[,…]", help="Also refuse if worse on these suites, beyond noise.")
    ] = "",
    suite_limit: Annotated[int, typer.Option("--suite-limit", min=0, help="Problems of each (0: all).")] = 0,
    suite_data: Annotated[
        list[str] | None, typer.Option("--suite-data", metavar="[SUITE=]SOURCE", help="Data in place of a suite's.")
    ] = None,
    step: Annotated[int | None, typer.Option("--step", help="Use the checkpoint of this step.")] = None,
    force: Force = False,
    json: Json = False,
) -> None:
    """Quantize a model, measure the loss, refuse it if too large.

    Half of the calibration text is what rounding is fitted to, the other half what perplexity is measured on. A model
    that is refused (exit code 1) is not written; its worst layers are named.

    \b
    Examples:
      lmworks quantize runs/demo --scheme int4 --out quantized/demo-int4
      lmworks quantize runs/demo --scheme int4 --out quantized/demo-int4 --suite stdlib-imports --suite-limit 50
      lmworks quantize exported/demo --scheme fp8 --calibration text.txt --out quantized/demo-fp8 --json
    """
    from ..engine.quantization.folder import check_output_folder, save_quantized
    from ..engine.quantization.quantize import QuantizationRefused
    from ..engine.quantization.quantize import quantize as run
    from ..engine.quantization.quantized_model import get_scheme
    from ..kernels.inference.quantized import GROUPS

    get_scheme(scheme)
    if group not in GROUPS:
        raise SpecError(f"--group {group} is not one of: {', '.join(map(str, GROUPS))}")
    suites = chosen_suites(suite, suite_data, {}) if suite else []
    check_suites(suites)
    check_output_folder(out)
    if not force:
        check_quantize_memory(source, scheme, tokens)
    model, text, about = load(source, calibration, tokens, step)
    try:
        report = run(
            model, scheme, text, group=group, limit=limit, progress=print_layer if sys.stderr.isatty() else None
        )
    except QuantizationRefused as refused:
        if json:
            print_json(refused.report.to_dict())
        raise
    save_quantized(model, out, report, **about)
    del model
    compared = compare_quantized(source, out, step, suites, suite_limit) if suites else []
    if json:
        suite_scores = {"suites": [one.to_dict() for one in compared]} if suites else {}
        print_json({"out": str(out), **report.to_dict(), **suite_scores})
    else:
        print_quantized(report, out)
        if compared:
            print_comparisons(compared)


def check_suites(suites: Sequence[Suite]) -> None:
    from ..evals.formats import FORMATS
    from ..evals.formats.format import HELD_OUT

    if held_out := next((one.name for one in suites if FORMATS[one.format].task == HELD_OUT), ""):
        raise SpecError(
            f"--suite {held_out}: the loss on held-out text is measured anyway, and --max-loss-increase is its limit; "
            "name a suite with problems (`lmworks evals list`)"
        )


def compare_quantized(
    source: Path, out: Path, step: int | None, suites: Sequence[Suite], limit: int
) -> list[Comparison]:
    """Both models on the same problems. The quantized one is removed where it is worse beyond noise."""
    from ..evals.compare import compare_results, is_worse
    from ..evals.engine_model import EngineModel
    from ..evals.runner import run_suite
    from ..llm import LLM
    from ..loading import trained_fim

    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for name, place, at in (("before", source, step), ("after", out, None)):
            with LLM(place, step=at) as llm:
                model = EngineModel(llm, {"model": str(place)}, fim=trained_fim(source))
                results.append({one.name: run_suite(model, one, Path(folder, name, one.name), limit) for one in suites})
    before, after = results
    compared = [compare_results(before[one.name], after[one.name]) for one in suites]
    worse = [one for one in compared if is_worse(one) and one.p < LEVEL]
    if worse:
        shutil.rmtree(out)
        said = "; ".join(map(str, worse))
        raise LMWorksError(f"the quantized model is worse beyond noise, and is not kept: {said}")
    return compared


def check_quantize_memory(source: Path, scheme: str, tokens: int) -> None:
    """Refuse what does not fit into memory, before it is loaded."""
    import torch

    from ..engine.quantization.folder import is_quantized
    from ..engine.quantization.quantize import check_memory
    from ..loading import is_hf
    from ..model.hf import read_config
    from ..train.device import pick_device

    if is_hf(source):
        if is_quantized(source):
            return  # refused for that
        cuda = torch.cuda.is_available()
        device, width = torch.device("cuda" if cuda else "cpu"), 2 if cuda else 4
        model = read_config(source)[1]
    else:
        spec = RunFolder.open(source).spec()
        device, width, model = pick_device(spec.cluster), 4, spec.model
    check_memory(str(source), model, scheme, tokens, width, device)


def print_layer(layer: LayerReport) -> None:
    typer.echo(f"{layer.name}: off by {layer.error:.2%}", err=True)


def load(source: Path, calibration: str, tokens: int, step: int | None) -> tuple[GPT, Calibration, dict[str, Any]]:
    """The model, the text to calibrate on, and what goes into the folder beside the weights."""
    import torch

    from ..data import load_tokenizer, resolve
    from ..data.chat_tokenizer import end_token_ids
    from ..data.tokenizer import ByteTokenizer
    from ..engine.quantization.folder import is_quantized
    from ..loading import hf_tokenizer, is_hf
    from ..model import GPT
    from ..model.hf import load_hf, read_config
    from ..train.load_run import load_trained

    if is_hf(source):
        if step is not None:
            raise SpecError(f"{source} is a Hugging Face folder: it has no steps to choose from")
        if is_quantized(source):
            raise SpecError(f"{source} is quantized already: quantize what it was made from")
        if not calibration:
            raise SpecError("a Hugging Face folder has no held-out data: give --calibration, a text or a data folder")
        device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
        files = [source / name for name in TOKENIZER_FILES if (source / name).is_file()]
        about: dict[str, Any] = {"files": files, "eos": end_token_ids(source)}
        # Calibration data are checked before gigabytes of weights are read.
        text = calibrate_on(calibration, tokens, read_config(source)[1], hf_tokenizer(source))
        with activity() as doing:
            doing(loading(source), 0, 0)
            return load_hf(GPT, source, dtype=dtype, device=device), text, about
    spec = RunFolder.open(source).spec()
    data = next(iter(spec.data.sources))
    tokenizer = load_tokenizer(resolve(data))
    is_bytes = isinstance(tokenizer, ByteTokenizer)
    about = {
        "tokenizer": "bytes" if is_bytes else "",
        "files": [] if is_bytes else [resolve(data) / "tokenizer.json"],
        "eos": [tokenizer.eot],
        "vocab": tokenizer.vocab_size,
    }
    text = calibrate_on(calibration or data, tokens, spec.model, tokenizer, spec.data.seq)
    with activity() as doing:
        doing(loading(source, step), 0, 0)
        return load_trained(source, step).model, text, about


def calibrate_on(place: str, tokens: int, spec: ModelSpec, tokenizer: Tokenizer | None, seq: int = 1024) -> Calibration:
    """From a text file, or from the held-out part of prepared data."""
    from ..data import TokenData, resolve
    from ..engine.quantization.quantize import Calibration

    path = Path(place)
    if not path.exists() and path.suffix:
        raise NoSuchData(f"--calibration {place}: there is no such text, and no such folder of prepared data")
    if path.is_file():
        if tokenizer is None:
            raise SpecError("a text needs a tokenizer, and the model has none beside it; give prepared data instead")
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{path}: cannot be read as text ({error})") from None
        # A token is rarely longer than 16 bytes: no need to encode a whole library for its first pages.
        ids: Any = tokenizer.encode(text[: 16 * tokens])[:tokens]
    else:
        held_out = TokenData.open(resolve(place), "val")
        ids = held_out.read(0, min(tokens, len(held_out))).astype("int64")
    return Calibration.of(ids, min(seq, spec.context, max(1, tokens // 8)), spec.vocab, str(place))


def print_quantized(report: Report, out: Path) -> None:
    worst = report.worst(SHOWN)
    rows = [(layer.name, f"{layer.error:.2%}", f"{layer.rounded_error:.2%}") for layer in worst]
    print_table("Layers whose output is furthest off", ["layer", "off by", "plain rounding"], rows)
    result = report.to_dict()
    typer.echo(
        f"{report.scheme}: perplexity {result['perplexity_before']:.4f} → {result['perplexity_after']:.4f} "
        f"({report.increase:+.2%}, allowed {report.limit:.1%}); weights {report.bytes_before / 1e6:,.1f} MB in half "
        f"precision → {report.bytes_after / 1e6:,.1f} MB in {out}"
    )
