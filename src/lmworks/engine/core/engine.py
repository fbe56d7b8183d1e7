"""The engine: accepts requests, runs steps, returns output deltas.

It runs one step ahead of the host: step k + 1 is launched before the tokens of step k are read, so that the device
never waits for the host. A token that is not read yet is PLACEHOLDER_TOKEN here; its value is on the device. If a
sequence turns out to have finished with step k, its token of step k + 1 is dropped; its blocks can be reused at once,
for the device executes in order. Where the next step depends on the tokens themselves (a grammar, bad words,
draft tokens to propose or to verify), they are read first; the output of a `synchronous` runner is read at once.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Protocol

from ...data.tokenizer import Tokenizer
from ...spec import EngineSpec, LMWorksError, SpecError
from ...spec.errors import did_you_mean
from ..grammars.grammar import Grammars
from ..lora.adapter_store import AdapterStore
from ..lora.digest import adapter_digest
from . import sampler
from .block_events import PrefixTiers
from .block_manager import IntegrityError
from .metrics import Metrics
from .output_processor import FinishReason, attach_detokenizer_and_grammar, close, no_token_error, push, refusal, result
from .request import (
    PLACEHOLDER_TOKEN,
    Logprob,
    OutputDelta,
    Request,
    Sequence,
    SequenceStatus,
    check_generated,
    check_head,
    check_kv_capacity,
    check_params,
    check_prompt,
    truncated,
)
from .sampling_params import SEEDS
from .scheduler import Chunk, Scheduler, Step
from .sleep import ASLEEP
from .step_output import PromptLogprobs, StepTokens, record_pooled
from .token_filter import token_filter

DRIVEN = "an AsyncEngine runs it; send requests to that, or close it first"
FETCH_POLL_S = 0.05  # an engine that only waits for blocks of a store looks after requests so often
NEXT_SEED = 0x1E3779B97F4A7C15  # between the seeds of a request's answers: odd, so all differ


class StepOutput(Protocol):
    def read(self) -> StepTokens:
        """Wait for the step; the tokens of its chunks that need logits, in order."""
        ...

    def prompt_logprobs(self) -> list[PromptLogprobs]:
        """The prompt log-probabilities that the step computed."""
        ...

    def pooled_states(self) -> list[tuple[Request, bool, list[float]]]:
        """Of requests with `pooling`: the state of its last token, or the sum over a chunk, and whether it is the
        first chunk.
        """
        ...


class RunnerProtocol(Protocol):
    """The model runner as the engine uses it."""

    spec: EngineSpec  # resolved: no zeros
    blocks: int
    valid_vocab: int
    hidden: int  # numbers of a token's state
    scalar_head: bool  # of a reward model: prompts get scores, and no answers
    context_of_token: float  # keys whose attention takes as long as the matrix products of one token
    synchronous: bool  # launch returns when the step is done
    grammars: Grammars | None  # set by the engine, where it has a tokenizer

    def admit(self, sequence: Sequence) -> None: ...
    def launch(self, step: Step) -> StepOutput: ...
    def add_adapter(self, name: str, folder: Path) -> None: ...
    def remove_adapter(self, name: str) -> None: ...
    def sleep(self) -> int:
        """Release the memory of the KV cache; returns its bytes."""
        ...

    def wake(self) -> int:
        """Take it again; returns how many CUDA graphs have to be captured again."""
        ...

    def failed_worker(self) -> str:
        """Which worker has failed, and why; empty if none has."""
        ...

    def close(self) -> None: ...


class Speculator(Protocol):
    def active(self, running: list[Sequence]) -> bool:
        """Whether to read the tokens in flight before the next step, so that draft tokens can follow them."""
        ...

    def propose(self, running: list[Sequence]) -> None:
        """Set their draft tokens; none for sequences with unread tokens."""
        ...


@dataclass(frozen=True)
class InFlightStep:
    """A step that was launched and not read yet."""

    step: Step
    launched: StepOutput
    discarded: set[Sequence] = field(default_factory=set)  # whose tokens of this step are ignored


class Engine:
    def __init__(
        self,
        runner: RunnerProtocol,
        tokenizer: Tokenizer | None = None,
        eos: Iterable[int] = (),
        seed: int | None = None,
        speculator: Speculator | None = None,
        tiers: PrefixTiers | None = None,
    ) -> None:
        """`eos`: end-of-text tokens beside the tokenizer's. `seed`: for requests without one.

        `tiers`: where blocks of the prefix cache are kept beside the device.
        """
        self.runner = runner
        self.spec = runner.spec
        self.tokenizer = tokenizer
        self.eos = tuple(dict.fromkeys([*([] if tokenizer is None else [tokenizer.eot]), *eos]))
        runner.grammars = None if tokenizer is None else Grammars(tokenizer, runner.valid_vocab, self.eos)
        self.seeds = random.Random(seed)
        self.speculator = speculator
        self.tiers = tiers
        self.scheduler = Scheduler(runner.spec, runner.blocks, tiers, runner.context_of_token)
        self.adapters: set[str] = set()  # by name
        self.adapter_store = (
            AdapterStore(Path(self.spec.adapter_store), self.spec.warm_adapters) if self.spec.adapter_store else None
        )
        self.cold: list[Request] = []  # wait for room for their adapters, in order of arrival
        self.adapter_digests: dict[str, bytes] = {}  # of all that were ever loaded, by name
        self.leaving_adapters: set[str] = set()  # unloaded when the requests under way have finished with them
        self.metrics = Metrics()
        self.requests: dict[int, Request] = {}  # unfinished, by id
        self.masked_requests: set[int] = set()  # ids of requests whose allowed tokens depend on those before
        self.in_flight: InFlightStep | None = None
        self.pending_outputs: list[OutputDelta] = []
        self.asleep = False  # without a KV cache: requests are refused
        self.failure: BaseException | None = None
        self.driver: object | None = None  # the only caller that may step it: each delta is returned once

    @property
    def adapter_names(self) -> set[str]:
        """That requests may name: loaded ones, and those of the store."""
        return self.adapters | (self.adapter_store.names if self.adapter_store is not None else frozenset())

    @property
    def busy(self) -> bool:
        """Whether there is work for another step."""
        return bool(self.requests or self.in_flight or self.pending_outputs)

    def check(self, request: Request) -> None:
        """Raise SpecError if the request could never be served."""
        if request.id in self.requests:
            raise SpecError(f"a request with id = {request.id} is running already")
        check_prompt(request, self.runner.valid_vocab, self.spec.context)
        check_kv_capacity(request, self.limit(request), self.spec.block, self.runner.blocks)
        check_generated(request, self.runner.valid_vocab, self.limit(request))
        check_params(request, self.adapter_names, self.tokenizer is not None)
        check_head(request, self.runner.scalar_head)
        if request.kv_remote is not None and request.kv_remote not in self.spec.kv_peers:
            raise SpecError(f"{request.kv_remote!r:.80} is not one of the servers of engine.kv_peers")
        sampler.check(request.params, self.runner.valid_vocab)

    def add_adapter(self, name: str, folder: Path) -> None:
        """Load a LoRA adapter in PEFT's format; requests select it by `name`."""
        self.drop_adapters()
        if name in self.leaving_adapters:
            raise LMWorksError(f"requests under way still use the adapter {name!r} that was unloaded: try again")
        digest = adapter_digest(folder)
        self.runner.add_adapter(name, folder)
        if self.adapter_digests.get(name, digest) != digest:  # the prefixes are of another adapter of this name
            self.scheduler.block_manager.reset_prefix_cache()
        self.adapter_digests[name] = digest
        if self.tiers is not None:
            self.tiers.add_adapter(name, digest)
        self.adapters.add(name)
        self.metrics.warm_adapters = dict.fromkeys(sorted(self.adapters), 1)

    def remove_adapter(self, name: str) -> None:
        """No new request can name it; it is unloaded when those under way have finished with it."""
        if name not in self.adapters:
            raise SpecError(f"adapter {name!r} is not loaded{did_you_mean(name, self.adapters)}")
        self.adapters.discard(name)
        self.metrics.warm_adapters = dict.fromkeys(sorted(self.adapters), 1)
        if self.adapter_store is not None:
            self.adapter_store.warm.pop(name, None)
        self.leaving_adapters.add(name)
        self.drop_adapters()

    def warm_up(self, request: Request) -> bool:
        """Load its adapter from the store, for the one that was used least recently; false: all others are in use."""
        name, store = request.params.adapter, self.adapter_store
        if name is None or store is None or (name in self.adapters and name not in store.warm):
            return True
        if name not in self.adapters:
            if store.full:
                victim = store.victim(self.used_adapters())
                if victim is None:
                    return False
                self.remove_adapter(victim)
            if name in self.leaving_adapters:
                return False
            self.add_adapter(name, store.folder(name))
            store.loads += 1
            self.metrics.adapter_loads = store.loads
        store.use(name)
        return True

    def admit_cold(self) -> None:
        """Requests whose adapters there is room for now."""
        for request in list(self.cold):
            try:
                if not self.warm_up(request):
                    return
            except LMWorksError as error:
                self.cold.remove(request)
                self.refuse(request, str(error))
                continue
            self.cold.remove(request)
            self.start(request)

    def drop_adapters(self) -> None:
        """Unload adapters that no request uses any more."""
        for name in self.leaving_adapters - self.used_adapters():
            self.runner.remove_adapter(name)
            self.leaving_adapters.discard(name)

    def used_adapters(self) -> set[str | None]:
        """Of requests under way, those that wait for theirs aside."""
        cold = {id(request) for request in self.cold}
        used = {request.params.adapter for request in self.requests.values() if id(request) not in cold}
        if self.in_flight is not None:
            used |= {chunk.sequence.params.adapter for chunk in self.in_flight.step.chunks}
        return used

    def reset_prefix_cache(self) -> None:
        """Cached prefixes are found no more; sequences keep the blocks that they hold. A shared store is left alone."""
        self.scheduler.block_manager.reset_prefix_cache()
        if self.tiers is not None:
            self.tiers.clear()

    def weights_changed(self) -> None:
        """Forget keys and values of the weights before: the prefix cache. No request may be running."""
        if self.requests or self.in_flight:
            raise LMWorksError("the weights of an engine cannot change while requests are running")
        self.scheduler.block_manager.reset_prefix_cache()

    def sleep(self) -> int:
        """Release the memory of the KV cache, cached prefixes with it; returns its bytes. No request may be running."""
        if self.driver is not None:
            raise LMWorksError(f"the engine is in use: {DRIVEN}")
        if self.requests or self.in_flight:
            raise LMWorksError("an engine cannot sleep while requests are running: let them finish, or cancel them")
        self.scheduler.block_manager.reset_prefix_cache()
        if self.tiers is not None:
            self.tiers.settle()
        released = self.runner.sleep()
        self.asleep = True
        return released

    def wake(self) -> None:
        """Take the memory of the KV cache again; where there is too little, it raises and the engine stays asleep."""
        self.metrics.graph_recaptures += self.runner.wake()
        self.asleep = False

    def drive(self, driver: object) -> None:
        """Make `driver` the only caller that steps the engine, until it sets `driver` to None."""
        if self.driver is not None or self.requests:
            raise LMWorksError(f"the engine is in use: {DRIVEN if self.driver else 'wait for its requests'}")
        self.driver = driver

    def close(self) -> None:
        """Stop the runner's workers. The engine cannot be used afterwards."""
        if self.tiers is not None:
            self.tiers.close()
        self.runner.close()

    def limit(self, request: Request) -> int:
        return min(len(request.prompt) + request.params.max_tokens, self.spec.context)

    def add(self, request: Request) -> None:
        """Add a request. One that could never be served gets an error delta from the next step."""
        try:
            if self.asleep:
                raise LMWorksError(ASLEEP)
            request.prompt = truncated(request.prompt, request.params, self.spec.context)
            self.check(request)
            ready = not self.cold and self.warm_up(request)
            self.create_sequences(request)
        except LMWorksError as error:
            self.pending_outputs.append(refusal(request, str(error)))
            return
        self.requests[request.id] = request
        self.metrics.prompt_tokens += len(request.prompt)
        if ready:
            self.start(request)
        else:
            self.cold.append(request)

    def refuse(self, request: Request, reason: str) -> None:
        """One that had been accepted."""
        del self.requests[request.id]
        request.sequences = []
        self.pending_outputs.append(refusal(request, reason))

    def start(self, request: Request) -> None:
        if request.params.structured or request.params.bad_words:
            self.masked_requests.add(request.id)
        self.scheduler.add(request.sequences)
        for sequence, tokens in zip(request.sequences, request.generated, strict=False):
            if tokens:
                self.replay(sequence, tokens)

    def create_sequences(self, request: Request) -> None:
        """One sequence for each answer."""
        params = request.params
        request.end_token_ids = tuple(dict.fromkeys([*params.stop_token_ids, *(() if params.ignore_eos else self.eos)]))
        ruled_out = token_filter(params, self.tokenizer, self.runner.valid_vocab)
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
            sequence.token_filter = ruled_out
        request.sequences = sequences
        if params.prompt_logprobs is not None:
            request.prompt_logprobs = [None] * len(request.prompt)  # the first token has none

    def replay(self, sequence: Sequence, tokens: list[int]) -> None:
        """Take tokens that another engine sampled, as after a preemption here: text, stop strings and grammar advance.

        They are one delta. The next token is sampled at its own position: with a seed it is the one that the other
        engine would have sampled.
        """
        shown, ending = "", None
        for token in tokens:
            sequence.tokens.append(token)
            sequence.num_known_tokens += 1
            text, ending = push(sequence, token)
            shown += text
            if ending is not None:
                break
        if ending is None:
            self.pending_outputs.append(OutputDelta(sequence.request, sequence.index, tokens, shown))
        else:
            self.finish(sequence, ending, tokens, shown)

    def cancel(self, request_id: int) -> bool:
        """Abort a request; false if it has finished or is unknown."""
        request = self.requests.get(request_id)
        if request is None:
            return False
        if request in self.cold:
            self.cold.remove(request)
            self.scheduler.add(request.sequences)
        for sequence in request.sequences:
            if sequence.state is not SequenceStatus.FINISHED:
                self.finish(sequence, FinishReason("cancelled"))
        return True

    def step(self) -> list[OutputDelta]:
        """Launch a step, read the one before it, and return the new output deltas."""
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
        """Step until all requests have finished; their last deltas, in order of completion."""
        last = []
        while self.busy:
            last += [delta for delta in self.step() if delta.result is not None]
        return last

    def advance(self) -> None:
        if self.in_flight is not None and self.needs_tokens(self.in_flight.step):
            self.read_in_flight()
        if self.cold:
            self.admit_cold()
        if self.speculator is not None:
            self.speculator.propose(self.scheduler.running)
        step = self.scheduler.schedule()
        before, self.in_flight = self.in_flight, None
        if self.leaving_adapters and before is None:
            self.drop_adapters()
        if step.chunks:
            now = time.monotonic()
            for sequence in self.scheduler.admitted:
                self.runner.admit(sequence)
                self.metrics.note_start(sequence.request, now)
            if self.tiers is not None:
                self.tiers.before_launch()
            self.in_flight = InFlightStep(step, self.runner.launch(step))
        elif before is None and self.scheduler.is_fetching():
            self.scheduler.wait_for_fetch(FETCH_POLL_S)
        elif before is None and self.scheduler.waiting:
            raise IntegrityError(f"{len(self.scheduler.waiting)} sequences wait, none runs, and none can be admitted")
        if before is not None:
            self.process_output(before)
        if self.runner.synchronous:
            self.read_in_flight()
        if self.tiers is not None:
            self.tiers.after_launch()
        self.metrics.note_step(step, self.scheduler)
        if not self.requests and self.in_flight is None:
            self.scheduler.block_manager.check(self.scheduler.running)

    def needs_tokens(self, step: Step) -> bool:
        """Whether the tokens in flight must be read before the next step is scheduled."""
        if self.masked_requests or self.speculator is None:
            return bool(self.masked_requests)
        drafted = any(chunk.num_logits > 1 for chunk in step.chunks)
        return drafted or self.speculator.active(self.scheduler.running)

    def read_in_flight(self) -> None:
        """Read the step in flight, if there is one."""
        in_flight, self.in_flight = self.in_flight, None
        if in_flight is not None:
            self.process_output(in_flight)

    def process_output(self, in_flight: InFlightStep) -> None:
        found = in_flight.launched.read()
        for prompt_logprobs in in_flight.launched.prompt_logprobs():
            self.record_prompt_logprobs(prompt_logprobs)
        for request, first, state in in_flight.launched.pooled_states():
            record_pooled(request, first, state)
        chunks, discarded, bad = in_flight.step.sampling_chunks, in_flight.discarded, found.bad
        ends = range(1, len(chunks) + 1) if found.counts is None else accumulate(found.counts)
        tokens, logprobs = found.tokens, found.logprobs
        now, begin = time.monotonic(), 0
        previous_times: list[float] = []  # of the sequences of inner tokens: when the token before came
        for index, (chunk, end) in enumerate(zip(chunks, ends, strict=True)):
            sequence, at = chunk.sequence, chunk.start + 1
            if sequence.state is SequenceStatus.FINISHED or (discarded and sequence in discarded):
                pass
            elif bad and index in bad:
                self.handle_invalid_logits(sequence)
            elif (
                # Almost all tokens of a large batch are inner ones, and are only appended: neither the first nor the
                # last of an answer, and nothing of it is emitted or matched yet.
                at < sequence.inner_limit
                and chunk.count == 1
                and (token := tokens[begin]) not in sequence.request.end_token_ids
            ):
                sequence.tokens[at] = token
                sequence.num_known_tokens = at + 1
                if sequence.top_logprobs is not None:
                    sequence.logprobs.append(logprobs[begin])
                previous_times.append(sequence.last_token_time)
                sequence.last_token_time = now
            else:
                self.append_tokens(chunk, tokens[begin:end], logprobs[begin:end], now)
            begin = end
        self.metrics.note_inner_tokens(previous_times, now)

    def record_prompt_logprobs(self, found: PromptLogprobs) -> None:
        """A prompt that is recomputed after a preemption gives the same values again."""
        request = found.sequence.request
        request.prompt_logprobs[found.first : found.first + len(found.logprobs)] = found.logprobs

    def append_tokens(self, chunk: Chunk, tokens: list[int], logprobs: list[Logprob], now: float) -> None:
        """Append the sampled tokens of a chunk to its sequence."""
        sequence, index = chunk.sequence, chunk.output_index
        if chunk.num_logits > 1:
            # Rejected draft tokens lie in the cache beyond num_computed_tokens, and are overwritten.
            sequence.num_computed_tokens = chunk.start + len(tokens)
            sequence.tokens[index:] = [PLACEHOLDER_TOKEN] * len(tokens)
            self.metrics.proposed_guesses += chunk.num_logits - 1
            self.metrics.accepted_guesses += len(tokens) - 1
        text_delta, ending, num_taken = "", None, 0
        for token in tokens:
            sequence.tokens[index + num_taken] = token
            num_taken += 1
            sequence.num_known_tokens = index + num_taken
            text, ending = push(sequence, token)
            text_delta += text
            if ending is not None:
                break
        logprobs = [] if sequence.top_logprobs is None else logprobs[:num_taken]
        sequence.logprobs += logprobs
        self.metrics.note_tokens(sequence, num_taken, now)
        if not sequence.token_by_token:
            sequence.inner_limit = sequence.limit - 1
        if ending is not None:
            self.finish(sequence, ending, tokens[:num_taken], text_delta, logprobs)
        elif sequence.request.stream:
            self.pending_outputs.append(
                OutputDelta(sequence.request, sequence.index, tokens[:num_taken], text_delta, logprobs)
            )

    def handle_invalid_logits(self, sequence: Sequence) -> None:
        """No token could be sampled. If shared blocks may be the cause, recompute the sequence once without them.

        A token whose values are NaN also corrupts those before it in the same step: NaN times a probability of zero is
        NaN. So a sequence may have matched blocks that another one has corrupted.
        """
        self.scheduler.block_manager.uncache(sequence)
        lost = sequence.matcher is not None and sequence.matcher.error is not None  # the grammar was violated
        if lost or not sequence.num_shared_tokens or sequence.skip_prefix_cache:
            self.finish(sequence, no_token_error(sequence))
            return
        self.scheduler.recompute_uncached(sequence)
        if self.in_flight is not None:
            self.in_flight.discarded.add(sequence)

    def finish(
        self,
        sequence: Sequence,
        ending: FinishReason,
        tokens: list[int] | None = None,
        text_delta: str = "",
        logprobs: list[Logprob] | None = None,
    ) -> None:
        """Finish a sequence; with the last one, its request."""
        request = sequence.request
        self.scheduler.finish(sequence)
        text_delta += close(sequence, ending, self.tokenizer)
        self.metrics.finished[ending.reason] = self.metrics.finished.get(ending.reason, 0) + 1
        finished = all(each.final_answer is not None for each in request.sequences)
        if finished:
            del self.requests[request.id]
            self.masked_requests.discard(request.id)
            self.metrics.note_end(request)
        if finished or request.stream:
            outcome = result(request) if finished else None
            self.pending_outputs.append(
                OutputDelta(request, sequence.index, tokens or [], text_delta, logprobs or [], ending.reason, outcome)
            )
