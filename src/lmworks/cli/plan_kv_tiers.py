"""`lmworks plan kv-tiers`: when a prefix is fetched faster than computed, and when prefill apart from decode pays."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from ..record.formatting import duration
from ..spec import SpecError, catalogue, load_run
from ..spec.hardware import find_gpu_name
from . import options
from .options import Overrides, Spec
from .output import Json, print_json, print_table


def kv_tiers(
    spec: Spec,
    overrides: Overrides = None,
    gpu: Annotated[str, typer.Option(help="Accelerator, e.g. h100.", autocompletion=options.gpus)] = "h100",
    prompt: Annotated[int, typer.Option("--input", help="Tokens of a prompt.")] = 4096,
    answer: Annotated[int, typer.Option("--output", help="Tokens of an answer.")] = 256,
    tpot: Annotated[
        float, typer.Option(help="Seconds between tokens that prefill apart from decode must meet.")
    ] = 0.05,
    weights: Annotated[str, typer.Option(help="Format of the weights: bf16, fp8, int8, int4 or fp4.")] = "bf16",
    kv: Annotated[str, typer.Option(help="Format of the KV cache: bf16, fp8, int8 or int4.")] = "bf16",
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel degree.")] = 1,
    host_gbs: Annotated[float, typer.Option(min=0, help="Bus to the host, GB/s (0: the catalogue's).")] = 0.0,
    disk_gbs: Annotated[float, typer.Option(min=0.001, help="Disk, GB/s.")] = 5.0,
    network_gbs: Annotated[
        float, typer.Option(min=0, help="Network to a shared store or a peer, GB/s (0: the catalogue's).")
    ] = 0.0,
    max_batch: Annotated[int, typer.Option(min=1, help="Sequences that an engine runs at once, at most.")] = 512,
    engine: Annotated[str, typer.Option(help="Whose overheads: vllm, sglang or trtllm.")] = "vllm",
    json: Json = False,
) -> None:
    """Say when KV cache tiers and prefill servers pay.

    The break-even length is the prefix from which on it is fetched faster than computed (docs/kv-cache.md).

    \b
    Examples:
      lmworks plan kv-tiers llama3-8b --gpu h100
      lmworks plan kv-tiers llama3-70b --gpu h100 --tp 4 --input 16384 --network-gbs 25 --json
    """
    from ..plan.serving.batching import Lengths
    from ..plan.serving.inference import Deployment, Rates
    from ..plan.serving.kv_tiers import BLOCK, links_of, payoff, split
    from ..plan.serving.plans import tag
    from ..plan.serving.served_model import ServedModel

    if tpot <= 0:
        raise SpecError(f"--tpot {tpot:g}: seconds between tokens are more than 0")
    run = load_run(spec, overrides or ())
    own = run.cluster.catalogue
    accelerator = catalogue(own)[find_gpu_name(gpu, own)]
    served = ServedModel.of(run.model, run.name)
    deployment = Deployment(served, accelerator, Rates.of(engine), tp, weights=weights, kv=kv)
    lengths, links = Lengths(prompt, answer), links_of(deployment, disk_gbs, network_gbs, host_gbs)
    tiers = [payoff(deployment, link, prompt) for link in links]
    apart = split(deployment, lengths, tpot, links[-1], max_batch)
    if json:
        found = {
            "model": served.name, "gpu": accelerator.name, "token_bytes": tiers[0].token_bytes, "block_tokens": BLOCK,
            "tiers": [
                {
                    "tier": each.link.name, "latency_s": each.link.latency, "bytes_a_second": each.link.bandwidth,
                    "break_even_tokens": each.break_even, "fetch_s": each.fetch, "compute_s": each.compute,
                }
                for each in tiers
            ],
            "prefill_apart": None if apart is None else {**asdict(apart), "pays": apart.pays},
            "rests_on": tag(accelerator),
        }  # fmt: skip
        print_json(found)
        return
    rows = [
        [
            each.link.name, f"{each.link.bandwidth / 1e9:.3g} GB/s",
            "never" if each.break_even is None else f"{each.break_even:,}", duration(each.fetch),
            duration(each.compute), f"{each.speedup:.3g}×",
        ]
        for each in tiers
    ]  # fmt: skip
    block = f"{tiers[0].token_bytes * BLOCK / 2**20:.3g} MiB a block of {BLOCK} tokens"
    columns = ["tier", "to the device", "pays from (tokens)", f"fetch {prompt:,}", "compute", "faster"]
    print_table(f"{served.name} on {accelerator.name}, tp = {tp}: {block}", columns, rows)
    if apart is None:
        typer.echo(f"prefill apart: one sequence alone takes more than {duration(tpot)} a token")
        return
    typer.echo(
        f"prefill apart from decode {'pays' if apart.pays else 'does not pay'} at {duration(tpot)} a token: "
        f"{duration(apart.split_seconds)} of a device a request against {duration(apart.mixed_seconds)}; "
        f"{apart.prefill_share:.0%} of the devices prefill, the first token comes {duration(apart.transfer)} later; "
        f"prompts take {duration(apart.mixed_tpot - apart.mixed_tpot_alone)} of {duration(apart.mixed_tpot)} "
        "between tokens of a mixed server"
    )
