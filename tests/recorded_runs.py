"""Small runs with known figures, written as a trainer writes them."""

import pytest

from lmworks.record import MetricsWriter, RunFolder
from lmworks.spec import RunSpec


@pytest.fixture
def make_run(tmp_path):
    def make(name="first", steps=4, total=4, end="finish", path=None, **spec):
        loaded = RunSpec.from_dict(
            {"name": name, "model": {"preset": "tiny"}, "optim": {"steps": total, "warmup": 0}, **spec}
        )
        folder = RunFolder.create(path or tmp_path / "runs" / name, loaded)
        folder.event("start", 0, attempt=0)
        with MetricsWriter(folder.metrics_path, 0) as metrics:
            for step in range(1, steps + 1):
                metrics.write(step, line(step))
        if end:
            folder.event(end, steps)
        return folder

    return make


def line(step):
    """Step n: loss 8/n, n × 100 tokens/s, n/10 s, and a validation loss on even steps that is best at step 2."""
    values = {
        "loss": 8 / step,
        "lr": 1e-3 * step,
        "grad_norm": 1.0,
        "tokens": 1024,
        "tokens_per_s": 100.0 * step,
        "step_s": step / 10,
        "data_s": step / 100,
        "forward_backward_s": step / 20,
        "optimizer_s": step / 50,
        "checkpoint_s": 0.0,
        "memory_bytes": 2**20 * step,
        "mfu": None,
    }
    if step % 2 == 0:
        values["val_loss"] = 3.0 + step / 4
    return values
