"""Pictures of inference: prefill and decode, the KV cache, batching, quantization."""

from __future__ import annotations

from collections.abc import Callable

from ...plan.serving.batching import Lengths, steady
from ...plan.serving.inference import Deployment, Rates
from ...plan.serving.served_model import ServedModel
from ...record.formatting import binary_bytes
from ...spec import ModelSpec, catalogue
from ...spec.hardware import find_gpu_name
from ..drawing import Drawing

SHARES = (("weights", "blue"), ("attention", "orange"), ("overhead", "grey"))


def deployed(weights: str = "bf16", kv: str = "bf16") -> Deployment:
    """Llama 3 8B on one H100, with the overheads of vLLM."""
    served = ServedModel.of(ModelSpec.from_preset("llama3-8b"))
    return Deployment(served, catalogue()[find_gpu_name("h100")], Rates.of("vllm"), weights=weights, kv=kv)


def decode_step_parts() -> Drawing:
    """Of a step by the planner: products with the weights, attention over the cache, launches and the host."""
    picture, rows, server, lengths = Drawing(640, 210), [], deployed(), Lengths(1024, 256)
    for batch in (1, 8, 32, 128, 256):
        parts = server.parts(batch, lengths.mean_context)
        seconds = sum(map(float, parts.values()))
        words = f"{1e3 * seconds:.1f} ms, {batch / seconds:,.0f} tokens/s"
        rows.append((f"batch {batch}", [(float(parts[name]), shade) for name, shade in SHARES], words))
    picture.bars(10, 12, 620, rows, label=80)
    prompt = 1e3 * float(steady(server, lengths, 1).prefill)
    picture.text(10, 178, f"Prefill of 1,024 tokens beside one sequence: {prompt:.0f} ms, once a request.",
                 anchor="start")  # fmt: skip
    picture.legend(120, 203, [("products with weights", "blue"), ("KV cache", "orange"), ("launches, host", "grey")])
    return picture


def quantization_gate() -> Drawing:
    """A pipeline with a gate, and the bytes of Llama 3 8B by format of the weights, by the planner."""
    picture = Drawing(640, 300)
    steps = (("calibration\nset", "grey"), ("quantize,\nlayer by layer", "blue"), ("perplexity,\nsuites", "purple"),
             ("serve", "green"))  # fmt: skip
    for number, (words, shade) in enumerate(steps):
        picture.box(10 + number * 166, 12, 120, 50, words, shade)
        if number:
            picture.arrow((10 + number * 166 - 46, 37), (10 + number * 166, 37))
    picture.text(485, 30, "passed", size=11)
    picture.box(330, 104, 144, 34, "refused: not written", "red")
    picture.arrow((402, 62), (402, 104))
    picture.box(508, 104, 120, 34, "watch for drift", "orange")
    picture.arrow((568, 62), (568, 104))
    picture.arrow((568, 138), (568, 158), (70, 158), (70, 62), dashed=True)
    picture.text(248, 151, "drift: calibrate on newer traffic", size=11)
    rows = []
    for weights in ("bf16", "fp8", "int4"):
        server = deployed(weights)
        step = 1e3 * float(server.step(1, 1024))
        rows.append((weights, [(float(server.weight_bytes), "blue")],
                     f"{binary_bytes(server.weight_bytes)}, {step:.1f} ms a token"))  # fmt: skip
    picture.bars(10, 180, 620, rows, label=60)
    picture.text(10, 290, "Weights of Llama 3 8B and a decode step of one sequence on an H100; the head stays in bf16.",
                 anchor="start", size=12)  # fmt: skip
    return picture


PICTURES: dict[str, Callable[[], Drawing]] = {
    "decode_step_parts": decode_step_parts,
    "quantization_gate": quantization_gate,
}
