"""A run and its nodes: what all launchers share."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from ..spec import RunSpec, SpecError
from ..spec.errors import PREEMPTED


@dataclass(frozen=True)
class Job:
    """`spec.cluster` says where it runs: one torchrun agent a node, one rank an accelerator."""

    spec: RunSpec
    source: str  # the spec as the user named it
    overrides: tuple[str, ...]
    run_dir: str

    @classmethod
    def of(
        cls,
        spec: RunSpec,
        source: str,
        overrides: Sequence[str] = (),
        *,
        nodes: int | None = None,
        per_node: int | None = None,
        run_dir: str = "",
    ) -> Self:
        """Distributes the spec's ranks over nodes: those of the options, or else of `cluster`."""
        spec.data.check_path_given()
        nodes, per_node = nodes_and_ranks(spec, nodes, per_node)
        cluster = spec.cluster.replace(nodes=nodes, gpus_per_node=per_node)
        cluster_overrides = (
            (f"cluster.nodes={nodes}", f"cluster.gpus_per_node={per_node}") if cluster != spec.cluster else ()
        )
        return cls(
            spec.replace(cluster=cluster), source, (*overrides, *cluster_overrides), run_dir or f"runs/{spec.name}"
        )

    @property
    def nodes(self) -> int:
        return self.spec.cluster.nodes

    @property
    def per_node(self) -> int:
        return self.spec.cluster.gpus_per_node

    @property
    def on_gpus(self) -> bool:
        return self.spec.cluster.device != "cpu"

    @property
    def label(self) -> str:
        """The run's name as a DNS label (RFC 1035), which schedulers accept too."""
        plain = re.sub(r"[^a-z0-9]+", "-", self.spec.name.lower()).strip("-")
        return (plain if plain[:1].isalpha() else f"run-{plain}")[:40].rstrip("-")


def nodes_and_ranks(spec: RunSpec, nodes: int | None, per_node: int | None) -> tuple[int, int]:
    """(nodes, ranks on each); where an option gives one, the other follows from the number of ranks."""
    world = spec.ranks
    if nodes is None and per_node is None:
        given = (spec.cluster.nodes, spec.cluster.gpus_per_node)
        name = "cluster.nodes × cluster.gpus_per_node"
    else:
        given = (nodes or world // (per_node or 1), per_node or world // (nodes or 1))
        name = "--nodes × --gpus-per-node"
    if given[0] * given[1] != world:
        fitting = " | ".join(f"--nodes {world // n} --gpus-per-node {n}" for n in (8, 4, 2, 1) if world % n == 0)
        rollouts = " + align.rollout_ranks" if spec.align.rollout_ranks else ""
        raise SpecError(
            f"the layout has {world} ranks (pp × dp × cp × tp{rollouts}), but {name} = {given[0]} × {given[1]} = "
            f"{given[0] * given[1]}; these would fit: {fitting}"
        )
    return given


def trap_signal(signal: str, child: str) -> list[str]:
    """Bash: a trap that forwards a signal to the process `$child`, before that is started."""
    return ["stopped=0", f"{child}=", f"""trap 'stopped=1; [[ -z ${child} ]] || kill -TERM "${child}"' {signal}"""]


def wait_for_child(child: str) -> list[str]:
    """Bash: waits for the background process `$child`, and sets `status`.

    torchrun exits with 1 whatever happened. A run that was asked to stop and has not finished exits with 75.
    """
    return [
        f"{child}=$!",
        f'((stopped)) && kill -TERM "${child}" # the signal came while it was started',
        "while true; do",
        "  status=0",
        f'  wait "${child}" || status=$?',
        f'  kill -0 "${child}" 2>/dev/null || break # still there: it was the signal that ended `wait`',
        "done",
        f"((stopped && status)) && status={PREEMPTED}",
    ]


def check_no_spaces(option: str, value: str) -> str:
    if not value or any(c.isspace() for c in value):
        raise SpecError(f"{option} {value!r} must be one word without spaces")
    return value
