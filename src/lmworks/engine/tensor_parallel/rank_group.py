"""A tensor-parallel engine inside of a process group that exists already: that of a trainer.

Groups of `tp` consecutive ranks are one engine each. All ranks of a group call `together`: the first leads, it has the
engine's loop over the requests of the whole group, and the others follow its steps until it ends.

    leader      gather requests ─▶ schedule ─▶ send step ─▶ layers ◀─ all-reduce ─▶ sample ─▶ …  end ─▶ scatter answers
    followers          └──────────────────────▶ receive ──▶ layers ◀──────┘            …  receive end ◀──┘

Steps and requests travel over gloo, activations over the backend of the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from ...parallel.mesh import Mesh
from ...parallel.world import RankError, as_rank_error, remote_error
from ...spec import Grid, LMWorksError
from ..core.model_runner import ModelRunner
from .tp_rank import TensorParallelRank
from .tp_worker import run_step

Share = TypeVar("Share")
Found = TypeVar("Found")
CPU = torch.device("cpu")


class End(NamedTuple):
    """The leader has finished, or failed: the followers raise its error."""

    results: list[Any]  # of each rank
    error: RankError | None = None


class GroupRank(TensorParallelRank):
    """This process as one of `tp` consecutive ranks. Made once by every rank of the process group."""

    called_on_all_ranks = True

    def __init__(self, tp: int, device: torch.device, mesh: Mesh | None = None) -> None:
        """`mesh`: the trainer's, whose tensor-parallel groups are used where they have as many ranks."""
        if mesh is None or mesh.size("tp") != tp:
            mesh = Mesh(Grid(dp_replicate=dist.get_world_size() // tp, tp=tp), device.type)
        super().__init__(mesh, device)

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def send_to_workers(self, message: Any) -> None:
        dist.broadcast_object_list([message], self.root, self.group, CPU)

    def receive(self) -> Any:
        message = [None]
        dist.broadcast_object_list(message, self.root, self.group, CPU)
        return message[0]

    def together(self, runner: ModelRunner, share: Share, lead: Callable[[list[Share]], list[Found]]) -> Found:
        """Call `lead` with the shares of all ranks on the leader; every rank returns its own of the results."""
        shares: list[Any] | None = [None] * self.tp if self.leads else None
        dist.gather_object(share, shares, self.root, self.group)
        if shares is None:
            return self.follow(runner)
        try:
            results = lead(shares)
        except LMWorksError as error:  # between two steps; in one, followers wait in a collective, and lose this rank
            self.send_to_workers(End([], as_rank_error(error, dist.get_rank())))
            raise
        self.send_to_workers(End(results))
        return results[0]

    @torch.no_grad()
    def follow(self, runner: ModelRunner) -> Any:
        """Run the leader's steps until its end."""
        while not isinstance(message := self.receive(), End):
            run_step(runner, message)
        if message.error is not None:
            error = remote_error(message.error)
            error.reported = error.rank_lost = True  # other groups do not raise it: the leader reports
            raise error
        return message.results[self.rank]
