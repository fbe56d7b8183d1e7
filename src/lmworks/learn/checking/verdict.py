"""What a check says, as data: what the terminal, the page and an autograder show."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

PASSED, FAILED, UNFINISHED, BROKEN, STOPPED = "passed", "failed", "unfinished", "broken", "stopped"
UNAVAILABLE = "unavailable"  # this machine lacks what the check needs


@dataclass(frozen=True)
class Verdict:
    exercise: str
    status: str
    message: str = ""
    case: str = ""
    expected: str = ""
    got: str = ""
    inputs: dict[str, str] = field(default_factory=dict)
    misconception: str = ""
    traceback: list[str] = field(default_factory=list)  # of the learner's own lines
    note: str = ""  # on lines that are not part of an exercise
    output: str = ""  # what the learner's code printed
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        return self.status == PASSED

    @property
    def tried(self) -> bool:
        """The learner's part was there, and was run or could not be."""
        return self.status not in (UNFINISHED, UNAVAILABLE)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self, about: str) -> list[str]:
        """As the terminal shows it. `about`: the exercise's number and title."""
        if self.passed:
            return [f"✓ {about} passes ({self.seconds:.1f} s)", *([f"  {self.note}"] if self.note else [])]
        found = [f"✗ {about}: {self.message or self.case}", *(f"    {line}" for line in self.traceback)]
        if self.expected or self.got:
            rows = {"case": self.case, **self.inputs, "expected": self.expected, "got": self.got}
            found += [f"    {label:<9} {text}" for label, text in rows.items()]
        if self.misconception:
            found.append(f"  Perhaps: {self.misconception}")
        if self.note:
            found.append(f"  {self.note}")
        if self.output.strip():
            found += ["  Your code printed:", *(f"    {line}" for line in self.output.strip().splitlines()[-5:])]
        return found
