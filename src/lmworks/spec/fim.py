"""Fill-in-the-middle: which documents become infilling examples, how they are cut, and which tokens mark the parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .errors import SpecError
from .schema import Section, opt

SPLITS = ("character", "token", "line", "syntax")


@dataclass(frozen=True)
class SentinelNames:
    """Tokens that mark the parts of an infilling example, by name.

    Prefix first: ⟨prefix⟩ P ⟨suffix⟩ S ⟨middle⟩ M ⟨end⟩. Suffix first, two orders are in use: ⟨prefix⟩ ⟨suffix⟩ S
    ⟨middle⟩ P M ⟨end⟩ (`joined`, which reads on from prefix to middle; Bavarian et al. 2022, variant 2), and ⟨suffix⟩ S
    ⟨prefix⟩ P ⟨middle⟩ M ⟨end⟩.
    """

    prefix: str
    suffix: str
    middle: str
    end: str = ""  # after the middle, where a family has a token for it beside end-of-text
    joined: bool = True


FAMILIES = {
    "starcoder": SentinelNames("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    "codellama": SentinelNames("▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"),
    "qwen": SentinelNames("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    "mellum": SentinelNames("<fim_prefix>", "<fim_suffix>", "<fim_middle>", joined=False),
}


@dataclass(frozen=True)
class FimSpec(Section):
    """Infilling examples among the training sequences; held-out loss is always left to right."""

    section: ClassVar[str] = "data.fim"

    rate: float = opt(0.0, "share of the documents that become infilling examples (0: off)", ge=0, le=1)
    spm_rate: float = opt(0.5, "share of those that have the suffix before the prefix", ge=0, le=1)
    split: str = opt(
        "character",
        "where the middle is cut out: between any two characters, tokens or lines, or a node of the syntax tree",
        choices=SPLITS,
    )
    language: str = opt("python", "split = 'syntax': the grammar, a package tree-sitter-LANGUAGE")
    max_middle: int = opt(0, "longest middle, in characters; in tokens with split = 'token' (0: any)", ge=0)
    sentinels: str = opt("starcoder", "the tokens that mark the parts", choices=(*FAMILIES, "own"))
    prefix: str = opt("", "sentinels = 'own': the token before the prefix")
    suffix: str = opt("", "sentinels = 'own': the token before the suffix")
    middle: str = opt("", "sentinels = 'own': the token before the middle")

    def check(self) -> None:
        own = {"prefix": self.prefix, "suffix": self.suffix, "middle": self.middle}
        if self.sentinels == "own":
            for key, name in own.items():
                if not name:
                    raise SpecError(f"data.fim.sentinels = 'own' needs data.fim.{key}: the name of a token")
            if len(set(own.values())) < 3:
                raise SpecError("data.fim.prefix, suffix and middle must be three different tokens")
        elif any(own.values()):
            raise SpecError(
                f"data.fim.prefix, suffix and middle need data.fim.sentinels = 'own', not {self.sentinels!r}"
            )

    @property
    def names(self) -> SentinelNames:
        if self.sentinels == "own":
            return SentinelNames(self.prefix, self.suffix, self.middle)
        return FAMILIES[self.sentinels]
