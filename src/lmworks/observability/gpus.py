"""GPUs of this machine, from NVIDIA's management library; nothing where it, or its Python package, is not there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from typing import Any

from prometheus_client.core import Metric

from .families import Labels, family


def gpu_metrics() -> Iterator[Metric]:
    readings = [reading for handle in devices() if (reading := read(handle))]
    if readings:
        for name in readings[0][1]:
            yield family(name, {labels: values[name] for labels, values in readings})


@cache
def devices() -> tuple[Any, ...]:
    """Handles of the GPUs that CUDA may use here."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no package, no driver, no GPU
        return ()
    count = pynvml.nvmlDeviceGetCount()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    wanted = [one.strip() for one in visible.split(",")] if visible else list(map(str, range(count)))
    return tuple(pynvml.nvmlDeviceGetHandleByIndex(int(one)) for one in wanted if one.isdigit() and int(one) < count)


def read(handle: Any) -> tuple[Labels, dict[str, float]] | None:
    """None: the driver does not answer for this one, as while it is reset."""
    import pynvml

    try:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        return (str(pynvml.nvmlDeviceGetIndex(handle)),), {
            "gpu_utilization_ratio": pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
            "gpu_power_watts": pynvml.nvmlDeviceGetPowerUsage(handle) / 1000,
            "gpu_memory_used_bytes": float(memory.used),
            "gpu_memory_total_bytes": float(memory.total),
        }
    except pynvml.NVMLError:
        return None
