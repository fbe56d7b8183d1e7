"""What a training run loads: a worker of a sweep imports it once, and its trials are forks of the worker."""

from ..align import post_trainer as post_trainer
from ..bench import calibrate as calibrate
from ..report import run_report as run_report
from ..train import trainer as trainer
from . import train as train
