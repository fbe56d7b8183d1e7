"""Host memory that ranks of a machine will take, held against what it has left: why not, and what would fit."""

from __future__ import annotations

from ...spec import RunSpec
from ..activation_offload import MIN_TENSOR_BYTES
from .host_need import HostNeed

GIB = 2**30


def refusal(spec: RunSpec, need: HostNeed, ranks: int, there: int | None) -> str:
    """One line where they need more than the bytes that are `there`; none where it fits, or nobody knows."""
    if there is None or need.total <= there:
        return ""
    layout, parts = spec.parallel, {name: size for name, size in need.to_dict().items() if size}
    asked = {
        "states": f"parallel.offload = '{layout.offload}'",
        "activations": f"parallel.offload_activations = {layout.offload_activations:g}",
        "staging": "checkpoint.asynchronous = true",
    }
    much = f"{gib(need.total / ranks)} of host memory"
    if ranks > 1:
        much += f" for each of the {ranks} ranks on this machine, {gib(need.total)} in all"
    text = f"{listed([asked[name] for name in parts])} need{'s' * (len(parts) == 1)} {much}"
    text += f", and {gib(there)} are free; {what_fits(spec, need, ranks, there)}"
    if "activations" in parts:
        text += ", and parallel.recompute = 'selective', 'mlp' or 'full' spares memory without it"
    return text


def what_fits(spec: RunSpec, need: HostNeed, ranks: int, there: int) -> str:
    """The one change that is enough, or any of them; all of them, where none is."""
    left = {name: there - (need.total - size) for name, size in need.to_dict().items() if size}  # for this one alone
    without = {"states": "parallel.offload = 'none'", "staging": "checkpoint.asynchronous = false"}
    enough = [without[name] for name, room in left.items() if name in without and room >= 0]
    if "activations" in left:
        whole = (
            left["activations"] // ranks - spec.model.layers * MIN_TENSOR_BYTES
        )  # a block's last piece may hold a byte
        if most := max(0, whole // (GIB // 10)) / 10:
            enough.append(f"parallel.offload_activations = {most:g}")
        without["activations"] = "parallel.offload_activations = 0"
    if enough:
        return f"{' or '.join(enough)} would fit"
    if list(left) == ["activations"]:
        return "nothing worth the way would fit"
    return f"{listed([without[name] for name in left])} together would fit"


def gib(size: float) -> str:
    return f"{size / GIB:.3g} GiB" if size < 1000 * GIB else f"{size / GIB:,.0f} GiB"


def listed(words: list[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
