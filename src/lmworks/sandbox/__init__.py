"""Sandbox: runs what a model wrote, for rewards and evaluations, and harms nothing (docs/post-training.md)."""

from .isolation import IsolationReport, describe_isolation
from .limits import Limits
from .pool import Sandbox, run_program, run_programs
from .program import Program, SandboxError, SandboxResult
from .tested_code import passed_tests, program_of_tests

__all__ = [
    "IsolationReport",
    "Limits",
    "Program",
    "Sandbox",
    "SandboxError",
    "SandboxResult",
    "describe_isolation",
    "passed_tests",
    "program_of_tests",
    "run_program",
    "run_programs",
]
