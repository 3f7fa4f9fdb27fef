"""When a sequence ends: by its ids (StopChecker) and by its text (StopStringMatcher). No torch."""

from __future__ import annotations

import collections
import dataclasses
import enum
from collections.abc import Sequence

from sampling.errors import InvalidSamplingParamsError
from sampling.params import SamplingParams


class StopReason(enum.StrEnum):
    """What about its ids ended a sequence."""

    EOS = "eos"
    STOP_TOKEN = "stop_token"
    LENGTH = "length"


@dataclasses.dataclass(frozen=True, slots=True)
class StopVerdict:
    """A sequence ends with this token.

    Attributes:
        reason: why.
        token_id: the token that ended it; for LENGTH merely the last one.
    """

    reason: StopReason
    token_id: int


class StopChecker:
    """Decides after each token of one request whether its ids end the sequence."""

    def __init__(self, params: SamplingParams, eos_token_ids: frozenset[int]) -> None:
        self._eos_token_ids = frozenset() if params.ignore_eos else eos_token_ids
        self._stop_token_ids = frozenset(params.stop_token_ids)
        self._min_tokens = params.min_tokens
        self._max_tokens = params.max_tokens

    def check(self, token_id: int, num_output_tokens: int) -> StopVerdict | None:
        """Return the verdict on the newest token, None to go on.

        EOS goes before a stop id, a stop id before the length. Up to ``min_tokens`` tokens only
        the length can end a sequence (sampling holds EOS and stop ids back as long).

        Args:
            token_id: the newest token.
            num_output_tokens: how many there are, this one included.
        """
        if num_output_tokens > self._min_tokens:
            if token_id in self._eos_token_ids:
                return StopVerdict(StopReason.EOS, token_id)
            if token_id in self._stop_token_ids:
                return StopVerdict(StopReason.STOP_TOKEN, token_id)
        if num_output_tokens >= self._max_tokens:
            return StopVerdict(StopReason.LENGTH, token_id)
        return None


@dataclasses.dataclass(frozen=True, slots=True)
class StopMatch:
    """What a feed has decided.

    Attributes:
        text: text that is final now; may be empty.
        stop: the stop string that ended the text, None while none has.
    """

    text: str
    stop: str | None = None


class StopStringMatcher:
    """Ends a text at the first stop string and holds back what may still become one.

    The match that *ends* earliest in the text counts, among those the one that starts earliest
    (the longest). So the result does not depend on how the text is cut into feeds. Held back is
    the longest end of the text that a stop string begins with, no character more.

    One pass over the characters with an Aho-Corasick automaton (Aho, Corasick: Efficient String
    Matching, 1975): its state is the length of that end, whatever the number of stop strings.

    Invariant: ``_held`` is the text of state ``_state``.
    """

    def __init__(self, stop: Sequence[str], is_stop_included: bool = False) -> None:
        """Build the automaton.

        Args:
            stop: stop strings; none at all lets all text pass.
            is_stop_included: emit the stop string as well.

        Raises:
            InvalidSamplingParamsError: a stop string is empty.
        """
        if "" in stop:
            raise InvalidSamplingParamsError("stop", "a stop string must not be empty")
        self._automaton = _Automaton(stop)
        self._is_stop_included = is_stop_included
        self._state = 0
        self._held = ""
        self._stop: str | None = None

    def feed(self, text: str) -> StopMatch:
        """Take more text, return what is final.

        After a match all further text is dropped, and the match is reported again.
        """
        if self._stop is not None:
            return StopMatch("", self._stop)
        automaton = self._automaton
        pending = self._held + text
        for end, character in enumerate(text, start=len(self._held) + 1):
            self._state = automaton.step(self._state, character)
            stop = automaton.matches[self._state]
            if stop is not None:
                self._stop, self._held = stop, ""
                return StopMatch(
                    pending[: end if self._is_stop_included else end - len(stop)], stop
                )
        final_length = len(pending) - automaton.depths[self._state]
        self._held = pending[final_length:]
        return StopMatch(pending[:final_length])

    def flush(self) -> str:
        """Return the text that is still held back; the stream ends here."""
        held, self._held, self._state = self._held, "", 0
        return held


class _Automaton:
    """States are the beginnings of the stop strings; state 0 is the empty one.

    Attributes:
        depths: length of each state's text.
        matches: the longest stop string that each state's text ends with, or None.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self.depths = [0]
        self.matches: list[str | None] = [None]
        self._edges: list[dict[str, int]] = [{}]
        self._fallbacks = [0]
        for each in stop:
            self._add(each)
        self._link()

    def step(self, state: int, character: str) -> int:
        """Return the state of the longest end of the text, once a character is added."""
        while True:
            target = self._edges[state].get(character)
            if target is not None:
                return target
            if state == 0:
                return 0
            state = self._fallbacks[state]

    def _add(self, stop: str) -> None:
        state = 0
        for character in stop:
            target = self._edges[state].get(character)
            if target is None:
                target = len(self._edges)
                self._edges[state][character] = target
                self._edges.append({})
                self._fallbacks.append(0)
                self.depths.append(self.depths[state] + 1)
                self.matches.append(None)
            state = target
        self.matches[state] = stop

    def _link(self) -> None:
        """Set, by rising depth, where each state falls back to: its longest shorter end."""
        queue = collections.deque(self._edges[0].values())
        while queue:
            state = queue.popleft()
            for character, target in self._edges[state].items():
                fallback = self.step(self._fallbacks[state], character)
                self._fallbacks[target] = fallback
                # The state's own stop string is the longer one.
                self.matches[target] = self.matches[target] or self.matches[fallback]
                queue.append(target)
