"""Engine: the synchronous core of one served model. Owns no thread, no event loop, no tensors."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable
from typing import Protocol

from models.adapters.ledger import AdapterCost
from models.adapters.weights import AdapterWeights
from models.engine.adapter_uses import AdapterUses
from models.engine.deadlines import Deadlines
from models.engine.intake import (
    EngineLimits,
    Intake,
    PreparedChoice,
    PreparedRequest,
)
from models.engine.open_request import OpenChoice, OpenRequest
from models.engine.stats import EngineStats
from models.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    ModelServiceError,
    SequenceFailedError,
)
from models.kv_cache.ledger import BlockManager
from models.requests import (
    Admission,
    FinishReason,
    GenerationEnd,
    GenerationEvent,
    GenerationRequest,
    PromptLogprobs,
    TokenDelta,
)
from models.scheduling.scheduler import Scheduler
from models.scheduling.sequence import Sequence, with_virtual_tokens
from models.scheduling.step_plan import SampledToken, ScoredTokens, StepPlan, StepResult
from models.text_front import TextFront

_logger = logging.getLogger(__name__)

EngineOutput = tuple[str, GenerationEvent | ModelServiceError]


class StepRunner(Protocol):
    """What an engine needs of ``models.runner.ModelRunner``."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one forward pass and draw the tokens that the plan asks for; blocks until done."""
        ...


