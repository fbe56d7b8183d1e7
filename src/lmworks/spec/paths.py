"""Paths in a spec."""

from __future__ import annotations

from pathlib import Path

from .run import RunSpec


def with_absolute_paths(spec: RunSpec) -> RunSpec:
    """The resolved spec repeats the run from any folder."""

    def absolute(path: str) -> str:
        return path if not path or path.startswith("stdlib:") else str(Path(path).absolute())

    mix = {absolute(path): weight for path, weight in spec.data.mix.items()}
    return spec.replace(
        data=spec.data.replace(path=absolute(spec.data.path), mix=mix),
        checkpoint=spec.checkpoint.replace(init=absolute(spec.checkpoint.init)),
        cluster=spec.cluster.replace(profile=absolute(spec.cluster.profile)),
    )
