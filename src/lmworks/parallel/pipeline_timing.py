"""A step of a pipeline on real ranks, timed piece by piece."""

from __future__ import annotations

import torch

from ..data import Batch
from ..plan.pipelines.schedule import Span
from ..spec import RunSpec
from .initial_weights import source_of
from .mesh import Mesh
from .parallelize import parallelize
from .pipeline import SpanRecorder


def measure_step(spec: RunSpec, mesh: Mesh, device: torch.device) -> list[Span]:
    """What the ranks of this rank's pipeline did in one step on random tokens, after one that warms up."""
    parallel_model = parallelize(spec, mesh, device, source_of(spec))
    assert parallel_model.pipeline is not None, "only a layout with parallel.pp > 1 has stages to time"
    data, vocab = spec.data, spec.model.vocab
    rows = torch.randint(vocab, (spec.accumulation, data.micro_batch, data.seq + 1), device=device)
    batches = [Batch(row[:, :-1], row[:, 1:]) for row in rows]
    parallel_model.forward_backward(batches, scale=1.0)
    recorder = parallel_model.pipeline.recorder = SpanRecorder(mesh.rank("pp"), device)
    parallel_model.forward_backward(batches, scale=1.0)
    return recorder.gather(mesh.group("pp"))
