"""Plans of fleets: what `plan serve` finds for one model, the cheapest of several, tenants together and apart."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmworks.fleet.config import read_fleet
from lmworks.fleet.plan import mig_slices, plan_fleet, sheet
from lmworks.plan.serving.batching import Lengths
from lmworks.plan.serving.plans import Demand, Slo, choose
from lmworks.plan.serving.served_model import ServedModel
from lmworks.spec import SpecError, catalogue, load_run
from lmworks.spec.hardware import find_gpu_name

ONE = """
name = "one"
gpus = ["h100"]
[[models]]
name = "chat"
source = "llama3-8b"
[[tenants]]
name = "search"
model = "chat"
rate = 40.0
input = 1024
output = 256
slo = "ttft=0.5,tpot=0.05"
"""


def planned(tmp_path: Path, text: str) -> dict:
    (path := tmp_path / "fleet.toml").write_text(text)
    return sheet(plan_fleet(read_fleet(path)))


def test_one_model_is_what_plan_serve_says(tmp_path: Path) -> None:
    run = load_run("llama3-8b", ())
    gpu = catalogue("")[find_gpu_name("h100", "")]
    demand = Demand(Lengths(1024, 256), Slo.parse("ttft=0.5,tpot=0.05"), 40.0)
    best = choose(ServedModel.of(run.model, run.name), gpu, demand)[0]
    (pool,) = planned(tmp_path, ONE)["pools"]
    assert (pool["tp"], pool["replicas"], pool["gpus"]) == (best.deployment.tp, best.replicas, best.gpus)
    assert pool["dollars_hour"] == pytest.approx(best.dollars_hour)
    assert pool["dollars_per_million"]["all"] == pytest.approx(best.dollars_per_million()[2])
    assert planned(tmp_path, ONE)["dollars_month"] == pytest.approx(730 * best.dollars_hour)


def test_the_cheapest_of_accelerators_and_formats_is_taken(tmp_path: Path) -> None:
    def only(gpu: str, form: str) -> str:
        return ONE.replace('["h100"]', f'["{gpu}"]').replace('"llama3-8b"', f'"llama3-8b"\nweights = ["{form}"]')

    each = [planned(tmp_path, only(gpu, form)) for gpu in ("h100", "l40s") for form in ("bf16", "fp8")]
    both = ONE.replace('["h100"]', '["h100", "l40s"]').replace('"llama3-8b"', '"llama3-8b"\nweights = ["bf16", "fp8"]')
    assert planned(tmp_path, both)["dollars_hour"] == min(one["dollars_hour"] for one in each)


def test_a_strict_tenant_gets_servers_of_its_own_where_that_is_cheaper(tmp_path: Path) -> None:
    """A trickle with a hard promise would make a flood keep it too."""
    strict = """
[[tenants]]
name = "voice"
model = "chat"
rate = 0.5
input = 1024
output = 256
slo = "ttft=0.2,tpot=0.008"
"""
    found = planned(tmp_path, ONE.replace('slo = "ttft=0.5,tpot=0.05"', "") + strict)
    assert [pool["tenants"] for pool in found["pools"]] == [["search"], ["voice"]]
    assert found["other_dollars_hour"]["chat"] > found["dollars_hour"]
    slow = ONE.replace("40.0", "1.0")
    alike = planned(tmp_path, slow + slow[slow.index("[[tenants]]") :].replace("search", "more"))
    assert [pool["tenants"] for pool in alike["pools"]] == [["search", "more"]]


def test_mig_slices_share_a_gpu_out_and_say_that_they_are_planned_only(tmp_path: Path) -> None:
    gpu = catalogue("")[find_gpu_name("h100", "")]
    sevenths, _, halves = [one for one, _ in mig_slices(gpu)]
    assert (sevenths.memory_gb, sevenths.bf16_tflops) == pytest.approx((gpu.memory_gb / 8, gpu.bf16_tflops / 7))
    assert halves.memory_gb == gpu.memory_gb / 2
    small = ONE.replace('"llama3-8b"', '"qwen3-0.6b"\nmig = true').replace("40.0", "0.5")
    (pool,) = planned(tmp_path, small)["pools"]
    assert pool["gpus"] == 1  # a trickle: whole GPUs are paid for, sliced or not
    assert pool["planned_only"] == (pool["slices_per_gpu"] > 1)


def test_an_example_is_found_by_its_name_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = read_fleet(Path(__file__).parents[2] / "configs/fleet.toml")
    monkeypatch.chdir(tmp_path)
    assert read_fleet(Path("configs/fleet.toml")) == here
    with pytest.raises(SpecError, match=r"no fleet at fleet\.toml: .* did you mean 'configs/fleet\.toml'"):
        read_fleet(Path("fleet.toml"))


def test_what_is_wrong_is_named(tmp_path: Path) -> None:
    for text, message in (
        (ONE.replace("source", "sorce"), "'sorce' is unknown"),
        (ONE.replace('model = "chat"', 'model = "chart"'), "asks for 'chart'"),
        (ONE.replace("rate = 40.0", 'rate = "many"'), "must be float"),
        (ONE.replace("rate = 40.0\n", ""), "rate must be given"),
        (ONE[: ONE.index("[[tenants]]")], "nobody asks for model 'chat'"),
        (ONE.replace('"llama3-8b"', '"llama3-405b"').replace('["h100"]', '["l4"]'), "no deployment of 'chat'"),
    ):
        with pytest.raises(SpecError, match=message):
            planned(tmp_path, text)
