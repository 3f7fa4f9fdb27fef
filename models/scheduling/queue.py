"""WaitingQueue: sequences that wait for a row and blocks, oldest first. Admits nobody itself."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterator

from models.scheduling.sequence import Sequence


class WaitingQueue:
    """First come, first served; every operation is O(1) but for the one named.

    A request's choices stand next to each other, in order. A preempted sequence returns to where
    its age puts it: to the front, unless it had overtaken one that waits for an adapter's slot.

    Owner: step thread.
    Invariants: ``arrival_order`` rises from head to tail.
    """

    def __init__(self) -> None:
        self._sequences: collections.OrderedDict[int, Sequence] = collections.OrderedDict()
        # request id -> how many of its sequences wait, for requests of which none has run yet
        self._num_waiting_by_request: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences.values())

    @property
    def num_requests(self) -> int:
        """Requests of which no sequence has been admitted yet."""
        return len(self._num_waiting_by_request)

    def append_group(self, sequences: tuple[Sequence, ...]) -> None:
        """Put all choices of a new request at the end."""
        for sequence in sequences:
            self._sequences[sequence.seq_id] = sequence
        self._num_waiting_by_request[sequences[0].request_id] = len(sequences)

    def put_back(self, sequence: Sequence) -> None:
        """Put a preempted sequence before all that are younger; O(n) of those that are older."""
        older = list(
            itertools.takewhile(
                lambda waiting: waiting.arrival_order < sequence.arrival_order,
                self._sequences.values(),
            )
        )
        self._sequences[sequence.seq_id] = sequence
        for each in (sequence, *reversed(older)):
            self._sequences.move_to_end(each.seq_id, last=False)

    def admit(self, sequence: Sequence) -> None:
        """Take out a sequence that runs now; its request counts as admitted from now on."""
        del self._sequences[sequence.seq_id]
        self._num_waiting_by_request.pop(sequence.request_id, None)

    def remove(self, seq_id: int) -> Sequence | None:
        """Take out a sequence wherever it stands; None if it does not wait here."""
        sequence = self._sequences.pop(seq_id, None)
        if sequence is not None and sequence.request_id in self._num_waiting_by_request:
            self._num_waiting_by_request[sequence.request_id] -= 1
            if self._num_waiting_by_request[sequence.request_id] == 0:
                del self._num_waiting_by_request[sequence.request_id]
        return sequence
