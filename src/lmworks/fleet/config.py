"""FLEET.toml: models, the tenants that ask for them, and the accelerators to choose from."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from ..spec import SpecError
from ..spec.errors import did_you_mean
from ..spec.load import find_config

T = TypeVar("T")


@dataclass(frozen=True)
class FleetModel:
    name: str  # what clients ask for
    source: str  # a preset, a run folder or a Hugging Face folder
    gpus: list[str] = field(default_factory=list)  # accelerators to choose from; empty: the fleet's
    weights: list[str] = field(default_factory=lambda: ["bf16"])  # formats to choose from
    kv: str = "bf16"
    tp: int = 0  # tensor-parallel degree (0: the cheapest)
    mig: bool = False  # MIG slices too: planned only
    engine: str = "vllm"  # whose overheads the planner takes
    max_batch: int = 1024
    options: list[str] = field(default_factory=list)  # of `lmworks serve`; in `fleet up`, {name} is the server's
    servers: int = 1  # of `fleet up`
    path: str = ""  # where pods find the weights (by default /models/NAME)


@dataclass(frozen=True)
class Tenant:
    name: str
    model: str
    rate: float  # requests a second
    input: int
    output: int
    slo: str = ""


@dataclass(frozen=True)
class Fleet:
    name: str
    models: tuple[FleetModel, ...]
    tenants: tuple[Tenant, ...] = ()
    gpus: tuple[str, ...] = ("h100",)
    quantile: float = 0.95
    port: int = 8080  # of the gateway; the servers have the next ones
    restart_seconds: float = 30.0  # longest delay before `fleet up` starts a process again that keeps ending
    gateway: dict[str, Any] = field(default_factory=dict)  # sections of the gateway's file that `fleet up` adds

    def tenants_of(self, model: FleetModel) -> list[Tenant]:
        return [tenant for tenant in self.tenants if tenant.model == model.name]


def read_fleet(path: Path) -> Fleet:
    path = find_config(path, "fleet")
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise SpecError(f"{path} is not valid TOML: {error}") from None
    models = [table(FleetModel, one, f"{path}, [[models]]") for one in data.pop("models", [])]
    tenants = [table(Tenant, one, f"{path}, [[tenants]]") for one in data.pop("tenants", [])]
    gpus = {"gpus": tuple(data.pop("gpus"))} if "gpus" in data else {}
    fleet = table(Fleet, {**data, "models": tuple(models), "tenants": tuple(tenants), **gpus}, str(path))
    check(fleet, path)
    return fleet


def table(cls: type[T], data: Mapping[str, Any], where: str) -> T:
    fields = {one.name: one for one in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for key in data:
        if key not in fields:
            raise SpecError(f"{where}: {key!r} is unknown{did_you_mean(key, fields)}")
    needed = [
        name for name, one in fields.items()
        if one.default is dataclasses.MISSING and one.default_factory is dataclasses.MISSING
    ]  # fmt: skip
    if missing := [name for name in needed if name not in data]:
        raise SpecError(f"{where}: {', '.join(missing)} must be given")
    for key, value in data.items():
        kind = str(fields[key].type)
        right: Any = {"str": str, "int": int, "float": (int, float), "bool": bool, "list[str]": list,
                      "dict[str, Any]": dict}.get(kind)  # fmt: skip
        if right is not None and (not isinstance(value, right) or (isinstance(value, bool) and kind != "bool")):
            raise SpecError(f"{where}: {key} = {value!r} must be {kind}")
    return cls(**data)


def check(fleet: Fleet, path: Path) -> None:
    names = [model.name for model in fleet.models]
    if not names:
        raise SpecError(f"{path}: a fleet has at least one [[models]]")
    for kind, found in (("model", names), ("tenant", [tenant.name for tenant in fleet.tenants])):
        if twice := next((name for name in found if found.count(name) > 1), None):
            raise SpecError(f"{path}: two {kind}s are called {twice!r}")
    for tenant in fleet.tenants:
        if tenant.model not in names:
            raise SpecError(
                f"{path}: tenant {tenant.name!r} asks for {tenant.model!r}{did_you_mean(tenant.model, names)}"
            )
        if tenant.rate <= 0:
            raise SpecError(f"{path}: tenant {tenant.name!r} has rate = {tenant.rate:g}: requests a second, above 0")
    for model in fleet.models:
        if model.servers < 1:
            raise SpecError(f"{path}: model {model.name!r} has servers = {model.servers}: at least 1")
