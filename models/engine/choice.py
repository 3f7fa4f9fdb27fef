"""ChoiceOutput: one choice's way from drawn tokens to final text and the reason for its end.

Holds no KV, no tensors, and does not know when a step runs.
"""

from __future__ import annotations

from collections.abc import Sequence

from models.errors import InvalidRequestError
from models.requests import FinishReason, GenerationRequest, TokenDelta, TokenLogprob
from models.text_front import Detokenizer
from sampling.params import SamplingParams
from sampling.stopping import StopChecker, StopReason, StopStringMatcher, StopVerdict


class ChoiceOutput:
    """Stopping and text of one choice.

    What is text and what is not:

    - The EOS token that ended the choice never is, whatever ``is_special_token_skipped`` says.
      Under ``ignore_eos`` it ends nothing and is a token like any other.
    - The stop token that ended it is text only if ``is_stop_included`` (and if it is special,
      only if special tokens are not skipped).
    - A stop string cuts the text before its first character, or behind its last one if
      ``is_stop_included``. It is looked for in the text of the tokens after the first
      ``min_tokens`` ones: what those say can neither hold nor begin a stop string.

    All texts of a choice join to one that does not depend on how the tokens were spread over
    steps; what a detokenizer or matcher held back comes with the last delta.

    Owner: one thread at a time: whoever prepares the request, then the step thread.
    """

    def __init__(
        self,
        choice: int,
        request: GenerationRequest,
        params: SamplingParams,
        eos_token_ids: frozenset[int],
        detokenizer: Detokenizer,
    ) -> None:
        """Build the output of one choice.

        Args:
            choice: its index.
            request: where stop strings come from.
            params: parameters with the ``max_tokens`` that is in force.
            eos_token_ids: the model's end-of-sequence tokens.
            detokenizer: fresh, for this choice alone.
        """
        self.choice = choice
        self._is_stop_included = request.is_stop_included
        self._min_tokens = params.min_tokens
        self._checker = StopChecker(params, eos_token_ids)
        self._detokenizer = detokenizer
        self._matcher = (
            StopStringMatcher(request.stop, request.is_stop_included) if request.stop else None
        )

    def advance(
        self, token_id: int, num_output_tokens: int, logprob: TokenLogprob | None = None
    ) -> TokenDelta:
        """Take the next token.

        Args:
            token_id: the token that was drawn.
            num_output_tokens: tokens of this choice so far, this one included.
            logprob: passed through to the delta.

        Returns:
            The token with the text that is final now; the choice's last one has a finish reason.
        """
        verdict = self._checker.check(token_id, num_output_tokens)
        text = "" if self._is_hidden(verdict) else self._detokenizer.feed((token_id,))
        if verdict is not None:
            text += self._detokenizer.flush()
        stop: str | None = None
        if self._matcher is not None and num_output_tokens > self._min_tokens:
            match = self._matcher.feed(text)
            text, stop = match.text, match.stop
            if verdict is not None:
                text += self._matcher.flush()  # nothing after a match
        reason, stop_reason = _explain(verdict, stop)
        return TokenDelta(
            self.choice,
            (token_id,),
            text,
            () if logprob is None else (logprob,),
            reason,
            stop_reason,
        )

    def replay(self, token_ids: Sequence[int]) -> TokenDelta | None:
        """Take tokens whose text has been sent before, by another engine.

        Returns:
            None if the choice goes on. If the last token ended it: a delta without tokens and
            text that says so.

        Raises:
            InvalidRequestError: the choice had ended before the last of the tokens.
        """
        for index, token_id in enumerate(token_ids, start=1):
            delta = self.advance(token_id, index)
            if delta.finish_reason is None:
                continue
            if index < len(token_ids):
                raise InvalidRequestError(
                    "emitted_token_ids",
                    f"choice {self.choice} ends after {index} of {len(token_ids)} tokens",
                )
            return TokenDelta(self.choice, (), "", (), delta.finish_reason, delta.stop_reason)
        return None

    def _is_hidden(self, verdict: StopVerdict | None) -> bool:
        if verdict is None or verdict.reason is StopReason.LENGTH:
            return False
        return verdict.reason is StopReason.EOS or not self._is_stop_included


def _explain(
    verdict: StopVerdict | None, stop: str | None
) -> tuple[FinishReason | None, str | int | None]:
    """Return finish reason and stop reason; a stop string outweighs what the token says."""
    if stop is not None:
        return FinishReason.STOP, stop
    if verdict is None:
        return None, None
    if verdict.reason is StopReason.LENGTH:
        return FinishReason.LENGTH, None
    is_stop_token = verdict.reason is StopReason.STOP_TOKEN
    return FinishReason.STOP, verdict.token_id if is_stop_token else None
