"""WaitingQueue: sequences that wait for a row and blocks, oldest first. Admits nobody itself."""

from __future__ import annotations

import collections
from collections.abc import Iterator

from models.scheduling.sequence import Sequence


class WaitingQueue:
    """First come, first served; every operation is O(1).

    A request's choices stand next to each other, in order. A preempted sequence returns to the
    front: it is older than all that wait, and those preempted in one step come youngest first,
    so the queue stays sorted by age.

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

    def push_front(self, sequence: Sequence) -> None:
        """Put a preempted sequence before all others."""
        self._sequences[sequence.seq_id] = sequence
        self._sequences.move_to_end(sequence.seq_id, last=False)

    def peek(self) -> Sequence | None:
        """Return the sequence whose turn it is."""
        return next(iter(self._sequences.values()), None)

    def pop(self) -> Sequence:
        """Take out the sequence whose turn it is; its request counts as admitted from now on."""
        _, sequence = self._sequences.popitem(last=False)
        self._num_waiting_by_request.pop(sequence.request_id, None)
        return sequence

    def remove(self, seq_id: int) -> Sequence | None:
        """Take out a sequence wherever it stands; None if it does not wait here."""
        sequence = self._sequences.pop(seq_id, None)
        if sequence is not None and sequence.request_id in self._num_waiting_by_request:
            self._num_waiting_by_request[sequence.request_id] -= 1
            if self._num_waiting_by_request[sequence.request_id] == 0:
                del self._num_waiting_by_request[sequence.request_id]
        return sequence
