"""What an engine remembers of a request between its admission and its end. Decides nothing."""

from __future__ import annotations

import dataclasses
import math

from models.engine.choice import ChoiceOutput
from models.engine.intake import PreparedRequest
from models.requests import Usage
from models.scheduling.sequence import Sequence, SequenceStatus


@dataclasses.dataclass(slots=True, eq=False)
class OpenRequest:
    """A request that was admitted and has not ended.

    Owner: step thread.

    Attributes:
        prepared: what it is.
        sequences: its choices that were to be run, finished ones included; oldest first. Of a
            request for no tokens only one is run, whatever the number of choices.
        num_open_choices: how many of these are unfinished.
        num_ended_tokens: tokens of choices that had ended before the request was resumed here.
        slot_deadline_s: when it has waited long enough for a slot; infinity without an adapter.
    """

    prepared: PreparedRequest
    sequences: list[Sequence]
    num_open_choices: int
    num_ended_tokens: int
    slot_deadline_s: float = math.inf

    @property
    def is_waiting_for_slot(self) -> bool:
        """Whether no choice has run yet because its adapter found no slot."""
        return not self.has_run and any(each.is_waiting_for_slot for each in self.sequences)

    @property
    def has_run(self) -> bool:
        """Whether a choice has ever taken part in a step."""
        return any(sequence.status is not SequenceStatus.WAITING for sequence in self.sequences)

    def usage(self) -> Usage:
        """Return the counts of the whole request; tokens of before it was resumed count too."""
        return Usage(
            num_prompt_tokens=len(self.prepared.prompt_token_ids),
            num_completion_tokens=self.num_ended_tokens
            + sum(len(sequence.output_token_ids) for sequence in self.sequences),
            num_cached_tokens=self.sequences[0].num_cached_tokens if self.sequences else 0,
        )


@dataclasses.dataclass(slots=True, eq=False)
class OpenChoice:
    """A choice that is being run. Owner: step thread."""

    sequence: Sequence
    output: ChoiceOutput
    owner: OpenRequest
