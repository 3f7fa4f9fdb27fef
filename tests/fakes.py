"""Stand-ins without a model: a runner that checks every plan it gets, and a clock."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable, Sequence

from models.requests import TokenLogprob
from models.scheduling.step_plan import (
    JoiningSequence,
    SampledToken,
    ScheduledSequence,
    ScoredTokens,
    StepPlan,
    StepResult,
)

# (prompt, output so far) -> the next token, or the text of an error that this row alone meets
TokenRule = Callable[[Sequence[int], Sequence[int]], int | str]


def last_plus_one(prompt: Sequence[int], output: Sequence[int]) -> int:
    """Draw the last token + 1."""
    return (output[-1] if output else prompt[-1]) + 1


def end_after(num_output_tokens: int, eos_token_id: int) -> TokenRule:
    """Draw last + 1, but the end-of-sequence token as output token ``num_output_tokens``."""

    def rule(prompt: Sequence[int], output: Sequence[int]) -> int:
        if len(output) + 1 == num_output_tokens:
            return eos_token_id
        return last_plus_one(prompt, output)

    return rule


def fail_after(num_output_tokens: int, reason: str = "not a number") -> TokenRule:
    """Draw last + 1 for ``num_output_tokens`` tokens, then fail."""

    def rule(prompt: Sequence[int], output: Sequence[int]) -> int | str:
        return reason if len(output) == num_output_tokens else last_plus_one(prompt, output)

    return rule


class FakeClock:
    """A clock that moves when told to; call it for the time in seconds."""

    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s

    def advance(self, duration_s: float) -> None:
        self.now_s += duration_s


@dataclasses.dataclass(slots=True)
class _Row:
    """What the runner knows of one sequence."""

    joining: JoiningSequence
    output: list[int]
    # position behind the last computed token; None until the first step tells (a prefix hit)
    num_computed_tokens: int | None = None
    block_ids: tuple[int, ...] = ()
    # what its own tokens give, position by position
    own_kv: list[bytes] = dataclasses.field(default_factory=list)

    def tokens(self) -> list[int]:
        return [*self.joining.prompt_token_ids, *self.output]


class PlanError(AssertionError):
    """A plan broke an invariant of StepPlan, or the KV that a row attends to is not its own."""


class FakeStepRunner:
    """Executes plans like the real runner, on symbols instead of tensors, and checks each.

    The "KV" of a position is a digest of the adapter, the token and the KV of the position before,
    as found in the blocks. So KV carries its whole history, like the real one: if a block was
    shared, evicted or overwritten wrongly, what a row attends to differs from what its own tokens
    give, and PlanError is raised.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size_tokens: int,
        *,
        choose_token: TokenRule = last_plus_one,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        max_num_scored_positions: int | None = None,
        broken_prompt_token: int | None = None,
    ) -> None:
        """Make a runner.

        Args:
            num_blocks: of the pool.
            block_size_tokens: of one block.
            choose_token: what is drawn.
            max_num_seqs: checked, as the two below, if given.
            max_num_batched_tokens: of one step.
            max_num_scored_positions: of one step.
            broken_prompt_token: a row that is to score this token fails alone.
        """
        self.block_size_tokens = block_size_tokens
        self.choose_token = choose_token
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_scored_positions = max_num_scored_positions
        self.broken_prompt_token = broken_prompt_token
        # how many positions of each sequence were scored, before it was preempted too
        self.num_scored_positions: dict[int, int] = {}
        self.plans: list[StepPlan] = []
        self._kv: list[list[bytes]] = [[b""] * block_size_tokens for _ in range(num_blocks)]
        self._rows: dict[int, _Row] = {}

    @property
    def known_seq_ids(self) -> set[int]:
        """Sequences that have joined and not left."""
        return set(self._rows)

    @property
    def num_computed_tokens(self) -> int:
        """Tokens of all steps so far."""
        return sum(plan.num_tokens for plan in self.plans)

    def execute(self, plan: StepPlan) -> StepResult:
        """Check and run one step."""
        self._check_step(plan)
        self._leave_and_join(plan)
        self.plans.append(plan)
        for scheduled in plan.sequences:
            self._check_row(scheduled)
        self._check_writes(plan)
        for scheduled in plan.sequences:
            self._write(scheduled)
        for scheduled in plan.sequences:
            self._attend(scheduled)
        scored = [self._score(row) for row in plan.sequences if row.scored_positions]
        sampled = [self._sample(row) for row in plan.sequences if row.is_sampled]
        return StepResult(plan.step_id, tuple(sampled), tuple(scored))

    def _check_step(self, plan: StepPlan) -> None:
        seq_ids = [scheduled.seq_id for scheduled in plan.sequences]
        _require(bool(seq_ids), "a step without tokens")
        _require(len(set(seq_ids)) == len(seq_ids), "a sequence is scheduled twice")
        expected_step_id = self.plans[-1].step_id + 1 if self.plans else plan.step_id
        _require(plan.step_id == expected_step_id, "step ids do not count up by one")
        if self.max_num_seqs is not None:
            _require(len(seq_ids) <= self.max_num_seqs, "too many rows")
        if self.max_num_batched_tokens is not None:
            _require(plan.num_tokens <= self.max_num_batched_tokens, "too many tokens")
        if self.max_num_scored_positions is not None:
            num_scored = sum(len(scheduled.scored_positions) for scheduled in plan.sequences)
            _require(num_scored <= self.max_num_scored_positions, "too many scored positions")

    def _leave_and_join(self, plan: StepPlan) -> None:
        for seq_id in plan.leaving:
            _require(seq_id in self._rows, f"{seq_id} leaves but is not known")
            del self._rows[seq_id]
        for joining in plan.joining:
            _require(joining.seq_id not in self._rows, f"{joining.seq_id} joins but is known")
            self._rows[joining.seq_id] = _Row(joining, list(joining.output_token_ids))
        if self.max_num_seqs is not None:
            _require(len(self._rows) <= self.max_num_seqs, "too many known sequences")

    def _check_row(self, scheduled: ScheduledSequence) -> None:
        seq_id = scheduled.seq_id
        _require(seq_id in self._rows, f"{seq_id} is scheduled but not known")
        row = self._rows[seq_id]
        tokens = row.tokens()
        begins_at = scheduled.start if row.num_computed_tokens is None else row.num_computed_tokens
        _require(scheduled.start == begins_at, f"{seq_id} starts at a wrong position")
        _require(len(scheduled.token_ids) > 0, f"{seq_id} has no tokens")
        expected = tuple(tokens[scheduled.start : scheduled.end])
        _require(scheduled.token_ids == expected, f"{seq_id} runs tokens that are not its own")
        is_last = scheduled.end == len(tokens) and row.joining.sampling.max_tokens > 0
        _require(
            scheduled.is_sampled == is_last,
            f"{seq_id} must be sampled behind its last token, and only there",
        )
        self._check_scored(row.joining, scheduled)
        num_covered_tokens = len(scheduled.block_ids) * self.block_size_tokens
        _require(num_covered_tokens >= scheduled.end, f"{seq_id} lacks blocks")
        _require(
            scheduled.block_ids[: len(row.block_ids)] == row.block_ids,
            f"the block table of {seq_id} changed under it",
        )
        row.block_ids = scheduled.block_ids
        row.num_computed_tokens = scheduled.end

    def _check_scored(self, joining: JoiningSequence, scheduled: ScheduledSequence) -> None:
        done = self.num_scored_positions.get(joining.seq_id, 0)
        end = min(scheduled.end, len(joining.prompt_token_ids) - 1)
        wants_more = joining.num_prompt_logprobs is not None and done < end
        expected = range(done, end) if wants_more else range(0)
        _require(done >= scheduled.start or not expected, "positions were run but not scored")
        _require(scheduled.scored_positions == expected, "wrong positions are scored")
        self.num_scored_positions[joining.seq_id] = max(done, expected.stop)

    def _check_writes(self, plan: StepPlan) -> None:
        num_holders: dict[int, int] = {}
        for row in self._rows.values():
            for block_id in row.block_ids:
                num_holders[block_id] = num_holders.get(block_id, 0) + 1
        for scheduled in plan.sequences:
            first = scheduled.start // self.block_size_tokens
            last = (scheduled.end - 1) // self.block_size_tokens
            for block_id in scheduled.block_ids[first : last + 1]:
                _require(num_holders[block_id] == 1, f"{scheduled.seq_id} writes a shared block")

    def _write(self, scheduled: ScheduledSequence) -> None:
        row = self._rows[scheduled.seq_id]
        for offset, token_id in enumerate(scheduled.token_ids):
            position = scheduled.start + offset
            before = self._read(scheduled.block_ids, position - 1) if position else b""
            block_id = scheduled.block_ids[position // self.block_size_tokens]
            kv = _kv_of(row.joining, before, token_id)
            self._kv[block_id][position % self.block_size_tokens] = kv

    def _attend(self, scheduled: ScheduledSequence) -> None:
        row = self._rows[scheduled.seq_id]
        for token_id in row.tokens()[len(row.own_kv) : scheduled.end]:
            before = row.own_kv[-1] if row.own_kv else b""
            row.own_kv.append(_kv_of(row.joining, before, token_id))
        for position, kv in enumerate(row.own_kv[: scheduled.end]):
            _require(
                self._read(scheduled.block_ids, position) == kv,
                f"{scheduled.seq_id} finds foreign KV at position {position}",
            )

    def _read(self, block_ids: tuple[int, ...], position: int) -> bytes:
        block_id = block_ids[position // self.block_size_tokens]
        return self._kv[block_id][position % self.block_size_tokens]

    def _score(self, scheduled: ScheduledSequence) -> ScoredTokens:
        row = self._rows[scheduled.seq_id]
        start = scheduled.scored_positions.start + 1
        token_ids = row.joining.prompt_token_ids[start : scheduled.scored_positions.stop + 1]
        if self.broken_prompt_token in token_ids:
            return ScoredTokens(scheduled.seq_id, start, (), error="not a number")
        num_top = row.joining.num_prompt_logprobs or 0
        return ScoredTokens(
            scheduled.seq_id,
            start,
            tuple(
                TokenLogprob(
                    token_id,
                    -float(position),
                    tuple((token_id + best, -float(best)) for best in range(num_top)),
                    rank=position,
                )
                for position, token_id in enumerate(token_ids, start)
            ),
        )

    def _sample(self, scheduled: ScheduledSequence) -> SampledToken:
        row = self._rows[scheduled.seq_id]
        token = self.choose_token(row.joining.prompt_token_ids, row.output)
        if isinstance(token, str):
            # As after a failed forward pass: the same positions would be run again.
            row.num_computed_tokens = scheduled.start
            return SampledToken(scheduled.seq_id, -1, error=token)
        row.output.append(token)
        logprob = None
        if row.joining.sampling.num_top_logprobs is not None:
            value = -math.log(1 + len(row.output))
            num_top = row.joining.sampling.num_top_logprobs
            top = tuple((token + rank, value - rank) for rank in range(num_top))
            logprob = TokenLogprob(token, value, top)
        return SampledToken(scheduled.seq_id, token, logprob)


def _kv_of(joining: JoiningSequence, before: bytes, token_id: int) -> bytes:
    return hashlib.blake2b(
        before + repr((joining.adapter, token_id)).encode(), digest_size=8
    ).digest()


def _require(condition: bool, problem: str) -> None:
    if not condition:
        raise PlanError(problem)
