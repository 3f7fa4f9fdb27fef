"""What an answer tells beyond its text, as the request asked for it. Pure values."""

from __future__ import annotations

import dataclasses
import enum


class LogprobScope(enum.Enum):
    """Whose log probabilities a choice's ``logprobs`` holds.

    ``NONE``: nobody's, it is null. ``OUTPUT``: of the drawn tokens (``logprobs``). ``PROMPT``: of
    all prompt tokens but the first, and of no drawn one (``loglikelihood``). ``ALL``: of the
    prompt, then of the drawn tokens (``echo`` with ``logprobs``).
    """

    NONE = "none"
    OUTPUT = "output"
    PROMPT = "prompt"
    ALL = "all"

    @property
    def has_prompt(self) -> bool:
        """Whether prompt tokens are among them."""
        return self in (LogprobScope.PROMPT, LogprobScope.ALL)

    @property
    def has_output(self) -> bool:
        """Whether drawn tokens are among them."""
        return self in (LogprobScope.OUTPUT, LogprobScope.ALL)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AnswerForm:
    """How one request wants its answer told.

    Attributes:
        is_chat: as a chat completion, else as a text completion.
        has_stream_usage: a stream ends with a usage event.
        num_candidates: choices that are generated of each prompt (``best_of``).
        num_choices: how many of them are told (``n``): the best, if there are more. Choice c of
            prompt p has index p * num_choices + c.
        logprobs: whose log probabilities stand in each choice.
        num_top_logprobs: alternatives that each of these has.
        is_prompt_echoed: each choice's text begins with its prompt.
        num_prompt_logprobs: alternatives in vLLM's ``prompt_logprobs``; None leaves that out.
    """

    is_chat: bool
    has_stream_usage: bool = False
    num_candidates: int = 1
    num_choices: int = 1
    logprobs: LogprobScope = LogprobScope.NONE
    num_top_logprobs: int = 0
    is_prompt_echoed: bool = False
    num_prompt_logprobs: int | None = None

    @property
    def is_best_chosen(self) -> bool:
        """Whether more choices are generated than told."""
        return self.num_candidates > self.num_choices

    @property
    def num_output_alternatives(self) -> int | None:
        """Alternatives that the engine has to report per drawn token; None needs no report."""
        if self.logprobs.has_output:
            return self.num_top_logprobs
        return 0 if self.is_best_chosen else None

    @property
    def num_prompt_alternatives(self) -> int | None:
        """Alternatives that the engine has to report per prompt token; None needs no report."""
        wanted = [] if self.num_prompt_logprobs is None else [self.num_prompt_logprobs]
        if self.logprobs.has_prompt:
            wanted.append(self.num_top_logprobs)
        return max(wanted, default=None)

    @property
    def is_prompt_reported(self) -> bool:
        """Whether the text of the prompt is needed: to echo it, or to count offsets in it."""
        return self.is_prompt_echoed or (self.logprobs.has_prompt and not self.is_chat)

    def count_prompt_entries(self, num_prompt_tokens: int) -> int:
        """Return how many log probabilities of one prompt the answer holds, alternatives too."""
        per_token = 0
        if self.logprobs.has_prompt:
            per_token += self.num_choices * (1 + self.num_top_logprobs)
        if self.num_prompt_logprobs is not None:
            copies = 1 if self.is_chat else 1 + self.num_choices
            per_token += copies * (1 + self.num_prompt_logprobs)
        return per_token * num_prompt_tokens
