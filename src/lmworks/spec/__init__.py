"""What a run is, as validated data. Imports neither torch nor any other part of LMWorks.

Names are loaded when they are used: who needs the errors alone does not wait for all sections of a spec.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .align import AlignSpec as AlignSpec
    from .errors import CheckpointError as CheckpointError
    from .errors import DataError as DataError
    from .errors import LMWorksError as LMWorksError
    from .errors import SpecError as SpecError
    from .errors import TrainingError as TrainingError
    from .fault_tolerance import CheckpointSpec as CheckpointSpec
    from .fault_tolerance import FaultSpec as FaultSpec
    from .fault_tolerance import HealthSpec as HealthSpec
    from .fault_tolerance import WatchSpec as WatchSpec
    from .grid import Grid as Grid
    from .hardware import Cluster as Cluster
    from .hardware import Gpu as Gpu
    from .hardware import catalogue as catalogue
    from .hardware import parse_cluster as parse_cluster
    from .hardware import recognise as recognise
    from .load import dump_toml as dump_toml
    from .load import load_run as load_run
    from .lora import LoraSpec as LoraSpec
    from .model import ModelSpec as ModelSpec
    from .model import RopeScaling as RopeScaling
    from .precision import PrecisionSpec as PrecisionSpec
    from .presets import PRESETS as PRESETS
    from .run import DataSpec as DataSpec
    from .run import LogSpec as LogSpec
    from .run import OptimSpec as OptimSpec
    from .run import ParallelSpec as ParallelSpec
    from .run import RunSpec as RunSpec
    from .serving import EngineSpec as EngineSpec

EXPORTS = {
    "AlignSpec": "align",
    "CheckpointError": "errors",
    "CheckpointSpec": "fault_tolerance",
    "Cluster": "hardware",
    "DataError": "errors",
    "DataSpec": "run",
    "EngineSpec": "serving",
    "FaultSpec": "fault_tolerance",
    "Gpu": "hardware",
    "Grid": "grid",
    "HealthSpec": "fault_tolerance",
    "LMWorksError": "errors",
    "LogSpec": "run",
    "LoraSpec": "lora",
    "ModelSpec": "model",
    "OptimSpec": "run",
    "PRESETS": "presets",
    "ParallelSpec": "run",
    "PrecisionSpec": "precision",
    "RopeScaling": "model",
    "RunSpec": "run",
    "SpecError": "errors",
    "TrainingError": "errors",
    "WatchSpec": "fault_tolerance",
    "catalogue": "hardware",
    "dump_toml": "load",
    "load_run": "load",
    "parse_cluster": "hardware",
    "recognise": "hardware",
}


def __getattr__(name: str) -> Any:
    if name in EXPORTS:
        return getattr(importlib.import_module(f"{__name__}.{EXPORTS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
