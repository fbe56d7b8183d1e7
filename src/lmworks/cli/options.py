"""Options that describe a run on a cluster, beside a spec's own keys, and shell completion: presets, accelerators and
clusters, keys of a spec and their values.

`lmworks --install-completion` sets it up. Nothing here loads torch: a shell asks at every keystroke.
"""

from __future__ import annotations

import dataclasses
import re
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..spec.dial import dial_overrides
from ..spec.errors import SpecError
from ..spec.hardware import catalogue, spelling
from ..spec.presets import PRESETS
from ..spec.run import RunSpec
from ..spec.serving import EngineSpec
from ..spec.units import BYTES

if TYPE_CHECKING:
    from ..plan.memory.host_need import HostNeed

Keys = Mapping[str, "dataclasses.Field[Any]"]
Completions = list[tuple[str, str]]  # value, description


def sources(incomplete: str) -> Completions:
    """Presets, and files beside them. Where no preset fits, nothing: then shells complete paths, and do it better."""
    presets = [(name, "preset") for name in PRESETS if name.startswith(incomplete)]
    return [*presets, *((path, "") for path in paths(incomplete))] if presets else []


def paths(incomplete: str) -> list[str]:
    """Folders and TOML files here. A preset has no slash in its name, so neither has what is beside it."""
    here = sorted(path for path in Path().iterdir() if path.name.startswith(incomplete or path.name.lstrip(".")))
    return [f"{path.name}/" if path.is_dir() else path.name for path in here if path.is_dir() or path.suffix == ".toml"]


def gpus(incomplete: str) -> Completions:
    """Accelerators by their shortest name."""
    shortest = {(gpu.alias or spelling(name)).split()[0]: name for name, gpu in catalogue().items()}
    return [(short, name) for short, name in shortest.items() if short.startswith(incomplete.lower())]


def clusters(incomplete: str) -> Completions:
    """COUNTxGPU: the counts as they were typed, and what fits after them."""
    counts, typed = re.fullmatch(r"((?:[0-9]+x)*)(.*)", incomplete, re.DOTALL).groups()  # type: ignore[union-attr]
    if typed.isdecimal():
        counts, typed = f"{incomplete}x", ""
    return [(f"{counts}{short}", name) for short, name in gpus(typed)]


def overrides(ctx: typer.Context, incomplete: str) -> Completions:
    return keys_or_values(RunSpec.dotted_keys(), ctx.params.get("overrides") or (), incomplete)


def engine_overrides(ctx: typer.Context, incomplete: str) -> Completions:
    return keys_or_values(EngineSpec.dotted_keys(), ctx.params.get("overrides") or (), incomplete)


def models_and_engine(incomplete: str) -> Completions:
    """What `serve` takes: models, then changes to the engine."""
    return [*sources(incomplete), *keys_or_values(EngineSpec.dotted_keys(), (), incomplete)]


def keys_or_values(keys: Keys, before: list[str] | tuple[str, ...], incomplete: str) -> Completions:
    """`opt` → `optim.…=`, and `optim.schedule=` → its values. bash has an equals sign as a word of its own."""
    if len(before) >= 2 and before[-1] == "=":
        return [(value, "") for value in values(before[-2], keys) if value.startswith(incomplete)]
    key, equals, typed = incomplete.partition("=")
    if equals:
        return [(f"{key}={value}", "") for value in values(key, keys) if value.startswith(typed)]
    found = [key for key in keys if key.startswith(incomplete)]
    sections = list(dict.fromkeys(key.partition(".")[0] for key in found))
    if "." not in incomplete and len(sections) > 1:  # first which section: all keys at once would fill a screen
        return [(f"{name}=", describe(keys[name])) if name in keys else (f"{name}.", "section") for name in sections]
    return [(f"{key}=", describe(keys[key])) for key in found]


