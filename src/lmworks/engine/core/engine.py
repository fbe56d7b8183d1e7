"""The engine: takes requests, runs steps, gives back pieces of answers.

It works one step ahead of what it knows: step k + 1 is launched before the tokens of step k are read, so that the
device never waits for the host. A token that is not read yet is UNKNOWN here and lies in a table of the device.
A sequence that turns out to have ended with step k has its token of step k + 1 dropped; its blocks can be given away
at once, for the device works in order. Where the next step depends on the tokens themselves (a grammar, guesses to
judge or to make), they are read first; a runner that computes at once (`synchronous`) is read at once.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from ...data.tokenizer import Tokenizer
from ...spec import EngineSpec, LMWorksError, SpecError
from ..grammars.grammar import Grammars
from . import sampler
from .admission import check_kv_capacity, check_params, check_prompt
from .block_manager import IntegrityError
from .metrics import Metrics
from .output_processor import FinishReason, attach_detokenizer_and_grammar, close, no_token_error, push, refusal, result
from .request import PLACEHOLDER_TOKEN, Logprob, OutputDelta, Request, Sequence, SequenceStatus
from .sampling_params import SEEDS
from .scheduler import Chunk, Scheduler, Step
from .step_output import PromptLogprobs, TokenOutput

DRIVEN = "an AsyncEngine drives it; ask that one, or close it first"
NEXT_SEED = 0x1E3779B97F4A7C15  # between the seeds of a request's answers: odd, so all differ


class StepOutput(Protocol):
    def read(self) -> list[TokenOutput]:
        """Waits for the step; in the order of its chunks that want logits."""
        ...

    def prompt_logprobs(self) -> list[PromptLogprobs]:
        """What the step computed of prompts whose log-probabilities are asked for."""
        ...


class RunnerProtocol(Protocol):
    """What the engine asks of a runner."""

    spec: EngineSpec  # zeros filled in
    blocks: int
    valid_vocab: int
    synchronous: bool  # launch computes at once: there is nothing to run ahead of
    grammars: Grammars | None  # given by the engine, where it has a tokenizer

    def admit(self, sequence: Sequence) -> None: ...
    def launch(self, step: Step) -> StepOutput: ...
    def add_adapter(self, name: str, folder: Path) -> None: ...
    def lost(self) -> str:
        """Why no step can be taken any more; empty where that is not known."""
        ...

    def close(self) -> None: ...


class Speculator(Protocol):
    def active(self, running: list[Sequence]) -> bool:
        """Whether the next step should wait for tokens that are under way, for guesses to follow them."""
        ...

    def propose(self, running: list[Sequence]) -> None:
        """Sets their guesses; those whose tokens are not all known get none."""
        ...


@dataclass(frozen=True)
class InFlightStep:
    """A step that is under way."""

    step: Step
    launched: StepOutput
    discarded: set[Sequence] = field(default_factory=set)  # whose tokens of this step are not taken


class Engine:
    def __init__(
        self,
        runner: RunnerProtocol,
        tokenizer: Tokenizer | None = None,
        eos: Iterable[int] = (),
        seed: int | None = None,
        speculator: Speculator | None = None,
    ) -> None:
        """`eos`: tokens that end an answer beside the tokenizer's. `seed`: of requests that bring none."""
        self.runner = runner
        self.spec = runner.spec
        self.tokenizer = tokenizer
        self.eos = tuple(dict.fromkeys([*([] if tokenizer is None else [tokenizer.eot]), *eos]))
        runner.grammars = None if tokenizer is None else Grammars(tokenizer, runner.valid_vocab, self.eos)
        self.seeds = random.Random(seed)
        self.speculator = speculator
        self.scheduler = Scheduler(runner.spec, runner.blocks)
        self.adapters: set[str] = set()  # names that requests may ask for
        self.metrics = Metrics()
        self.requests: dict[int, Request] = {}  # those under way, by id
        self.structured: set[int] = set()  # those of them that a grammar guides
        self.in_flight: InFlightStep | None = None
        self.pending_outputs: list[OutputDelta] = []
        self.failure: BaseException | None = None
        self.driver: object | None = None  # who alone may step it: each piece is given out once

    @property
    def busy(self) -> bool:
        """Whether another step would bring something."""
        return bool(self.requests or self.in_flight or self.pending_outputs)

    def check(self, request: Request) -> None:
        """Raises SpecError where the request could never be served."""
        if request.id in self.requests:
            raise SpecError(f"a request with id = {request.id} is under way already")
        check_prompt(request, self.runner.valid_vocab, self.spec.context)
        check_kv_capacity(request, self.limit(request), self.spec.block, self.runner.blocks)
        check_params(request, self.adapters, self.tokenizer is not None)
        sampler.check(request.params, self.runner.valid_vocab)

    def add_adapter(self, name: str, folder: Path) -> None:
        """A LoRA adapter, as PEFT writes it: requests then ask for it by `name`."""
        self.runner.add_adapter(name, folder)
        self.adapters.add(name)

    def drive(self, driver: object) -> None:
        """From now on `driver` alone steps it, until it sets `driver` to None."""
        if self.driver is not None or self.requests:
            raise LMWorksError(f"the engine is at work for somebody else: {DRIVEN if self.driver else 'wait for that'}")
        self.driver = driver

    def close(self) -> None:
        """Ends what the runner has started; nothing can be asked of it afterwards."""
        self.runner.close()

    def limit(self, request: Request) -> int:
        return min(len(request.prompt) + request.params.max_tokens, self.spec.context)

    def add(self, request: Request) -> None:
        """Takes a request in. One that could never be served is answered with an error by the next step."""
        try:
            self.check(request)
            self.begin(request)
        except LMWorksError as error:
            self.pending_outputs.append(refusal(request, str(error)))
            return
        self.requests[request.id] = request
        if request.params.structured:
            self.structured.add(request.id)
        self.scheduler.add(request.sequences)
        self.metrics.prompt_tokens += len(request.prompt)

    def begin(self, request: Request) -> None:
        """Its sequences, one for each answer."""
        params = request.params
        request.ends = tuple(dict.fromkeys([*params.stop_token_ids, *(() if params.ignore_eos else self.eos)]))
        seed = self.seeds.randrange(SEEDS) if params.seed is None else params.seed
        sequences = [
            Sequence(
                request,
                index,
                (seed + index * NEXT_SEED) % SEEDS,
                list(request.prompt),
                len(request.prompt),
                self.limit(request),
            )
            for index in range(params.answers)
        ]
        for sequence in sequences:
            attach_detokenizer_and_grammar(sequence, self.tokenizer, self.runner.grammars)
        request.sequences = sequences
        if params.prompt_logprobs is not None:
            request.prompt_logprobs = [None] * len(request.prompt)  # the first stays so: nothing comes before it

    def cancel(self, request_id: int) -> bool:
        """Ends a request at once; false if it is not under way (any more)."""
        request = self.requests.get(request_id)
        if request is None:
            return False
        for sequence in request.sequences:
            if sequence.state is not SequenceStatus.FINISHED:
                self.finish(sequence, FinishReason("cancelled"))
        return True

    def step(self) -> list[OutputDelta]:
        """Launches a step, reads the one before it, and returns what that brought."""
        if self.failure is not None:
            raise LMWorksError(f"the engine has stopped after an error: {self.failure}") from self.failure
        try:
            self.advance()
        except BaseException as error:
            self.failure = error
            raise
        deltas, self.pending_outputs = self.pending_outputs, []
        return deltas

    def run(self) -> list[OutputDelta]:
        """Steps until nothing is left to do; the last pieces of all requests, in the order they ended."""
        last = []
        while self.busy:
            last += [delta for delta in self.step() if delta.result is not None]
        return last

    def advance(self) -> None:
        if self.in_flight is not None and self.needs_tokens(self.in_flight.step):
            self.read_in_flight()
        if self.speculator is not None:
            self.speculator.propose(self.scheduler.running)
        step = self.scheduler.schedule()
        before, self.in_flight = self.in_flight, None
        if step.chunks:
            now = time.monotonic()
            for sequence in self.scheduler.admitted:
                self.runner.admit(sequence)
                self.metrics.note_start(sequence.request, now)
            self.in_flight = InFlightStep(step, self.runner.launch(step))
        elif before is None and self.scheduler.waiting:
            raise IntegrityError(f"{len(self.scheduler.waiting)} answers wait, nothing runs, and none can be let in")
        if before is not None:
            self.take(before)
        if self.runner.synchronous:
            self.read_in_flight()
        self.metrics.note_step(step, self.scheduler)
        if not self.requests and self.in_flight is None:
            self.scheduler.pool.check(self.scheduler.running)

    def needs_tokens(self, under_way: Step) -> bool:
        """Whether the next step is not made before the tokens of the one under way are known."""
        if self.structured or self.speculator is None:
            return bool(self.structured)
        drafted = any(chunk.wanted > 1 for chunk in under_way.chunks)
        return drafted or self.speculator.active(self.scheduler.running)

    def read_in_flight(self) -> None:
        """Reads the step that is under way."""
        in_flight, self.in_flight = self.in_flight, None
        if in_flight is not None:
            self.take(in_flight)

    def take(self, in_flight: InFlightStep) -> None:
        picks = in_flight.launched.read()
        for found in in_flight.launched.prompt_logprobs():
            self.record_prompt_logprobs(found)
        now = time.monotonic()
        wanting = (chunk for chunk in in_flight.step.chunks if chunk.wanted)
        for chunk, token_output in zip(wanting, picks, strict=True):
            if chunk.sequence.state is not SequenceStatus.FINISHED and chunk.sequence not in in_flight.discarded:
                self.accept(chunk, token_output, now)

    def record_prompt_logprobs(self, found: PromptLogprobs) -> None:
        """A prompt that is computed again, after a preemption, gives the same ones again."""
        request = found.sequence.request
        request.prompt_logprobs[found.first : found.first + len(found.logprobs)] = found.logprobs

    def accept(self, chunk: Chunk, token_output: TokenOutput, now: float) -> None:
        """Tokens of a sequence have become known."""
        sequence = chunk.sequence
        if token_output.bad:
            self.reject(sequence)
            return
        place = chunk.place
        if chunk.wanted > 1:
            # Guesses that were refused lie in the cache behind `computed`, and are written over.
            sequence.computed = chunk.start + len(token_output.tokens)
            sequence.tokens[place:] = [PLACEHOLDER_TOKEN] * len(token_output.tokens)
            self.metrics.proposed_guesses += chunk.wanted - 1
            self.metrics.accepted_guesses += len(token_output.tokens) - 1
        shown, ending, taken = "", None, 0
        for token in token_output.tokens:
            sequence.tokens[place + taken] = token
            taken += 1
            sequence.known = place + taken
            text, ending = push(sequence, token)
            shown += text
            if ending is not None:
                break
        logprobs = (token_output.logprobs or [])[:taken]
        sequence.logprobs += logprobs
        self.metrics.note_tokens(sequence, taken, now)
        if ending is not None:
            self.finish(sequence, ending, token_output.tokens[:taken], shown, logprobs)
        elif sequence.request.stream:
            self.pending_outputs.append(
                OutputDelta(sequence.request, sequence.index, token_output.tokens[:taken], shown, logprobs)
            )

    def reject(self, sequence: Sequence) -> None:
        """No token could be picked for it. Where that may be the fault of what others had computed, it tries once more.

        A token that makes everything NaN spoils those before it, too, if they are computed in one step: a product with
        a probability of zero is still NaN. So an answer may have found blocks that another one's token has spoilt.
        """
        self.scheduler.pool.discard(sequence)
        lost = sequence.matcher is not None and sequence.matcher.error is not None  # a grammar that is not followed
        if lost or not sequence.given or sequence.alone:
            self.finish(sequence, no_token_error(sequence.matcher))
            return
        self.scheduler.again(sequence)
        if self.in_flight is not None:
            self.in_flight.discarded.add(sequence)

    def finish(
        self,
        sequence: Sequence,
        ending: FinishReason,
        tokens: list[int] | None = None,
        shown: str = "",
        logprobs: list[Logprob] | None = None,
    ) -> None:
        """An answer has ended; with the last one, so has its request."""
        request = sequence.request
        self.scheduler.finish(sequence)
        shown += close(sequence, ending, self.tokenizer)
        self.metrics.finished[ending.reason] = self.metrics.finished.get(ending.reason, 0) + 1
        over = all(each.done is not None for each in request.sequences)
        if over:
            del self.requests[request.id]
            self.structured.discard(request.id)
            self.metrics.note_end(request)
        if over or request.stream:
            outcome = result(request) if over else None
            self.pending_outputs.append(
                OutputDelta(request, sequence.index, tokens or [], shown, logprobs or [], ending.reason, outcome)
            )
