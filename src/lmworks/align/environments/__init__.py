"""Environments: multi-turn rollouts with tools (docs/post-training.md)."""

from .environment import Environment, Step, ToolCall, Turn
from .load import BUILT_IN, EnvironmentFactory, load_environment

__all__ = ["BUILT_IN", "Environment", "EnvironmentFactory", "Step", "ToolCall", "Turn", "load_environment"]
