"""Specs as files: TOML in (with `extends` and dotted overrides), TOML out."""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from . import components
from .errors import SpecError, did_you_mean, suggestion
from .files import read_json_object
from .hf_config import spec_of_config
from .lora import LoraSpec
from .model import MUP_KEYS, ModelSpec
from .presets import PRESETS
from .run import RunSpec
from .schema import merge

EXAMPLES = Path(__file__).parents[1] / "configs"  # a link to configs/ in a clone, a copy of it in a wheel


def load_run(source: str | Path, overrides: Iterable[str] = ()) -> RunSpec:
    """Read a spec: a TOML file, a run folder (its spec.toml), a Hugging Face folder, a model preset by name, or an
    example (configs/…)."""
    data = with_initial_shape(apply_overrides(read_source(source), overrides))
    data.setdefault("name", Path(source).stem if str(source) not in PRESETS else str(source))
    return RunSpec.from_dict(data)


def read_source(source: str | Path) -> dict[str, Any]:
    path = Path(source)
    try:
        if is_hf_folder(path):
            return {"checkpoint": {"init": str(source)}}
        if path.is_dir():
            path = path / "spec.toml"
        if path.is_file():
            return read_toml(path)
    except OSError as error:  # a name too long, a folder above that may not be entered
        raise SpecError(f"cannot read {source}: {error.strerror}") from None
    if str(source) in PRESETS:
        return {"model": {"preset": str(source)}}
    if example := find_example(path):
        return read_toml(example)
    if path.suffix == ".toml" or path.parent != Path("."):
        raise SpecError(f"no spec at {path}: the file does not exist{suggestion(near_examples(path))}")
    raise SpecError(f"'{source}' is neither a file nor a model preset{did_you_mean(str(source), PRESETS)}")


def find_example(path: Path) -> Path | None:
    """An example by its name (configs/…), where there is no such file."""
    found = EXAMPLES.parent / path
    return found if path.parts[:1] == ("configs",) and ".." not in path.parts and found.is_file() else None


def find_config(path: Path, what: str) -> Path:
    """A file as it is named, else an example (configs/…). `what` is in it, for the error."""
    found = path if path.exists() else find_example(path)
    if found is None:
        raise SpecError(f"no {what} at {path}: the file does not exist{suggestion(near_examples(path))}")
    return found


def is_hf_folder(path: Path) -> bool:
    return (path / "config.json").is_file() and not (path / "spec.toml").exists()


def with_initial_shape(data: dict[str, Any]) -> dict[str, Any]:
    """Without keys of the shape, a model has that of checkpoint.init; keys that are given change it."""
    init = data.get("checkpoint", {}).get("init", "")
    model = data.get("model", {})
    if not init or not isinstance(init, str) or set(model) - SHAPE_FREE:
        return data
    return {**data, "model": merge(shape_of(Path(init)), model)}


# Keys of a model that say how it is trained or computed: beside them the shape still follows from checkpoint.init.
SHAPE_FREE = {"attention", "scalar_head", "context", "balance_loss", "balance_bias", "capacity", "init_std", *MUP_KEYS}


def shape_of(folder: Path, key: str = "checkpoint.init") -> dict[str, Any]:
    """The model of a Hugging Face or run folder, which `key` names."""
    if (folder / "spec.toml").is_file():
        shape = RunSpec.from_dict(read_toml(folder / "spec.toml")).model.to_dict()
        return shape | {"scalar_head": False}
    path = folder / "config.json"
    if not path.exists():
        raise SpecError(f"{key} = {str(folder)!r}: {no_model(folder)}")
    config = read_json_object(path, SpecError)
    try:
        return spec_of_config(config).to_dict()
    except SpecError as error:
        raise SpecError(f"{path}: {error}") from None


def no_model(folder: Path) -> str:
    """Why a folder is none that a model can be read from."""
    if not folder.is_dir():
        return "there is no such folder; name a Hugging Face folder or a run"
    if (folder / "adapter_config.json").is_file():
        return f"an adapter; `lmworks checkpoint merge BASE {folder} OUT` makes a model of it and its base"
    return "neither a run (spec.toml) nor a Hugging Face folder (config.json)"


