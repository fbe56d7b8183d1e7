"""Service level objectives: how soon requests of a model and a tier are to be answered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ..spec import SpecError
from ..spec.schema import Section, opt
from .forecast import Forecast


@dataclass(frozen=True)
class ServiceLevel(Section):
    """Objectives of a model's requests, of a tier's, or of a tier's for a model."""

    section: ClassVar[str] = "slos"

    name: str = opt("", "in metrics and alerts (empty: its model and tier)")
    model: str = opt("", "what clients ask for (empty: every model)")
    tier: str = opt("", "of tenants (empty: every tier)")
    ttft: float = opt(0.0, "seconds until the first token (0: none)", ge=0)
    tpot: float = opt(0.0, "seconds for each token after it (0: none)", ge=0)
    e2e: float = opt(0.0, "seconds until the end of an answer (0: none)", ge=0)
    objective: float = opt(0.99, "share of requests that are to meet all of these", gt=0, lt=1)
    admit_below: float = opt(1.0, "admitted while the forecast is below this share of both (0: always)", ge=0)
    priority: int = opt(0, "of its requests, in servers of ours and vLLM's: the smallest goes first (0: not said)")

    def check(self) -> None:
        if not (self.ttft or self.tpot or self.e2e or self.priority):
            raise SpecError("slos: one has neither ttft, tpot, e2e nor priority")

    @property
    def label(self) -> str:
        return self.name or " ".join(filter(None, (self.model, self.tier))) or "all"

    def late(self, found: Forecast) -> float:
        """By how many seconds it would be missed; 0: it would not, as far as is known."""
        share = self.admit_below
        late = [
            seconds - share * wanted
            for seconds, wanted in ((found.ttft, self.ttft), (found.tpot, self.tpot))
            if share and wanted and seconds is not None
        ]
        return max(0.0, *late, 0.0)


def find_level(levels: Sequence[ServiceLevel], model: str, tier: str) -> ServiceLevel | None:
    """The most particular one: a model's comes before a tier's."""
    fitting = [one for one in levels if one.model in ("", model) and one.tier in ("", tier)]
    return max(fitting, key=lambda one: (bool(one.model), bool(one.tier)), default=None)