class Engine:
    """Admits requests, runs steps, and turns what they draw into events.

    Events of a request: log probabilities of its prompt, if it asked for them, in one or several
    stretches; one delta for each token drawn, the last one of a choice with its finish reason (if
    no tokens were asked for, a delta without any once the prompt has run); behind the last
    choice's a GenerationEnd. An error takes the place of all that would follow. An aborted
    request gets nothing more.

    Owner: step thread, except for ``check_fields``, ``prepare`` and
    ``max_sequence_len_tokens``, which any thread may use.

    Invariants: a choice is open exactly as long as the scheduler has its sequence; a request is
    open as long as one of its choices is.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        blocks: BlockManager,
        runner: StepRunner,
        text: TextFront,
        limits: EngineLimits,
        clock: Callable[[], float] = time.monotonic,
        adapters: AdapterUses | None = None,
    ) -> None:
        """Wire an engine; nothing runs.

        Args:
            scheduler: empty, over ``blocks``.
            blocks: ledger of the KV pool.
            runner: executes plans.
            text: makes detokenizers.
            limits: what requests are checked against.
            clock: seconds; deadlines and step times follow it.
            adapters: None if none are served; requests then have none.
        """
        self._adapters = adapters
        self._scheduler = scheduler
        self._blocks = blocks
        self._runner = runner
        self._limits = limits
        self._clock = clock
        self.max_sequence_len_tokens = min(
            limits.max_model_len_tokens, blocks.num_blocks * blocks.block_size_tokens
        )
        self._intake = Intake(limits, text, self.max_sequence_len_tokens)
        self._requests: dict[str, OpenRequest] = {}
        self._choices: dict[int, OpenChoice] = {}
        self._seq_ids = itertools.count()
        # What admissions left to say; the next step says it first.
        self._outputs: list[EngineOutput] = []
        self._is_blocked = False
        self._deadlines = Deadlines(limits.max_slot_wait_s)
        self._num_steps = 0
        self._num_prompt_tokens = 0
        self._num_generated_tokens = 0
        self._plan_s = 0.0
        self._execute_s = 0.0
        self._post_s = 0.0

    @property
    def has_work(self) -> bool:
        """Whether a request is open or an event is still to be told."""
        return self._scheduler.has_work or bool(self._outputs)

    @property
    def is_runnable(self) -> bool:
        """Whether ``step`` has something to do now, not only once something else has happened."""
        return bool(self._outputs) or (self._scheduler.has_work and not self._is_blocked)

    @property
    def next_deadline_s(self) -> float:
        """Time by which ``step`` must be called to keep deadlines; infinity if there are none."""
        return self._deadlines.next_s

    def check_fields(self, request: GenerationRequest) -> None:
        """Check what needs no prompt; ``prepare`` does so too.

        Raises:
            InvalidRequestError: see ``Intake.check_fields``.
        """
        self._intake.check_fields(request)

    def prepare(
        self,
        request: GenerationRequest,
        prompt_token_ids: tuple[int, ...],
        arrival_s: float,
        adapter: AdapterWeights | None = None,
    ) -> PreparedRequest:
        """Check a request and do whatever need not be done on the step thread.

        Args:
            request: what was asked.
            prompt_token_ids: its prompt as tokens.
            arrival_s: time of arrival by the engine's clock.
            adapter: weights of ``request.adapter``.

        Raises:
            RequestError, InvalidSamplingParamsError: see ``Intake.prepare``.
        """
        return self._intake.prepare(request, prompt_token_ids, arrival_s, adapter)

    def add(self, request: GenerationRequest, prompt_token_ids: tuple[int, ...]) -> Admission:
        """Prepare and admit a request that arrives now.

        Raises:
            RequestError, InvalidSamplingParamsError, QueueFullError: see ``prepare``, ``admit``.
        """
        return self.admit(self.prepare(request, prompt_token_ids, self._clock()))

    def admit(self, prepared: PreparedRequest, adapter: AdapterWeights | None = None) -> Admission:
        """Give a prepared request its place in the queue.

        Args:
            prepared: what it is.
            adapter: weights of ``prepared.request.adapter``.

        Raises:
            InvalidRequestError: its id is in use.
            AdapterIncompatibleError: its adapter is larger than all slots together.
            DeadlineExceededError: its time is over already.
            QueueFullError: too many requests wait.
        """
        request = prepared.request
        if request.request_id in self._requests or any(
            request_id == request.request_id for request_id, _ in self._outputs
        ):
            raise InvalidRequestError("request_id", f"'{request.request_id}' is in use")
        if prepared.deadline_s <= self._clock():
            raise DeadlineExceededError(request.timeout_s or 0.0)
        cost = None
        if adapter is not None:
            assert self._adapters is not None
            cost = self._adapters.check_cost(adapter)
        # Whoever wants log probabilities of the prompt computes all of it.
        readable = prepared.prompt_token_ids if request.num_prompt_logprobs is None else ()
        num_virtual_tokens = prepared.num_virtual_tokens
        num_reusable = self._blocks.match_prefix(
            prepared.namespace, with_virtual_tokens(num_virtual_tokens, readable)
        )
        sequences = {
            choice.output.choice: self._new_sequence(prepared, choice, cost)
            for choice in prepared.choices_to_run
        }
        if sequences:
            self._scheduler.add_group(tuple(sequences.values()))
        # Nothing has been recorded up to here: a refused request leaves no trace.
        self._open(prepared, sequences)
        if self._adapters is not None and adapter is not None and sequences:
            self._adapters.add_user(adapter)
        self._is_blocked = False
        self._num_prompt_tokens += len(prepared.prompt_token_ids)
        return Admission(
            seed=request.seed,
            adapter_version=None if request.adapter is None else request.adapter.version,
            numerics=self._limits.numerics,
            num_prompt_tokens=len(prepared.prompt_token_ids),
            num_cached_tokens=max(num_reusable - num_virtual_tokens, 0),
            prompt_token_ids=prepared.prompt_token_ids if request.is_prompt_reported else (),
        )

    def abort(self, request_id: str) -> None:
        """End a request now and free its blocks. No effect if it is not open."""
        self._outputs = [output for output in self._outputs if output[0] != request_id]
        opened = self._requests.get(request_id)
        if opened is not None:
            self._scheduler.abort_group(request_id)
            self._close(opened)

    @property
    def adapters(self) -> AdapterUses | None:
        """Adapters that open requests use; None if none are served."""
        return self._adapters

    def step(self) -> list[EngineOutput]:
        """Apply deadlines, then plan, execute and record one forward pass.

        Returns:
            (request id, event or error) in the order things happened; empty if there was nothing
            to do.

        Raises:
            Exception: whatever the runner raises. The engine must not be used afterwards.
        """
        started_at_s = self._clock()
        outputs, self._outputs = self._outputs, []
        for opened, error in self._deadlines.overdue(self._requests.values(), started_at_s):
            self._fail(opened, error, outputs)
        plan = self._scheduler.plan()
        self._is_blocked = plan is None
        if plan is None:
            return outputs
        planned_at_s = self._clock()
        result = self._runner.execute(plan)
        executed_at_s = self._clock()
        self._scheduler.apply(result)
        for scored in result.scored:
            self._take_scored(scored, outputs)
        for sampled in result.sampled:
            self._take(sampled, outputs)
        for scheduled in plan.sequences:
            if not scheduled.is_sampled:
                self._end_if_prompt_only(scheduled.seq_id, outputs)
        self._num_steps += 1
        self._plan_s += planned_at_s - started_at_s
        self._execute_s += executed_at_s - planned_at_s
        self._post_s += self._clock() - executed_at_s
        return outputs

    def stats(self) -> EngineStats:
        """Return a snapshot; call it between two steps."""
        return EngineStats(
            num_waiting=self._scheduler.num_waiting,
            num_waiting_seqs=self._scheduler.num_waiting_seqs,
            num_running=self._scheduler.num_running,
            num_blocks=self._blocks.num_blocks,
            num_free_blocks=self._blocks.num_free_blocks,
            num_cached_blocks=self._blocks.num_cached_blocks,
            num_steps=self._num_steps,
            num_prompt_tokens=self._num_prompt_tokens,
            num_generated_tokens=self._num_generated_tokens,
            num_preemptions=self._scheduler.num_preemptions,
            resident_adapters=() if self._adapters is None else self._adapters.resident_refs,
            plan_s=self._plan_s,
            execute_s=self._execute_s,
            post_s=self._post_s,
        )

    def check_invariants(self) -> None:
        """Check the engine, its scheduler and its ledger against each other.

        Raises:
            RuntimeError: what is wrong.
        """
        self._scheduler.check_invariants()
        self._blocks.check_invariants()
        if self._scheduler.has_work != bool(self._requests):
            raise RuntimeError("scheduler and engine disagree on whether there is work")
        num_open_choices = sum(opened.num_open_choices for opened in self._requests.values())
        if num_open_choices != len(self._choices):
            raise RuntimeError(f"{len(self._choices)} choices, {num_open_choices} open")
        if not self._requests and self._blocks.num_free_blocks != self._blocks.num_blocks:
            raise RuntimeError("blocks are held although no request is open")

    def _new_sequence(
        self, prepared: PreparedRequest, choice: PreparedChoice, cost: AdapterCost | None
    ) -> Sequence:
        request = prepared.request
        return Sequence(
            seq_id=next(self._seq_ids),
            request_id=request.request_id,
            params=prepared.params,
            seed=choice.seed,
            namespace=prepared.namespace,
            prompt_token_ids=prepared.prompt_token_ids,
            choice=choice.output.choice,
            output_token_ids=list(choice.emitted_token_ids),
            # The first choice tells what holds for all.
            num_prompt_logprobs=request.num_prompt_logprobs if choice.output.choice == 0 else None,
            adapter_cost=cost,
            num_virtual_tokens=prepared.num_virtual_tokens,
        )

    def _open(self, prepared: PreparedRequest, sequences: dict[int, Sequence]) -> None:
        """Record an admitted request; what had ended before it was resumed is said at once."""
        request_id = prepared.request.request_id
        opened = OpenRequest(prepared, list(sequences.values()), len(sequences), 0)
        for choice in prepared.choices:
            if choice.end is not None:
                opened.num_ended_tokens += len(choice.emitted_token_ids)
                self._outputs.append((request_id, choice.end))
            elif choice.output.choice in sequences:
                sequence = sequences[choice.output.choice]
                self._choices[sequence.seq_id] = OpenChoice(sequence, choice.output, opened)
        if sequences:
            self._requests[request_id] = opened
            self._deadlines.add(opened)
        else:
            self._outputs.append((request_id, GenerationEnd(opened.usage())))

    def _take_scored(self, scored: ScoredTokens, outputs: list[EngineOutput]) -> None:
        """Turn log probabilities of a prompt into their event."""
        choice = self._choices.get(scored.seq_id)
        if choice is None:
            return
        if scored.error is not None:
            self._fail_row(choice.owner, scored.error, outputs)
            return
        request_id = choice.owner.prepared.request.request_id
        outputs.append((request_id, PromptLogprobs(scored.start, scored.logprobs)))

    def _end_if_prompt_only(self, seq_id: int, outputs: list[EngineOutput]) -> None:
        """End a request for no tokens once its prompt has run."""
        choice = self._choices.get(seq_id)
        if choice is None or choice.sequence.params.max_tokens > 0:
            return
        if choice.sequence.num_uncomputed_tokens > 0:
            return
        opened = choice.owner
        request_id = opened.prepared.request.request_id
        self._scheduler.finish(seq_id)
        for each in opened.prepared.choices:
            delta = TokenDelta(each.output.choice, (), "", (), FinishReason.LENGTH)
            outputs.append((request_id, delta))
        outputs.append((request_id, GenerationEnd(opened.usage())))
        self._close(opened)

    def _take(self, sampled: SampledToken, outputs: list[EngineOutput]) -> None:
        """Turn one drawn token into its event and end what it ends."""
        choice = self._choices.get(sampled.seq_id)
        if choice is None:  # a sibling failed in this step and took the request with it
            return
        opened = choice.owner
        request_id = opened.prepared.request.request_id
        if sampled.error is not None:
            self._fail_row(opened, sampled.error, outputs)
            return
        self._num_generated_tokens += 1
        delta = choice.output.advance(
            sampled.token_id, len(choice.sequence.output_token_ids), sampled.logprob
        )
        outputs.append((request_id, delta))
        if delta.finish_reason is None:
            return
        self._scheduler.finish(sampled.seq_id)
        del self._choices[sampled.seq_id]
        opened.num_open_choices -= 1
        if opened.num_open_choices == 0:
            outputs.append((request_id, GenerationEnd(opened.usage())))
            self._close(opened)

    def _fail_row(self, opened: OpenRequest, reason: str, outputs: list[EngineOutput]) -> None:
        """End a request because the logits of one of its rows are of no use."""
        request_id = opened.prepared.request.request_id
        _logger.warning("request %s failed: a row could not be sampled", request_id)
        self._fail(opened, SequenceFailedError(reason), outputs)

    def _fail(
        self, opened: OpenRequest, error: ModelServiceError, outputs: list[EngineOutput]
    ) -> None:
        """End a request, all its choices with it, by an error."""
        request_id = opened.prepared.request.request_id
        self._scheduler.abort_group(request_id)
        self._close(opened)
        outputs.append((request_id, error))

    def _close(self, opened: OpenRequest) -> None:
        """Forget a request whose sequences the scheduler has given up."""
        del self._requests[opened.prepared.request.request_id]
        adapter = opened.prepared.request.adapter
        if self._adapters is not None and adapter is not None:
            self._adapters.remove_user(adapter)
        for sequence in opened.sequences:
            self._choices.pop(sequence.seq_id, None)
        self._is_blocked = False
        if not self._requests:
            self._deadlines.forget_all()
