"""A Ray Train driver: a script that starts our trainer in each worker of a Ray cluster."""

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


def ray_driver(job: Job, storage: str) -> str:
    """`storage` is where Ray keeps its own records; the run folder is `job.run_dir`."""
    if not job.run_dir.startswith("/"):
        raise SpecError(f"--run-dir {job.run_dir!r} must be absolute: Ray's workers start in folders of their own")
    spec = dump_toml(job.spec.to_dict()).replace("\\", "\\\\").replace('"""', '\\"\\"\\"')
    return DRIVER.format(
        label=job.label,
        world=job.spec.parallel.world,
        run_dir=job.run_dir,
        spec=spec,
        storage=storage,
        on_gpus=job.on_gpus,
        backend="cpu:gloo,cuda:nccl" if job.on_gpus else "gloo",
        resources={"CPU": 1, "GPU": 1} if job.on_gpus else {"CPU": 1},
    )
