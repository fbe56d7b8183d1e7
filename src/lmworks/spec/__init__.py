"""What a run is, as validated data. Imports neither torch nor any other part of LMWorks."""

from .align import AlignSpec
from .errors import CheckpointError, DataError, LMWorksError, SpecError, TrainingError
from .fault_tolerance import CheckpointSpec, FaultSpec, HealthSpec, WatchSpec
from .grid import Grid
from .hardware import Cluster, Gpu, catalogue, parse_cluster, recognise
from .load import dump_toml, load_run
from .lora import LoraSpec
from .model import ModelSpec, RopeScaling
from .precision import PrecisionSpec
from .presets import PRESETS
from .run import DataSpec, LogSpec, OptimSpec, ParallelSpec, RunSpec
from .serving import EngineSpec

__all__ = [
    "PRESETS",
    "AlignSpec",
    "CheckpointError",
    "CheckpointSpec",
    "Cluster",
    "DataError",
    "DataSpec",
    "EngineSpec",
    "FaultSpec",
    "Gpu",
    "Grid",
    "HealthSpec",
    "LMWorksError",
    "LogSpec",
    "LoraSpec",
    "ModelSpec",
    "OptimSpec",
    "ParallelSpec",
    "PrecisionSpec",
    "RopeScaling",
    "RunSpec",
    "SpecError",
    "TrainingError",
    "WatchSpec",
    "catalogue",
    "dump_toml",
    "load_run",
    "parse_cluster",
    "recognise",
]