def adapter_options(folder: Path, model: ModelSpec) -> LoraSpec | None:
    """Of a run that trains an adapter, or of a folder in PEFT's format; None: the folder is no adapter.

    PEFT's names of layers are those of the Llama layout; where others stand, every layer is taken to have an adapter.
    """
    if (folder / "spec.toml").is_file():
        lora = RunSpec.from_dict(read_toml(folder / "spec.toml")).lora
        return lora if lora.rank else None
    path = folder / "adapter_config.json"
    if not path.is_file():
        return None
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        rank, alpha = int(config["r"]), float(config["lora_alpha"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SpecError(f"{path}: cannot be read as the options of an adapter ({error!r})") from None
    named = config.get("target_modules")
    ends = tuple(f".{end}" for end in named) if isinstance(named, list) else ()
    targets = [linear.name for linear in components.linears(model) if f".{linear.hf}".endswith(ends)]
    rslora, dora = bool(config.get("use_rslora")), bool(config.get("use_dora"))
    return LoraSpec(rank=rank, alpha=alpha, targets=targets if ends else [], rslora=rslora, dora=dora)


def near_examples(path: Path) -> list[str]:
    """Examples with that file name, or else with almost that path."""
    examples = sorted(EXAMPLES.rglob("*.toml"))
    paths = {str(example.relative_to(EXAMPLES.parent)): example.name for example in examples}
    same_name = [found for found, name in paths.items() if name == path.name]
    return same_name[:3] or difflib.get_close_matches(str(path), paths, n=1, cutoff=0.8)


def read_toml(path: Path, seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    """One file, laid over the files that it extends (paths relative to itself)."""
    path = path.resolve()
    if path in seen:
        chain = " → ".join(p.name for p in (*seen, path))
        raise SpecError(f"{path}: 'extends' goes in a circle: {chain}")
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        origin = f" (extended by {seen[-1]})" if seen else ""
        raise SpecError(f"no spec at {path}: the file does not exist{origin}") from None
    except ValueError as error:  # TOML's, or of text that is not UTF-8
        raise SpecError(f"{path} is not valid TOML: {error}") from None
    except OSError as error:
        raise SpecError(f"cannot read {path}: {error.strerror}") from None
    extends = data.pop("extends", [])
    bases = [extends] if isinstance(extends, str) else extends
    if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
        raise SpecError(f"{path}: 'extends' must be a file name or a list of them, got {extends!r}")
    merged: dict[str, Any] = {}
    for base in bases:
        merged = merge(merged, read_toml(path.parent / base, (*seen, path)))
    return merge(merged, data)


def apply_overrides(data: dict[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    for override in overrides:
        key, equals, text = override.partition("=")
        key = key.strip()
        if not equals or not key or key.startswith("-"):
            raise SpecError(f"'{override}' is not an override; write section.key=value, e.g. optim.lr=3e-4")
        value: Any = parse_value(text.strip())
        for part in reversed(key.split(".")):
            value = {part: value}
        data = merge(data, value)
    return data


def parse_value(text: str) -> Any:
    """A TOML value where it is one (3e-4, true, [1, 2], "x"), else the bare word as a string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except ValueError:
        return text


def dump_toml(data: Mapping[str, Any], prefix: str = "") -> str:
    """Plain values first, then tables; the inverse of reading for everything a spec can hold."""
    lines = [f"{toml_key(k)} = {toml_value(v)}" for k, v in data.items() if not isinstance(v, Mapping)]
    for key, table in data.items():
        if isinstance(table, Mapping):
            path = f"{prefix}.{toml_key(key)}" if prefix else toml_key(key)
            lines += ["", f"[{path}]", dump_toml(table, path).rstrip("\n")]
    return "\n".join(lines) + "\n"


def toml_key(key: str) -> str:
    return key if key.replace("_", "a").replace("-", "a").isalnum() and key.isascii() else toml_value(key)


def toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        plain = value.replace("\\", "\\\\").replace('"', '\\"')
        return '"' + "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in plain) + '"'
    if isinstance(value, list | tuple):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{toml_key(key)} = {toml_value(item)}" for key, item in value.items()) + "}"
    raise TypeError(f"a spec cannot hold {value!r}")
