"""`python -m lmworks.prove.chaos FOLDER train …`: `lmworks train …` with the fault injections of FOLDER on all ranks.

If the command is the agent that starts the ranks, the ranks are started through this module too.
"""

import os
import sys
from pathlib import Path

from ...__main__ import command
from ...cli import ranks

folder, arguments = sys.argv[1], sys.argv[2:]
if "RANK" in os.environ:
    from .instrumented_rank import run_rank  # imports the whole trainer, which the agent does not need

    run_rank(Path(folder), arguments)
else:
    ranks.PROGRAM = ("-m", "lmworks.prove.chaos", folder)  # type: ignore[assignment]
    sys.argv = ["lmworks", *arguments]
    command()
