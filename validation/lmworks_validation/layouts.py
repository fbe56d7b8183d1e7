"""Layouts that were published, among all that the search prices: `published/layouts.toml`.

A source states a part of a layout. Of all candidates that agree with that part and fit, the fastest stands for it: what
nobody stated is not held against it. Its rank is among all layouts that fit, of one closed form, as the search ranks.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from lmworks.plan.case import Case
from lmworks.plan.cluster_request import ClusterRequest
from lmworks.plan.flops import model_flops_per_token
from lmworks.plan.memory.sheet import budget
from lmworks.plan.search.candidates import NUMBERS, OFFLOAD_GIB, LayoutKind, SearchProblem, cases, problem_of
from lmworks.plan.search.request import read_request
from lmworks.plan.step.price import price
from lmworks.spec import LMWorksError

from .sources import PUBLISHED

NO_OFFLOAD = {"offload": "none", OFFLOAD_GIB: 0.0}
NEAR = 1.02  # layouts whose step is longer by less are taken for equal
# What is changed together; "degrees" leave as many data-parallel ranks as they do.
GROUPS = {
    "degrees": ("tp", "cp", "pp", "ep"),
    "ZeRO": ("zero", "dp_shard", "dp_replicate"),
    "schedule": ("schedule", "virtual"),
    "recompute": ("recompute",),
    "micro-batch": ("micro_batch",),
    "weights": ("weights",),
}


@dataclass(frozen=True)
class Configuration:
    name: str
    problems: tuple[SearchProblem, ...]  # with each format of the weights that the search tries
    published: Mapping[str, Any]  # the stated part of the layout
    measured: float | None  # tokens/s of a GPU
    note: str
    source: str

    @classmethod
    def of(cls, table: Mapping[str, Any]) -> Self:
        changes = list(table.get("changes", ()))
        if "dense_layers" in table:  # the first ones, among layers with experts
            kinds = ["dense"] * table["dense_layers"] + ["experts"] * (table["layers"] - table["dense_layers"])
            changes += [f"model.layers={table['layers']}", f"model.mlp_layers={json.dumps(kinds)}"]
        if "catalogue" in table:
            changes.append(f"cluster.catalogue={PUBLISHED / table['catalogue']}")
        request = read_request(
            table.get("model", "tiny"),
            changes,
            ClusterRequest(seq=table["seq"], global_batch=table["global_batch"]),
            {},
        )
        asked = problem_of(request.base, table["cluster"], own=request.cluster, pinned=NO_OFFLOAD)
        formats = tuple(replace(asked, kept=asked.kept.replace(weights=kept)) for kept in ("fp32", "bf16"))
        return cls(table["name"], formats, table["published"], measured(table, asked), table["note"], table["source"])

    @property
    def label(self) -> str:
        problem = self.problems[0]
        return f"{self.name}, {problem.world} × {problem.gpu.name.split('-')[0]}"


def measured(table: Mapping[str, Any], problem: SearchProblem) -> float | None:
    """Tokens/s of a GPU, from whatever the source prints."""
    if "step_s" in table:
        return float(problem.global_batch * problem.seq / table["step_s"] / problem.world)
    if "mfu" in table:
        return float(table["mfu"] * (problem.gpu.peak_flops("bf16") or 0)) / float(
            model_flops_per_token(problem.model, problem.seq)
        )
    return table.get("tokens_per_s_gpu")


def configurations(path: Path = PUBLISHED / "layouts.toml") -> list[Configuration]:
    return [Configuration.of(table) for table in tomllib.loads(path.read_text(encoding="utf-8"))["configuration"]]


@dataclass(frozen=True)
class Layout:
    """One candidate that fits."""

    case: Case
    words: LayoutKind
    weights: str
    step_s: float

    @property
    def tokens_per_s_gpu(self) -> float:
        return float(self.case.tokens_per_step) / self.step_s / float(self.case.world)

    @property
    def keys(self) -> dict[str, Any]:
        return {name: int(getattr(self.case, name)) for name in NUMBERS} | vars(self.words) | {"weights": self.weights}


@dataclass(frozen=True)
class Priced:
    """All candidates that fit, fastest first."""

    cases: Sequence[tuple[SearchProblem, LayoutKind, Case]]
    where: NDArray[Any]  # of each candidate: its case, and its row there
    columns: Mapping[str, NDArray[Any]]
    seconds: NDArray[Any]

    @classmethod
    def of(cls, problems: Iterable[SearchProblem]) -> Self:
        kept: list[tuple[SearchProblem, LayoutKind, Case]] = []
        parts: list[dict[str, NDArray[Any]]] = []
        for problem in problems:
            for words, case in cases(problem):
                fits = np.asarray(budget(case).reserved) <= problem.safe_bytes
                if not fits.any():
                    continue
                case = case.take(fits)
                columns = {name: getattr(case, name) for name in NUMBERS}
                told = {**vars(words), "weights": problem.precision.weights}
                columns |= {name: np.full(fits.sum(), value) for name, value in told.items()}
                columns |= {"case": np.full(fits.sum(), len(kept)), "row": np.arange(fits.sum())}
                parts.append({**columns, "seconds": np.asarray(price(case).seconds)})
                kept.append((problem, words, case))
        if not parts:
            raise LMWorksError("no layout fits")
        every = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        order = np.argsort(every["seconds"], kind="stable")
        every = {name: column[order] for name, column in every.items()}
        where = np.stack([every.pop("case"), every.pop("row")], axis=1)
        seconds = every.pop("seconds")
        return cls(kept, where, every, seconds)

    def __getitem__(self, place: int) -> Layout:
        index, row = self.where[place]
        problem, words, case = self.cases[index]
        return Layout(case.take(row), words, problem.precision.weights, float(self.seconds[place]))

    def agreeing(self, stated: Mapping[str, Any]) -> NDArray[np.intp]:
        """Places of the candidates with these keys, the fastest first."""
        found = np.ones(len(self.seconds), dtype=bool)
        for name, value in stated.items():
            found &= self.columns[name] == value
        return np.flatnonzero(found)

    def distinct(self, names: Iterable[str], places: int | None = None) -> list[int]:
        """The fastest candidate of each combination of these keys, among the first `places`."""
        keys = zip(*(self.columns[name][:places].tolist() for name in names), strict=True)
        first: dict[tuple[Any, ...], int] = {}
        for place, key in enumerate(keys):
            first.setdefault(key, place)
        return list(first.values())


def least_bytes(configuration: Configuration) -> float:
    """Bytes that the published layout reserves at least; infinite where no layout that agrees with it is legal."""
    pinned = {**NO_OFFLOAD, **configuration.published}
    asked = [replace(problem, pinned=pinned) for problem in configuration.problems]
    return min((float(np.min(budget(case).reserved)) for one in asked for _, case in cases(one)), default=np.inf)


@dataclass(frozen=True)
class Ranked:
    priced: Priced
    place: int  # of the candidate that stands for the published layout
    recomputes: bool = False  # it fits only with another recompute policy than the published one

    @classmethod
    def of(cls, priced: Priced, published: Mapping[str, Any]) -> Self:
        places = priced.agreeing(published)
        if len(places):
            return cls(priced, int(places[0]))
        places = priced.agreeing({name: value for name, value in published.items() if name != "recompute"})
        if not len(places):
            raise LMWorksError(f"no candidate with {published} is legal and fits, whatever it computes again")
        return cls(priced, int(places[0]), recomputes=True)

    @property
    def published(self) -> Layout:
        return self.priced[self.place]

    @property
    def best(self) -> Layout:
        return self.priced[0]

    @property
    def rank(self) -> int:
        """Among layouts; two formats of the weights are one layout."""
        names = [name for group, each in GROUPS.items() if group != "weights" for name in each]
        return 1 + len(self.priced.distinct(names, self.place))

    @property
    def rank_of_degrees(self) -> int:
        """Among combinations of tp, cp, pp and ep, each with its best layout."""
        best = self.priced.distinct(GROUPS["degrees"])
        own = self.priced.agreeing({name: self.published.keys[name] for name in GROUPS["degrees"]})[0]
        return 1 + int(sum(place < own for place in best))

    @property
    def best_degrees(self) -> list[Layout]:
        """The best layout of each of the five best combinations of degrees."""
        return [self.priced[place] for place in sorted(self.priced.distinct(GROUPS["degrees"]))[:5]]

    @property
    def near(self) -> int:
        """Candidates, the best of them all included, whose step is at most 2 % longer than the best."""
        return int(np.searchsorted(self.priced.seconds, NEAR * self.priced.seconds[0], side="right"))

    @property
    def behind(self) -> float:
        """By how much its step is longer than that of the best."""
        return self.published.step_s / self.best.step_s - 1

    @property
    def inside_interval(self) -> bool:
        """Whether the best one's 90 % interval includes it."""
        return self.published.step_s <= float(price(self.best.case).interval[1])

    def single_changes(self) -> dict[str, Layout]:
        """By group of keys in which the best differs: the fastest candidate that differs in this group alone."""
        own, best, found = self.published.keys, self.best.keys, {}
        for group, names in GROUPS.items():
            if all(own[name] == best[name] for name in names):
                continue
            free = {*names, "dp_shard", "dp_replicate"} if group == "degrees" else {*names}
            places = self.priced.agreeing({name: value for name, value in own.items() if name not in free})
            other = [place for place in places if any(self.priced.columns[name][place] != own[name] for name in names)]
            if other:
                found[group] = self.priced[other[0]]
        return found
