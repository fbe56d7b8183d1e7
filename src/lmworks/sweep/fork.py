"""A fork: a new run that begins with the whole state of another at one of its checkpoints.

Weights, optimizer states, random states and the position in the data are those of the parent; what may change when a
run is resumed may differ, and so may the seed: the fork then goes on in its own order of the data.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path

from ..checkpoint.format.folders import committed, discard, rename_and_commit, work_folder
from ..checkpoint.format.manifest import MANIFEST, read_manifest, step_of
from ..record import RunFolder
from ..spec import RunSpec, SpecError
from ..spec.errors import NoSuchCheckpoint
from ..spec.files import write_whole
from ..spec.resumed import refused_changes


def fork_run(parent: RunFolder, step: int, child: RunFolder, spec: RunSpec) -> None:
    """The run folder `child` of `spec` with the parent's checkpoint of `step`; `resume` starts it."""
    found = {step_of(folder): folder for folder in committed(parent.checkpoints)}
    if step not in found:
        there = f"; it has those of {', '.join(map(str, sorted(found)))}" if found else ""
        raise NoSuchCheckpoint(f"{parent.path} has no checkpoint of step {step} to fork{there}")
    manifest = read_manifest(found[step])
    changes = [change for change in refused_changes(manifest.meta["spec"], spec) if not change.startswith("seed = ")]
    if changes:
        raise SpecError(f"a fork of {parent.path} at step {step} cannot change {'; '.join(changes)}")
    RunFolder.create(child.path, spec)
    final = child.checkpoints / f"step-{step:06d}"
    work = work_folder(final, os.getpid(), 0)
    discard(work)
    work.mkdir(parents=True)
    for name in manifest.files:
        link_or_copy(found[step] / name, work / name)
    forked = dataclasses.replace(manifest, meta={**manifest.meta, "spec": spec.to_dict()})
    write_whole(work / MANIFEST, json.dumps(dataclasses.asdict(forked), indent=1))
    rename_and_commit(work, final)
    child.event("fork", step, parent=str(parent.path))


def link_or_copy(source: Path, target: Path) -> None:
    """Files of a checkpoint are never changed: one copy on the disk serves both."""
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        shutil.copyfile(source, target)
