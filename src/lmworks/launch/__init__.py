"""What a cluster needs to start a run: an sbatch script, Kubernetes manifests, a Ray Train driver.

Everything here is text made from a spec. Nothing is submitted, and neither torch nor a cluster's client is needed.
"""

from .job import Job
from .kubernetes import KINDS, Pods, manifests, to_yaml
from .ray import ray_driver
from .slurm import Allocation, slurm_script

__all__ = ["KINDS", "Allocation", "Job", "Pods", "manifests", "ray_driver", "slurm_script", "to_yaml"]
