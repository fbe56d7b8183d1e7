"""`python -m lmworks.study.chaos FOLDER train …`: `lmworks train …` under the acts of FOLDER, in all its ranks.

Started as a plain command it is also the agent that starts ranks; those then come through here too.
"""

import os
import sys
from pathlib import Path

from .jobs import be_agent
from .rank import be_rank

folder, arguments = Path(sys.argv[1]), sys.argv[2:]
if "RANK" in os.environ:
    be_rank(folder, arguments)
else:
    be_agent(folder, arguments)
