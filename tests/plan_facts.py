"""What `lmworks plan memory` and `lmworks plan search` say (`--json`), in figures that are easy to check.

tests/report/test_plan_page.py holds the keys to those of the commands.
"""

GIB = 2**30


def budget(weights, activations, logits=0):
    """Bytes of one rank. A fifth of the gradients is not made yet at the highest moment; the allocator takes 5 GiB, of
    which nothing fits into 2."""
    found = {
        "parameters": weights * GIB,
        "gradients": weights * GIB,
        "master": 0.0,
        "optimizer": 2 * weights * GIB,
        "activations": activations * GIB,
        "logits": logits * GIB,
        "buffers": 1.0 * GIB,
        "absent": 0.2 * weights * GIB,
        "host": 0.0,
        "others": 0.0,
        "engine": 0.0,
    }
    allocated = sum(found.values()) - 2 * found["absent"]
    return found | {"left": 2.0 * GIB, "allocated": allocated, "reserved": allocated + 5 * GIB}


def memory_facts(**changes):
    stages = [budget(10, 8), budget(10, 4, 2)]  # 10 + 8 + 20 + 8 + 1 + 5 = 52 GiB, and 50
    return {
        "name": "small",
        "gpu": "H100-SXM-80GB",
        "gpus": 8,
        "layout": "pp=2, dp=4 ZeRO-1",
        **stages[0],
        "host_per_machine": 0.0,
        "host_per_machine_parts": {"states": 0, "activations": 0, "staging": 0, "resting": 0},
        "capacity": 79.0 * GIB,
        "usable": 78.0 * GIB,
        "fits": True,
        "oom_probability": 0.125,
        "stages": stages,
        "saved_by_blocks": 8.0 * GIB,
    } | changes


def layout(step_s, stages, **changes):
    """A row of the front; its parts add up to step_s, and each stage of its pipeline is one unit of F and two of B."""
    chosen = {
        "tp": 1, "cp": 1, "pp": len(stages), "ep": 1, "dp_replicate": 1, "dp_shard": 8 // len(stages),
        "micro_batch": 1, "zero": 3, "schedule": "1f1b", "virtual": 1, "recompute": "none", "offload": "none",
        "offload_activations": 0.0,
    } | changes  # fmt: skip
    fullest = max(stages, key=lambda stage: stage["reserved"])
    return {
        "layout": chosen,
        "text": f"tp={chosen['tp']}, pp={chosen['pp']}, recompute {chosen['recompute']}",
        "weights": "fp32",
        "gpu": "H100-SXM-80GB",
        "gpus": 8,
        "step_s": step_s,
        "interval": [0.8 * step_s, 1.25 * step_s],
        "tokens_per_s": 64 * 4096 / step_s,
        "tokens_per_s_per_gpu": 8 * 4096 / step_s,
        "mfu": 0.8 / step_s,
        "hfu": 1.0 / step_s,
        "memory": fullest,
        "host_per_machine": 0.0,
        "stages": stages,
        "capacity": 80.0 * GIB,
        "usable": 78.0 * GIB,
        "headroom": 1 - fullest["reserved"] / (80 * GIB),
        "oom_probability": 0.05,
        "dollars_per_gtoken": 100.0 * step_s,
        "bill": {"tokens": 1e12, "hours": 240.0 * step_s, "gpu_hours": 1920.0 * step_s, "dollars": 1e5 * step_s,
                 "kwh": 2000.0 * step_s, "stops": 3.0, "save_every_s": 600.0, "goodput": 0.975},
        "parts": {"matmul": 0.6 * step_s, "dp": 0.3 * step_s, "cp": 0.0, "bubble": 0.1 * step_s},
        "hidden": {"dp": 0.2 * step_s, "cp": 0.0},
        "tags": {"matmul": "measured", "dp": "modelled", "cp": "modelled", "bubble": "fitted"},
        "notes": ["no run of it was fitted"],
        "collectives": [
            {"kind": "all-gather", "what": "weights", "group": "dp_shard", "ranks": 8, "stride": 1, "count": 40,
             "bytes": 2_000_000_000, "when": "forward", "link": "nvswitch"},
            {"kind": "all-gather", "what": "weights, again", "group": "dp_shard", "ranks": 8, "stride": 1, "count": 2,
             "bytes": 1_000_000_000, "when": "backward", "link": "nvswitch"},
        ],
        "timeline": timeline(len(stages)) if len(stages) > 1 else None,
    }  # fmt: skip


def timeline(ranks):
    """One micro-batch down and up the pipeline."""
    down = [[rank, rank, "F", 0, float(rank), rank + 1.0] for rank in range(ranks)]
    up = [[ranks - 1 - i, ranks - 1 - i, "B", 0, ranks + 2.0 * i, ranks + 2.0 * i + 2] for i in range(ranks)]
    return down + up


def verdict_facts(**changes):
    """Of a layout that `--explain` asks about."""
    return {
        "layout": {"tp": 8, "zero": 1},
        "binding": "memory",
        "text": "needs 99 GiB",
        "budget": budget(20, 13),
        "changes": ["zero=3 & more"],
        "weights": "fp32",
        "step_s": None,
    } | changes


def search_facts(**changes):
    """Four layouts, fastest first: 70, 60, 45 and 30 GiB of 80."""
    front = [
        layout(1.0, [budget(10, 26)]),
        layout(1.25, [budget(10, 16), budget(9, 6)]),
        layout(2.0, [budget(5, 20), budget(5, 15), budget(5, 10), budget(5, 6, 3)], tp=2, recompute="selective"),
        layout(4.0, [budget(5, 5)], tp=2, recompute="full"),
    ]
    return {
        "model": "small",
        "params": 8_000_000_000,
        "seq": 4096,
        "global_batch": 64,
        "legal": 12345,
        "fitting": 321,
        "seconds": 0.5,
        "front": front,
        "fastest": [],
        "fronts": [],
        "explained": None,
    } | changes
