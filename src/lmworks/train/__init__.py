"""The loop, optimizer, schedules, checkpoints and health of a run."""

from .trainer import Trainer

__all__ = ["Trainer"]
