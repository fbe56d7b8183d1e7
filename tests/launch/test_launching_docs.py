"""Commands in docs/launching.md do what they say: launchers write their file, and torchrun knows its options."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

from lmworks.cli.main import main

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(r"```bash\n(.*?)```", (ROOT / "docs/launching.md").read_text(), re.DOTALL)
COMMANDS = [line for block in BLOCKS for line in block.splitlines()]
LAUNCHES = [line for line in COMMANDS if line.startswith("lmworks launch")]
AGENTS = [line for line in COMMANDS if line.startswith("torchrun")]


@pytest.mark.parametrize("line", LAUNCHES)
def test_launch(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", shlex.split(line))
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code in (0, None)
    assert Path(line.split("--out ")[1]).stat().st_size > 1000


def test_agents_of_both_machines() -> None:
    from torch.distributed.run import get_args_parser

    first, second = (get_args_parser().parse_args(shlex.split(line)[1:]) for line in AGENTS)
    assert first.rdzv_endpoint == second.rdzv_endpoint
    assert (first.rdzv_conf, second.rdzv_conf) == ("is_host=1", "is_host=0")
    assert first.rdzv_endpoint.startswith(first.local_addr)
    assert first.training_script_args == second.training_script_args
    assert int(first.nnodes) * int(first.nproc_per_node) == 8
