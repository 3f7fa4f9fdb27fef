"""What crosses the border of the engine: requests in, events out. Frozen, picklable, no torch."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any

from sampling.params import SamplingParams


class FinishReason(enum.StrEnum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclasses.dataclass(frozen=True, slots=True)
class AdapterRef:
    """An adapter as a request saw it at admission: its id and the version of its weights."""

    id: str
    version: str


@dataclasses.dataclass(frozen=True, slots=True)
class PrefixNamespace:
    """The typed root of a prefix chain: KV is shared only inside of one namespace.

    The fields keep their types, so "no adapter" (None) and an adapter that is named "None"
    never meet, and no field a user controls can imitate another one.

    Attributes:
        model_id: the base model.
        adapter: the adapter and its version, None for the base model.
        cache_salt: the caller's own partition, None for the shared one.
    """

    model_id: str
    adapter: AdapterRef | None = None
    cache_salt: str | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    """Messages that the model's chat template turns into text.

    Attributes:
        messages: plain dicts with ``role`` and ``content`` (text), as the template expects them.
        add_generation_prompt: open the assistant's turn at the end.
        continue_final_message: leave the last message open instead (excludes the former).
        template_variables: further variables of the template (never the template itself).
        template: Jinja text in the place of the model's template, not trusted; "" keeps that.
    """

    messages: tuple[Mapping[str, Any], ...]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_variables: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    template: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TextPrompt:
    """Plain text.

    Attributes:
        text: what to continue.
        add_special_tokens: put what the tokenizer begins a text with (BOS) before it.
        suffix: text behind what is wanted, for models that fill in the middle; "" is none.
    """

    text: str
    add_special_tokens: bool = True
    suffix: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TokenPrompt:
    """Token ids, checked against the vocabulary by the engine."""

    token_ids: tuple[int, ...]


Prompt = ChatPrompt | TextPrompt | TokenPrompt


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """What was asked, once validated at the edge.

    Attributes:
        request_id: unique; appears in logs and errors.
        prompt: what to continue.
        sampling: parameters of every choice. Its ``max_tokens`` counts only if
            ``is_max_tokens_explicit``.
        is_max_tokens_explicit: False lets the engine take min(default_max_tokens, room left);
            True makes a value that does not fit an error.
        seed: 64-bit signed; choice i draws with ``derive_seed(seed, i)``.
        num_choices: sequences wanted (the wire's ``n``).
        stop: stop strings; the text ends before the first of them.
        is_stop_included: keep the stop string in the text.
        is_special_token_skipped: leave special tokens out of the text.
        adapter_id: which adapter is asked for; None runs the base model.
        adapter: the version of it that is served: set by the engine at admission, not by callers.
        cache_salt: the caller's own prefix-cache partition.
        timeout_s: seconds from arrival at the engine; None is without limit.
        num_prompt_logprobs: None reports no log probabilities of the prompt; k >= 0 reports those
            of every prompt token but the first, with the k best alternatives each. The prefix
            cache is then not read, and ``max_tokens`` may be 0: the prompt is scored only.
        is_prompt_reported: the admission carries the prompt's token ids; with it too
            ``max_tokens`` may be 0.
        emitted_token_ids: per choice, tokens that another replica has already sent; the engine
            goes on behind them. Empty, or one tuple per choice.
    """

    request_id: str
    prompt: Prompt
    sampling: SamplingParams
    seed: int
    is_max_tokens_explicit: bool = False
    num_choices: int = 1
    stop: tuple[str, ...] = ()
    is_stop_included: bool = False
    is_special_token_skipped: bool = True
    adapter_id: str | None = None
    adapter: AdapterRef | None = None
    cache_salt: str | None = None
    timeout_s: float | None = None
    num_prompt_logprobs: int | None = None
    is_prompt_reported: bool = False
    emitted_token_ids: tuple[tuple[int, ...], ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log probability of one token under the raw model distribution, with the best alternatives.

    Attributes:
        token_id: the token that was chosen.
        logprob: natural logarithm, before penalties, temperature and filters; may be -inf.
        top: pairs (token id, logprob), best first; as many as the request asked for.
        rank: of a prompt token, its place in the distribution (1 is the best, ties by token id);
            None for a drawn token.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Admission:
    """First event of a stream: the request is valid and has a place in the queue.

    Attributes:
        seed: what the choices draw from.
        adapter_version: version of the adapter's weights, None without one.
        numerics: names the arithmetic; equal strings give equal results bit for bit.
        num_prompt_tokens: length of the prompt.
        num_cached_tokens: how many of them the prefix cache held at admission.
        prompt_token_ids: the prompt, if the request asked for it; else empty.
    """

    seed: int
    adapter_version: str | None
    numerics: str
    num_prompt_tokens: int
    num_cached_tokens: int
    prompt_token_ids: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log probabilities of a stretch of the prompt, for all choices; comes before any delta.

    The stretches of a request are adjacent, in order, and together cover every prompt token but
    the first (position 0), which has no distribution.

    Attributes:
        start: position of the first token told here, at least 1.
        logprobs: one per token, each under the raw distribution given the tokens before it.
    """

    start: int
    logprobs: tuple[TokenLogprob, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class TokenDelta:
    """What one step (or several, gathered) added to one choice.

    Attributes:
        choice: index of the choice.
        token_ids: new tokens, stop tokens included.
        text: text that is final; may be empty while a character or a stop string is undecided.
        logprobs: one per token if the request asked for them, else empty.
        finish_reason: set on the last delta of the choice.
        stop_reason: the stop string or stop token id that ended it; None for EOS and the rest.
    """

    choice: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a whole request; the prompt counts once however many choices there are."""

    num_prompt_tokens: int
    num_completion_tokens: int
    num_cached_tokens: int


@dataclasses.dataclass(frozen=True, slots=True)
class GenerationEnd:
    """Last event of a complete stream."""

    usage: Usage


GenerationEvent = Admission | PromptLogprobs | TokenDelta | GenerationEnd
