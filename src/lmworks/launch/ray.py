"""A Ray driver: a script that starts our trainer in workers of a Ray cluster.

Ray Train makes one process group of all workers. Rollout ranks need one of their own, so with align.rollout_ranks the
driver places actors itself, and the ranks meet as under torchrun.
"""

from __future__ import annotations

from ..spec import SpecError, dump_toml
from .job import Job

DRIVER = '''\
"""Run {label} on {world} Ray workers. Start it where Ray runs: python THIS-FILE, or ray job submit -- python THIS-FILE

Every node needs LMWorks installed and sees the run folder and the data under the same path.
"""

import tomllib
from pathlib import Path

from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

RUN = {run_dir!r}
SPEC = """\\
{spec}"""


def work(config: dict) -> None:
    """One rank. Ray has set RANK, WORLD_SIZE and the rest, and made the process group."""
    from lmworks.align.post_trainer import trainer_class
    from lmworks.spec import RunSpec

    spec = RunSpec.from_dict(tomllib.loads(SPEC))
    kind = trainer_class(spec)
    (kind.resume(RUN) if config["resume"] else kind(spec, RUN)).run()


if __name__ == "__main__":
    trainer = TorchTrainer(
        work,
        # Decided once, here: a rank that checked itself might find what another has just made.
        train_loop_config={{"resume": (Path(RUN) / "spec.toml").exists()}},
        torch_config=TorchConfig(backend={backend!r}),
        scaling_config=ScalingConfig(
            num_workers={world},
            use_gpu={on_gpus},
            resources_per_worker={resources},
        ),
        run_config=RunConfig(name={label!r}, storage_path={storage!r}),
    )
    trainer.fit()
    print(f"done; its report: lmworks report {{RUN}}")
'''


ACTORS = '''\
"""Run {label} on {trainers} trainer and {rollouts} rollout actors of Ray. Start it where Ray runs: python THIS-FILE, or
ray job submit -- python THIS-FILE

Every node needs LMWorks installed and sees the run folder and the data under the same path.
"""

import os
import socket
import tomllib
from pathlib import Path

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

RUN = {run_dir!r}
SPEC = """\\
{spec}"""
RANKS = {world}  # those that train come first
RESOURCES = {resources}


@ray.remote(num_cpus=RESOURCES["CPU"], num_gpus=RESOURCES.get("GPU", 0))
class Rank:
    def address(self) -> tuple[str, int]:
        """Where rank 0 will host the store at which all ranks meet."""
        with socket.socket() as server:
            server.bind(("", 0))
            return ray.util.get_node_ip_address(), server.getsockname()[1]

    def run(self, rank: int, host: str, port: int, resume: bool) -> None:
        place = {{"RANK": rank, "WORLD_SIZE": RANKS, "MASTER_ADDR": host, "MASTER_PORT": port}}
        place |= {{"LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}}  # Ray shows an actor its own GPU alone
        os.environ.update({{key: str(value) for key, value in place.items()}})
        from lmworks.align.post_trainer import trainer_class
        from lmworks.parallel.world import distributed_shutdown
        from lmworks.spec import RunSpec

        spec = RunSpec.from_dict(tomllib.loads(SPEC))
        kind = trainer_class(spec)
        with distributed_shutdown():
            (kind.resume(RUN) if resume else kind(spec, RUN)).run()


if __name__ == "__main__":
    ray.init(ignore_reinit_error=True)
    print(f"waiting for {{RANKS}} × {{RESOURCES}}", flush=True)
    group = placement_group([RESOURCES] * RANKS, strategy="PACK")
    ray.get(group.ready())
    strategies = [PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank) for rank in range(RANKS)]
    actors = [Rank.options(scheduling_strategy=strategy).remote() for strategy in strategies]
    host, port = ray.get(actors[0].address.remote())
    resume = (Path(RUN) / "spec.toml").exists()  # decided once: a rank might find what another has just made
    running = [actor.run.remote(rank, host, port, resume) for rank, actor in enumerate(actors)]
    try:
        while running:
            ended, running = ray.wait(running)
            ray.get(ended)  # raises the error of a rank
    finally:
        for actor in actors:
            ray.kill(actor)
    print(f"done; its report: lmworks report {{RUN}}")
'''


def ray_driver(job: Job, storage: str) -> str:
    """`storage` is where Ray keeps its own records; the run folder is `job.run_dir`."""
    if not job.run_dir.startswith("/"):
        raise SpecError(f"--run-dir {job.run_dir!r} must be absolute: Ray's workers start in folders of their own")
    spec = dump_toml(job.spec.to_dict()).replace("\\", "\\\\").replace('"""', '\\"\\"\\"')
    resources = {"CPU": 1, "GPU": 1} if job.on_gpus else {"CPU": 1}
    if job.spec.align.rollout_ranks:
        return ACTORS.format(
            label=job.label,
            trainers=job.spec.parallel.world,
            rollouts=job.spec.align.rollout_ranks,
            world=job.spec.ranks,
            run_dir=job.run_dir,
            spec=spec,
            resources=resources,
        )
    return DRIVER.format(
        label=job.label,
        world=job.spec.parallel.world,
        run_dir=job.run_dir,
        spec=spec,
        storage=storage,
        on_gpus=job.on_gpus,
        backend="cpu:gloo,cuda:nccl" if job.on_gpus else "gloo",
        resources=resources,
    )
