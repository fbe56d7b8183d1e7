"""`torchrun --nproc-per-node 4 -m lmworks.train SPEC …`: one rank of `lmworks train SPEC …`."""

import sys

from ..__main__ import command

sys.argv[1:1] = ["train"]
command()
