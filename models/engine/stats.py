"""EngineStats: what the engine holds and has done, as one frozen snapshot. Computes nothing."""

from __future__ import annotations

import dataclasses

from models.requests import AdapterRef


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """State and totals of an engine between two steps; readable from any thread.

    Totals count since the engine was built and never fall.

    Attributes:
        num_waiting: requests of which no sequence has run yet; what ``max_num_waiting`` bounds.
        num_waiting_seqs: sequences in the waiting queue: of those requests, further choices of
            others, and preempted ones.
        num_running: sequences that take part in steps.
        num_blocks: KV blocks of the pool.
        num_free_blocks: blocks that can be taken now, evictable ones included.
        num_cached_blocks: blocks that the prefix index can find.
        num_steps: forward passes that were executed.
        num_prompt_tokens: prompt tokens of all admitted requests.
        num_generated_tokens: tokens drawn.
        num_preemptions: times a sequence lost its blocks and had to wait again.
        resident_adapters: adapters that have a device slot.
        plan_s: seconds spent on deadlines and planning.
        execute_s: seconds spent in the runner.
        post_s: seconds spent on recording results, stopping and text.
    """

    num_waiting: int
    num_waiting_seqs: int
    num_running: int
    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    num_steps: int
    num_prompt_tokens: int
    num_generated_tokens: int
    num_preemptions: int
    resident_adapters: tuple[AdapterRef, ...]
    plan_s: float
    execute_s: float
    post_s: float

    @property
    def kv_used(self) -> float:
        """Fraction of the KV blocks that running sequences hold, in [0, 1]."""
        return (self.num_blocks - self.num_free_blocks) / self.num_blocks
