"""`--lr 1` where `optim.lr=1` is meant: keys of a spec are arguments, not options."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Any

from ..spec.errors import SpecError, near_keys, suggestion


def refuse_key_as_option(error: Exception, words: Sequence[str]) -> None:
    """Where `error` is an unknown option that a spec has a key for, say how that key is written. `words` were typed."""
    option, command = getattr(error, "option_name", ""), getattr(getattr(error, "ctx", None), "command", None)
    unknown = hasattr(error, "possibilities") and option.startswith("--") and command is not None
    if not unknown or misspelt(option, command):
        return
    keys, name = accepted_keys(command), option.lstrip("-").replace("-", "_")
    near = [name] if name in keys else near_keys(name.rpartition(".")[2], keys)
    if near:
        typed = suggestion([f"{key}={value_of(option, words)}" for key in near])
        raise SpecError(f"there is no option {option}{typed} (a spec's keys are given as SECTION.KEY=VALUE)") from None


def misspelt(option: str, command: Any) -> bool:
    """Whether the command has an option that is spelt almost like it; the parser's own message names that one."""
    own = [name for parameter in command.params for name in parameter.opts if name.startswith("--")]
    return bool(difflib.get_close_matches(option, own, n=1, cutoff=0.8))


def accepted_keys(command: Any) -> Iterable[str]:
    """Keys of the spec that a command takes overrides of; none where it takes none."""
    from ..spec import EngineSpec, RunSpec

    taken = {parameter.metavar for parameter in command.params if parameter.metavar}
    if "[SECTION.KEY=VALUE]..." in taken:
        return RunSpec.dotted_keys()
    return EngineSpec.dotted_keys() if any("engine.KEY=VALUE" in metavar for metavar in taken) else ()


def value_of(option: str, words: Sequence[str]) -> str:
    """What was typed after it, or after its equals sign."""
    for word, after in zip(words, [*words[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        if name == option:
            return value if equals else after if after and not after.startswith("-") else "VALUE"
    return "VALUE"