def values(key: str, keys: Keys) -> Iterator[str]:
    field = keys.get(key)
    if key == "model.preset":
        yield from PRESETS
    elif key == "cluster.gpu":
        yield from (short for short, _ in gpus(""))
    elif field is not None:
        yield from field.metadata["choices"] or (("true", "false") if field.type == "bool" else ())


def describe(field: dataclasses.Field[Any]) -> str:
    """With the default. On one line of a terminal: what is longer is broken on its way to the shell."""
    default = "" if field.default in (dataclasses.MISSING, "") else f" ({field.default})"
    return textwrap.shorten(f"{field.metadata['doc']}{default}", 76, placeholder=" …")


# --- options ---------------------------------------------------------------------------------------------


Spec = Annotated[
    str,
    typer.Argument(
        metavar="SPEC",
        help="A TOML file, a run folder, or the name of a model preset.",
        autocompletion=sources,
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[SECTION.KEY=VALUE]...",
        help="Changes to the spec, e.g. optim.lr=3e-4.",
        autocompletion=overrides,
    ),
]
OnCluster = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        help="What it runs on, e.g. 256xh100 or 2x8xa100 (by default the spec's).",
        autocompletion=clusters,
    ),
]
OnDevice = Annotated[
    str, typer.Option("--device", metavar="auto|cpu|cuda", help="Where to run (by default as cluster.device says).")
]
Dial = Annotated[
    str,
    typer.Option(
        "--dial", metavar="depth=N", help="Shape, batch, steps, learning rate and decay by rule from the depth."
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Start even what does not fit into the memory of this machine.")]
Seq = Annotated[int | None, typer.Option("--seq", min=1, help="Tokens of a sequence (data.seq).")]
MicroBatch = Annotated[int | None, typer.Option("--micro-batch", min=1, help="Sequences a rank runs at once.")]
GlobalBatch = Annotated[int | None, typer.Option("--global-batch", min=1, help="Sequences of a step.")]
Dtype = Annotated[str | None, typer.Option("--dtype", help="Precision of products: bf16, fp16, fp32 or fp8.")]
UNKNOWN = "what a machine has is not in the catalogue, and a run is refused where there is no room"


def print_host_memory(each: float, whole: float, ranks: int, parts: HostNeed | None, there: int | None = None) -> None:
    """Prints the host memory of a rank and of its machine, by use; nothing where there is none."""
    if not whole:
        return
    known = f"{there / 2**30:.1f} GiB are free here" if there is not None else UNKNOWN
    besides = f", {whole / 2**30:.1f} GiB for the {ranks} of a machine" if ranks > 1 else ""
    typer.echo(f"host memory: {each / 2**30:.1f} GiB a rank{besides}; {known}")
    if parts:
        found = [f"{name} {size / 2**30:.1f} GiB" for name, size in parts.to_dict().items() if size]
        typer.echo(f"of a machine: {', '.join(found)}")


def device_options(device: str, force: bool) -> list[str]:
    """--device and --force, for the ranks that are started."""
    return [*(["--device", device] if device else []), *(["--force"] if force else [])]


def on_device(device: str) -> list[str]:
    """--device, as a change to the spec."""
    return [f"cluster.device={device}"] if device else []


def parse_bytes(text: str, option: str) -> int:
    """5GB as `transformers` reads it, 5 × 10⁹; 5G as nccl-tests does and 5GiB are powers of 1024."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Z]*)", text.strip().upper())
    size = float(match[1]) * BYTES[match[2]] if match and match[2] in BYTES else 0
    if size < 1:
        raise SpecError(f"{option} {text!r} is not a size; write it like 5GB, 500MB or 2GiB")
    return int(size)


def with_dial(spec: str, overrides: list[str] | None, dial: str) -> list[str]:
    """Overrides with the keys that --dial stands for, which are printed, in front of them."""
    given = overrides or []
    expanded = dial_overrides(spec, given, dial)
    if dial:
        typer.echo(f"--dial {dial}: {' '.join(expanded[: len(expanded) - len(given)])}", err=True)
    return expanded
