"""Rotary position embedding in the rotate-half layout of Hugging Face, with the usual ways to stretch it.

A pair (x_i, x_{i+d/2}) of a head is turned by the angle position × frequency_i (`kernels.rope`); query · key then
depends on the distance alone. Stretching changes the frequencies: all (linear, ntk) or the slow ones more (yarn,
llama3), or each by a factor of its own (longrope). `dynamic` is ntk by as much as the longest position of a call asks
for, nothing within the original context; longrope has other factors where a call goes beyond it.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ..spec import ModelSpec


def frequencies(spec: ModelSpec, positions: Tensor, local: bool = False) -> tuple[Tensor, float]:
    """Angle per position of each pair, (rotary_dim / 2), and the factor on cos and sin (a temperature)."""
    dim, theta, scaling, device = spec.rotary_dim, spec.rope_theta, spec.rope_scaling, positions.device
    exponent = torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim
    if local:
        return 1.0 / spec.rope_local_theta**exponent, 1.0
    if scaling.type == "ntk":  # raise the base so that the slowest pair is stretched by `factor`, the fastest not
        theta *= scaling.factor ** (dim / (dim - 2))
    freqs = 1.0 / theta**exponent
    if scaling.type == "dynamic":  # a tensor: the host does not wait for the longest position
        length = (positions.max() + 1).clamp(min=scaling.original_context)
        stretch = scaling.factor * length / scaling.original_context - (scaling.factor - 1)
        return freqs / stretch ** (exponent * dim / (dim - 2)), 1.0
    if scaling.type == "longrope":  # Ding et al. 2024
        short, long = (torch.tensor(f, device=device) for f in (scaling.short_factor, scaling.long_factor))
        stretch = torch.where(positions.max() >= scaling.original_context, long, short)
        return freqs / stretch, scaling.temperature
    if scaling.type == "linear":
        return freqs / scaling.factor, 1.0
    if scaling.type == "llama3":
        # Turns within the original context: few → divide, many → keep, linear in between.
        turns = scaling.original_context * freqs / (2 * math.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        keep = ((turns - low) / (high - low)).clamp(0, 1)
        return freqs * (keep + (1 - keep) / scaling.factor), 1.0
    if scaling.type == "yarn":
        # The same idea, linear in the index of the pair (Peng et al. 2023, eq. 23 and 24).
        def pair_with(turns: float) -> float:
            return dim * math.log(scaling.original_context / (turns * 2 * math.pi)) / (2 * math.log(theta))

        low_pair, high_pair = pair_with(scaling.beta_fast), pair_with(scaling.beta_slow)
        if scaling.truncate:
            low_pair, high_pair = math.floor(low_pair), math.ceil(high_pair)
        low_pair, high_pair = max(low_pair, 0), min(high_pair, dim - 1)
        index = torch.arange(dim // 2, dtype=torch.float32, device=device)
        divide = ((index - low_pair) / (high_pair - low_pair or 1e-3)).clamp(0, 1)
        return freqs * ((1 - divide) + divide / scaling.factor), scaling.temperature
    return freqs, 1.0


def tables(spec: ModelSpec, positions: Tensor, local: bool = False) -> tuple[Tensor, Tensor]:
    """(cos, cos) and (−sin, sin) for `positions` (…, seq): each (…, seq, 1, rotary_width), broadcasting over heads.

    `local`: of layers with `model.rope_local_theta`. With `model.rope_fraction` the first pairs are turned, the others
    stay as they are.
    """
    freqs, temperature = frequencies(spec, positions, local)
    angles = (positions.unsqueeze(-1).float() * freqs).unsqueeze(-2)
    cos, sin = angles.cos() * temperature, angles.sin() * temperature
    if still := spec.rotary_width // 2 - freqs.shape[-1]:
        cos, sin = F.pad(cos, (0, still), value=1.0), F.pad(sin, (0, still))
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
