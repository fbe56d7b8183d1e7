"""Writes src/lmworks/scaling/constants/chinchilla.json: the published refit, with the replicates of our own fit.

python validation/write_scaling_constants.py
"""

from __future__ import annotations

import json
from pathlib import Path

from lmworks.scaling.fitting import fit_law
from lmworks.scaling.law_file import law_to_dict
from lmworks.scaling.points import read_points

HERE = Path(__file__).parent
OUT = HERE.parent / "src" / "lmworks" / "scaling" / "constants" / "chinchilla.json"
PUBLISHED = {"E": 1.81724, "A": 477.84, "B": 2143.86, "alpha": 0.347313, "beta": 0.367183}
SOURCE = (
    "Besiroglu et al. 2024 (arXiv 2404.10102): refit of 240 runs of Hoffmann et al. 2022; "
    "intervals by our fit of the same points"
)


def main() -> None:
    fitted = fit_law(read_points(HERE / "scaling" / "chinchilla_points.csv", drop=5), "chinchilla").fitted
    law = {**law_to_dict(fitted, digits=5), "source": SOURCE, "params": PUBLISHED}
    draws = law.pop("draws")
    text = json.dumps(law, indent=1, ensure_ascii=False).removesuffix("\n}")
    rows = ",\n  ".join(json.dumps(draw) for draw in draws)
    OUT.write_text(f'{text},\n "draws": [\n  {rows}\n ]\n}}\n', encoding="utf-8")


if __name__ == "__main__":
    main()
