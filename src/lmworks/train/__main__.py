"""`torchrun --nproc-per-node 4 -m lmworks.train SPEC …`: one rank of `lmworks train SPEC …`."""

import sys

from ..cli.main import main

sys.argv[1:1] = ["train"]
main()
