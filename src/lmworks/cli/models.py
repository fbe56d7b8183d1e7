"""`lmworks plan models`: the presets."""

from __future__ import annotations

from .output import Json, print_json, print_table


def models(json: Json = False) -> None:
    """List the model presets with their exact parameter counts.

    \b
    Examples:
      lmworks plan models
      lmworks plan models --json
    """
    from ..spec import PRESETS, ModelSpec

    specs = {name: ModelSpec.from_preset(name) for name in PRESETS}
    if json:
        print_json(
            [
                {"name": name, "params": s.params, "active_params": s.active_params, **s.to_dict()}
                for name, s in specs.items()
            ]
        )
        return
    columns = ["name", "parameters", "layers", "hidden", "heads", "kv heads", "vocab", "context"]
    rows = [
        [name, f"{s.params:,}", s.layers, s.hidden, s.heads, s.kv_heads, s.vocab, s.context]
        for name, s in specs.items()
    ]
    print_table("Model presets", columns, rows, drop=("kv heads", "heads", "vocab", "context"))
