"""One training of `lmworks bench precision`: see `single_run`."""

import sys
from pathlib import Path

from ...spec import LMWorksError
from .single_run import train_one

folder, name, *force = sys.argv[1:]
try:
    train_one(Path(folder), name, force == ["--force"])
except LMWorksError as error:
    print(f"lmworks: {error}", file=sys.stderr)
    sys.exit(error.exit_code)
except KeyboardInterrupt:
    sys.exit(130)
