"""fp16 gradients below 6e-8 are zero. So the loss is scaled up before the backward pass, and gradients down after."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lmworks.learn import unfinished  # noqa: F401 - what is not written yet runs as the reference does


class LossScaler:
    """loss · scale is what goes backward; then `step`."""

    def __init__(self, scale: float = 65536.0, window: int = 2000) -> None:
        self.scale, self.window = scale, window
        self.good = 0  # steps without overflow since the scale last changed

    def step(self, optimizer: torch.optim.Optimizer, parameters: Sequence[torch.nn.Parameter]) -> bool:
        """Unscales the gradients and updates; False where one of them is not finite: then nothing is updated.

        After an overflow the scale is halved, after `window` good steps in a row it is doubled.
        """
        # exercise loss_scale(self, optimizer, parameters)
        grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if not all(bool(grad.isfinite().all()) for grad in grads):
            self.scale, self.good = self.scale / 2, 0
            return False
        for grad in grads:
            grad.div_(self.scale)
        optimizer.step()
        self.good += 1
        if self.good == self.window:
            self.scale, self.good = self.scale * 2, 0
        return True
        # end loss_scale
