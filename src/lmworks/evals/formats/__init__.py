"""How rows of data become problems: one function a format."""

from collections.abc import Mapping

from .choices import ARC, HELLASWAG, MMLU, MULTIPLE_CHOICE
from .code import CRUXEVAL_INPUT, CRUXEVAL_OUTPUT, HUMANEVAL, INFILLING, MBPP
from .completion import REPOBENCH, SAFIM
from .format import Format
from .needle import NEEDLE
from .stdlib import STDLIB_DOCTEST, STDLIB_IMPORTS, STDLIB_INFILL
from .texts import GSM8K, LOSS, PERPLEXITY

FORMATS: Mapping[str, Format] = {
    "humaneval": HUMANEVAL,
    "infilling": INFILLING,
    "mbpp": MBPP,
    "cruxeval-output": CRUXEVAL_OUTPUT,
    "cruxeval-input": CRUXEVAL_INPUT,
    "safim": SAFIM,
    "repobench": REPOBENCH,
    "stdlib-doctest": STDLIB_DOCTEST,
    "stdlib-infill": STDLIB_INFILL,
    "stdlib-imports": STDLIB_IMPORTS,
    "multiple-choice": MULTIPLE_CHOICE,
    "mmlu": MMLU,
    "hellaswag": HELLASWAG,
    "arc": ARC,
    "gsm8k": GSM8K,
    "needle": NEEDLE,
    "perplexity": PERPLEXITY,
    "loss": LOSS,
}
