"""`python -m lmworks.prove.chaos FOLDER train …`: `lmworks train …` under the acts of FOLDER, in all its ranks.

Where the command is the agent that starts ranks, those come through here too.
"""

import os
import sys
from pathlib import Path

from ...__main__ import command
from ...cli import ranks

folder, arguments = sys.argv[1], sys.argv[2:]
if "RANK" in os.environ:
    from .rank import be_rank  # which an agent does without: it imports the whole trainer

    be_rank(Path(folder), arguments)
else:
    ranks.PROGRAM = ("-m", "lmworks.prove.chaos", folder)  # type: ignore[assignment]
    sys.argv = ["lmworks", *arguments]
    command()
