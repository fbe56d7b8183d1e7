"""Names for what a rank is doing, as nested ranges of a profiler: step, micro-batch, phase, layer, module.

    ProfilerStep#12 > micro_batch/0 > phase/forward > layer/3 > module/attention > module/attention.q

Phases come from `record.phase`, which calls its listeners; layers from wrapped blocks, modules from what is in them
(unless they are compiled) and around them; passes of a pipeline from its recorder. All of them are installed while
something records, and removed after it: a run that is not profiled executes none of this.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import set_checkpoint_early_stop

from ..parallel.parallel_model import ParallelModel
from ..record import phase

Range = Callable[[str], AbstractContextManager[Any]]
"""A name → a range of a profiler, e.g. torch.profiler.record_function."""

# Phases of `record.phase` by the words of a report; others keep their names.
WORDS = {"data": "input", "reduce": "communication"}


def phase_word(name: str) -> str:
    return "checkpoint" if name.startswith(("save.", "load.")) else WORDS.get(name, name)


class Spans:
    def __init__(self, make_range: Range, model: ParallelModel, modules: bool = False) -> None:
        self.make_range, self.model, self.modules = make_range, model, modules
        self.thread = threading.get_ident()  # a range ends in the thread that it began in
        self.open: list[AbstractContextManager[Any]] = []  # step, micro-batch, phase
        self.in_micro_batch = False
        self.step = -1
        self.micro_batches = 0  # of this step
        self.blocks: dict[nn.Module, Any] = {}  # block or module of one → what its call was
        self.checkpoints = ExitStack()
        self.backward: dict[int, tuple[str, AbstractContextManager[Any]]] = {}  # thread → the layer that it is in

    def install(self) -> None:
        phase.listeners.append(self.on_phase)
        for part in self.model.parts.values():
            for name, block in part.blocks.items():
                if self.modules and block._compiled_call_impl is None:
                    self.wrap_modules(dict(block.named_modules()))
                self.wrap(block, f"layer/{name}")
            if self.modules:
                ends = {name: module for name, module in part.named_children() if name != "blocks"}
                self.wrap_modules(ends)
        if any(call is not None for call in self.blocks.values()):
            # torch 2.11 loses the exception that ends a recomputation early while a profiler records. A compiled block
            # saves its tensors when it is done, so nothing is left to save by ending early.
            self.checkpoints.enter_context(set_checkpoint_early_stop(False))
        if self.model.pipeline is not None:
            self.stage_recorder = self.model.pipeline.recorder
            self.model.pipeline.recorder = PipelineRanges(self.make_range)

    def remove(self) -> None:
        self.end(0)
        phase.listeners.remove(self.on_phase)
        for block, call in self.blocks.items():
            block._compiled_call_impl = call
        self.blocks.clear()
        self.checkpoints.close()
        if self.model.pipeline is not None:
            self.model.pipeline.recorder = self.stage_recorder

    # --- step, micro-batch, phase -------------------------------------------------------------------------

    def begin_step(self, number: int) -> None:
        """Ends the step before: what follows its update (evaluation, a checkpoint) belongs to it.

        A step whose passes are launched behind the update of the one before begins with them.
        """
        if number == self.step:
            return
        self.step = number
        self.end(0)
        self.micro_batches = 0
        self.begin(f"ProfilerStep#{number}")  # as torch.profiler names them, for other tools

    def on_phase(self, name: str, _step: int) -> None:
        if threading.get_ident() != self.thread or not self.open:
            return
        self.end(2 if self.in_micro_batch and name == "backward" else 1)
        if name == "forward" and self.model.pipeline is not None:
            name = "forward_backward"  # stages alternate
        elif name == "forward":
            self.begin(f"micro_batch/{self.micro_batches}")
            self.micro_batches += 1
            self.in_micro_batch = True
        self.begin(f"phase/{phase_word(name)}")

    def begin(self, name: str) -> None:
        entered = self.make_range(name)
        entered.__enter__()
        self.open.append(entered)

    def end(self, depth: int) -> None:
        """Ends the innermost ranges until `depth` are open."""
        while len(self.open) > depth:
            self.open.pop().__exit__(None, None, None)
        if depth < 2:
            self.in_micro_batch = False

    # --- layers -------------------------------------------------------------------------------------------

    def wrap(self, block: nn.Module, name: str) -> None:
        """Around hooks and compiled code, as nn.Module.__call__ finds it: hooks would change a compiled block."""
        call: Callable[..., Any] = block._compiled_call_impl or block._call_impl

        def named(x: Tensor, *args: Any, **options: Any) -> Any:
            with self.make_range(name):
                out = call(x, *args, **options)
            if x.requires_grad and isinstance(out, Tensor) and out.requires_grad:
                out.register_hook(lambda _grad: self.begin_backward(name))
                x.register_hook(lambda _grad: self.end_backward(name))
            return out

        self.blocks[block] = block._compiled_call_impl
        block._compiled_call_impl = named

    def wrap_modules(self, modules: dict[str, nn.Module]) -> None:
        """By their names within a block, or within the network; the block itself, named "", is wrapped by `wrap`."""
        for name, module in modules.items():
            if name and module not in self.blocks:
                call: Callable[..., Any] = module._compiled_call_impl or module._call_impl
                self.blocks[module] = module._compiled_call_impl
                module._compiled_call_impl = self.named_call(call, f"module/{name}")

    def named_call(self, call: Callable[..., Any], name: str) -> Callable[..., Any]:
        def named(*args: Any, **options: Any) -> Any:
            with self.make_range(name):
                return call(*args, **options)

        return named

    def begin_backward(self, name: str) -> None:
        """The gradient of a layer's output is known. The layer above ends here: its own hook comes after this one."""
        self.end_backward()
        entered = self.make_range(f"{name} backward")
        entered.__enter__()
        self.backward[threading.get_ident()] = name, entered

    def end_backward(self, name: str | None = None) -> None:
        thread = threading.get_ident()
        if thread in self.backward and name in (None, self.backward[thread][0]):
            self.backward.pop(thread)[1].__exit__(None, None, None)


class PipelineRanges:
    """The recorder of a pipeline's stages: `stage/1 F 0` is the forward pass of micro-batch 0."""

    def __init__(self, make_range: Range) -> None:
        self.make_range = make_range

    def note(self, stage: int, kind: str, micro_batch: int) -> AbstractContextManager[Any]:
        return self.make_range(f"stage/{stage} {kind} {micro_batch}")
