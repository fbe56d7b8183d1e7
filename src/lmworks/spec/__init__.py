"""Floor 0: what a run is, as validated data. Imports neither torch nor any other part of LMWorks."""

from .engine import EngineSpec
from .errors import CheckpointError, DataError, LMWorksError, SpecError, TrainingError
from .grid import Grid
from .hardware import Cluster, Gpu, catalogue, parse_cluster, recognise
from .load import dump_toml, load_run
from .model import ModelSpec, RopeScaling
from .presets import PRESETS
from .run import CheckpointSpec, DataSpec, LogSpec, OptimSpec, ParallelSpec, PrecisionSpec, RunSpec

__all__ = [
    "PRESETS",
    "CheckpointError",
    "CheckpointSpec",
    "Cluster",
    "DataError",
    "DataSpec",
    "EngineSpec",
    "Gpu",
    "Grid",
    "LMWorksError",
    "LogSpec",
    "ModelSpec",
    "OptimSpec",
    "ParallelSpec",
    "PrecisionSpec",
    "RopeScaling",
    "RunSpec",
    "SpecError",
    "TrainingError",
    "catalogue",
    "dump_toml",
    "load_run",
    "parse_cluster",
    "recognise",
]
