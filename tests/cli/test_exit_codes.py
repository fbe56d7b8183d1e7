"""Exit code 2 for a wrong request, whatever the command: nothing is started, and an error says what was wrong.

A name that stands for nothing, a file or folder that is not there, a value out of range, a place where nothing can be
written. What is in the folder: RUN, a finished run; HF, its export; empty/; file.txt; bytes.bin.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from lmworks.cli.main import main
from tiny import make_spec, train
from typed import lmworks

WRONG = """
models extra
hardware nothing
hardware h100 --probe
mesh nowhere.toml
mesh tiny --rank 5
pipeline tiny
pipeline tiny parallel.pp=2 --png file.txt/x.png
pipeline tiny parallel.pp=2 --png x.txt
simulate nowhere.toml
simulate tiny --world 3
simulate tiny --rank 9
report nowhere
report empty
report file.txt
health nowhere
health empty
demo --seconds 0
demo --run-dir RUN
demo --run-dir file.txt/run
train nowhere.toml
train tiny data.path=nowhere --run-dir new
train tiny data.path=file.txt --run-dir new
train tiny data.path=empty --run-dir new
train tiny data.mix.nowhere=1 --run-dir new
train tiny checkpoint.init=nowhere --run-dir new
train tiny checkpoint.hash=md9 --run-dir new
train tiny --max-restarts -1
train tiny --run-dir RUN
train tiny --run-dir file.txt/run
resume nowhere
resume empty
resume RUN --ranks 3
diagnose nowhere
diagnose RUN --attempt 99
parity nowhere.toml
parity tiny --layouts nothing
chaos --fault nothing
chaos --phase nothing
eval nowhere
eval empty
eval RUN --step 5
eval RUN --batches -1
generate nowhere --prompt x
generate empty --prompt x
generate RUN
generate RUN --prompt x --step 5
generate RUN --prompt x --engine nothing
generate RUN --prompt x --adapter a
generate RUN --prompt x --adapter a=nowhere
generate RUN --prompt x --temperature -1
generate RUN --prompts nowhere.txt
generate RUN --prompts bytes.bin
generate RUN --prompt x engine.device=tpu
generate RUN --prompt x engine.speculate=draft engine.draft=nowhere
generate HF --prompt x --step 3
generate tiny --prompt x
chat nowhere
chat tiny
chat RUN --step 5
chat RUN --adapter a=nowhere
serve
serve nowhere
serve RUN --config nowhere.toml
serve RUN --config file.txt
serve RUN --tls-cert nowhere
serve RUN --tls-cert nowhere --tls-key nowhere
serve RUN --adapter a=nowhere
serve RUN --port 99999
serve RUN engine.nothing=1
serve --upstream not-an-address
serve --upstream http://
export nowhere out
export empty out
export RUN file.txt
export RUN file.txt/out
export RUN out --step 5
export RUN out --max-shard-size 0
export RUN RUN
quantize nowhere --scheme int8 --out q
quantize empty --scheme int8 --out q
quantize RUN --scheme int9 --out q
quantize RUN --scheme int4 --out q --group 3
quantize RUN --scheme int8 --out file.txt
quantize RUN --scheme int8 --out file.txt/q
quantize RUN --scheme int8 --out RUN
quantize RUN --scheme int8 --out q --step 5
quantize RUN --scheme int8 --out q --calibration nowhere.txt
quantize RUN --scheme int8 --out q --calibration nowhere
quantize RUN --scheme int8 --out q --calibration empty
quantize HF --scheme int8 --out q
quantize HF --scheme int8 --out q --calibration nowhere.txt
plan nowhere.toml
plan tiny cluster.gpu=nothing
plan tiny cluster.profile=nowhere.toml
plan memory tiny
plan memory tiny --cluster h100x8
plan memory tiny --cluster 8xnothing
plan memory tiny --cluster 8xh100 --html file.txt/x
plan memory tiny --cluster 8xh100 --optimizer nothing
plan memory tiny --cluster 8xh100 --recompute nothing
plan memory tiny --cluster 8xh100 --tp 3
plan search tiny
plan search tiny --cluster 8xh100 --fix nothing=1
plan search tiny --cluster 8xh100 --out file.txt/x
plan search tiny --cluster 8xh100 --html file.txt/x
plan serve llama3-8b --gpu nothing
plan serve llama3-8b --slo nothing=1
plan serve llama3-8b --rate -1
plan serve llama3-8b --quantile 2
plan serve llama3-8b --weights nothing
plan serve llama3-8b --kv nothing
plan serve llama3-8b --engine nothing
plan serve llama3-8b --tp 3
plan serve llama3-8b --input 0
plan reliability --gpus 0
plan reliability --run nowhere
plan reliability --rate -1
plan calibrate --out file.txt/x
plan calibrate --out empty
plan calibrate --minutes 0
plan calibrate --device nothing
plan validate --data nowhere
plan validate --source nothing
plan predict nowhere.csv
plan predict bytes.bin
plan predict file.txt
plan predict rows.csv
runs nowhere
runs file.txt
runs RUN --plot file.txt/x.png
runs RUN --plot x.txt
runs --compare RUN
runs show nowhere
runs show RUN --mtbf -1
plan collective all_reduce
plan collective shout --cluster 8xh100
plan collective all_reduce --cluster 8xnothing
plan collective all_reduce --cluster 8xh100 --bytes lots
plan collective all_reduce --cluster 8xh100 --ranks 1
plan collective all_reduce --cluster 8xh100 --ranks 9
plan collective all_reduce --cluster 64xh100 --ranks 12
plan collective all_reduce --cluster 64xh100 --schedule ring
plan collective all_reduce --cluster 4xh100 --schedule bruck
plan collective all_reduce --cluster 8xh100 optim.lr=1
plan collective all_reduce --cluster 8xh100 cluster.network=string
plan collective all_reduce --cluster 8xtpu-v5p
plan collective all_reduce --cluster 8xh100 --plot x.txt
data prepare nowhere --out new
data prepare empty --out new
data prepare file.txt --out file.txt
data prepare file.txt --out file.txt/x
data prepare file.txt --out new --tokenizer nothing
data prepare file.txt --out new --tokenizer bpe:3
data prepare file.txt --out new --val-fraction 2
data prepare file.txt --out new --workers -1
data inspect nowhere
data inspect empty
data inspect file.txt
data inspect stdlib:nothing
data window RUN --cursor -1
data window nowhere --cursor 1
checkpoint ls nowhere
checkpoint ls empty
checkpoint ls file.txt
checkpoint show RUN --step 5
checkpoint verify RUN --step 5
checkpoint export RUN out --step 5
checkpoint prune RUN --keep 0
checkpoint prune nowhere --keep 1
launch slurm nowhere.toml
launch slurm tiny --nodes 3
launch slurm tiny --time soon
launch slurm tiny --out file.txt/x
launch slurm tiny --env nothing
launch kubernetes tiny --image a --claim b --kind nothing
launch kubernetes tiny --image a
launch ray tiny --workers 3
study ddp-fsdp nowhere.toml
study ddp-fsdp tiny --only nothing
study ddp-fsdp tiny --out file.txt
study precision tiny --only nothing
study precision tiny --out file.txt
bench serve --url not-an-address
bench serve --slo nothing
bench serve --lengths nowhere
bench serve --input 5:1
bench serve --shared-prefix x
bench serve --endpoint nothing
bench serve --plot x.txt
bench serve --plot file.txt/x.png
bench train nowhere.toml
bench train tiny data.path=nowhere
bench train tiny --steps 0
bench kernels --model nothing
bench kernels --only nothing
bench kernels --device nothing
bench kernels --out file.txt/x
bench offline --model nothing
bench offline --model empty
bench offline --model tiny --input 5:1
bench offline --model tiny engine.nothing=1
profile engine --model nothing
nothing
train
train tiny --nothing
"""


@pytest.fixture(scope="module")
def folder(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("wrong")
    train(make_spec(dataset), place / "RUN")
    sys.argv = ["lmworks", "export", str(place / "RUN"), str(place / "HF")]
    with pytest.raises(SystemExit):
        main()
    (place / "empty").mkdir()
    (place / "file.txt").write_text("some text\n")
    (place / "bytes.bin").write_bytes(b"\x80\x81\x00")
    (place / "rows.csv").write_text("model,gpu\nnothing,h100\n")
    return place


def contents(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.name != "plots"}


@pytest.mark.parametrize("line", WRONG.strip().splitlines())
def test_a_wrong_request(
    line: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    before = contents(folder)
    code, _, err = lmworks(capsys, *shlex.split(line))
    assert code == 2, err
    last = err.splitlines()[-1]
    assert last.startswith(("lmworks: error: ", "Error: ")) and "Traceback" not in err
    assert last.startswith("Error: ") or err.count("\n") == 1, err
    assert contents(folder) == before  # nothing was begun


def test_a_job_that_fails(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What was asked for was right: exit code 1."""
    monkeypatch.chdir(folder)
    for line in ("bench serve --url http://127.0.0.1:9 --requests 1", "data prepare bytes.bin --out new"):
        code, _, err = lmworks(capsys, *line.split())
        assert code == 1 and err.splitlines()[-1].startswith("lmworks: error: "), err
