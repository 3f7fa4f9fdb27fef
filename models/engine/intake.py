"""Intake: checks a request against the limits of one engine and prepares its choices.

Holds no queue and no state, so it runs on any thread, off the step thread.
"""

from __future__ import annotations

import dataclasses
import math

from models.adapters.weights import AdapterWeights
from models.config import AdapterConfig
from models.engine.choice import ChoiceOutput
from models.errors import (
    ContextLengthExceededError,
    InvalidRequestError,
    PromptTooLongError,
)
from models.requests import GenerationRequest, PrefixNamespace, TokenDelta
from models.text_front import TextFront
from sampling.params import MAX_TOP_LOGPROBS, SamplingParams, derive_seed


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """What one engine serves: computed when it is built, never written to.

    Attributes:
        model_id: the base model; roots the prefix chains.
        numerics: names the arithmetic; goes into every admission.
        vocabulary_size: token ids of requests lie in [0, vocabulary_size); tokens that a request's
            adapter has added follow.
        max_model_len_tokens: the model's window: most tokens of prompt and output together.
        default_max_tokens: new tokens when a request names no limit.
        max_num_choices: most choices of one request.
        max_slot_wait_s: most seconds that a request waits for a slot for its adapter.
    """

    model_id: str
    numerics: str
    vocabulary_size: int
    max_model_len_tokens: int
    default_max_tokens: int
    max_num_choices: int
    max_slot_wait_s: float = AdapterConfig().max_slot_wait_s


@dataclasses.dataclass(frozen=True, slots=True)
class PreparedChoice:
    """One choice, ready to become a sequence.

    Attributes:
        seed: the choice's own seed.
        output: its stopping and text; has replayed ``emitted_token_ids``.
        emitted_token_ids: tokens that were sent before by another engine.
        end: set if the last of these ended the choice, so that nothing is left to run.
    """

    seed: int
    output: ChoiceOutput
    emitted_token_ids: tuple[int, ...]
    end: TokenDelta | None


@dataclasses.dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request that fits this engine.

    Attributes:
        request: what was asked.
        prompt_token_ids: the prompt.
        params: sampling parameters with the ``max_tokens`` that is in force.
        namespace: root of the prompt's prefix chain.
        choices: one per choice.
        arrival_s: the engine clock's time of arrival; ``timeout_s`` counts from it.
        num_virtual_tokens: positions before the prompt that its adapter's virtual tokens take.
    """

    request: GenerationRequest
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    namespace: PrefixNamespace
    choices: tuple[PreparedChoice, ...]
    arrival_s: float
    num_virtual_tokens: int = 0

    @property
    def deadline_s(self) -> float:
        """When the request's time is over, by the engine's clock; infinity without a limit."""
        timeout_s = self.request.timeout_s
        return math.inf if timeout_s is None else self.arrival_s + timeout_s

    @property
    def choices_to_run(self) -> tuple[PreparedChoice, ...]:
        """The choices that have not ended; if no tokens are asked for, one stands for all."""
        choices = tuple(choice for choice in self.choices if choice.end is None)
        return choices if self.params.max_tokens > 0 else choices[:1]


class Intake:
    """Checks and prepares requests. Immutable; safe on any thread."""

    def __init__(self, limits: EngineLimits, text: TextFront, max_sequence_len_tokens: int) -> None:
        """Keep what requests are checked against.

        Args:
            limits: of the engine.
            text: makes detokenizers and knows the EOS tokens.
            max_sequence_len_tokens: the model's window or the whole KV pool, whichever is
                smaller.
        """
        self._limits = limits
        self._text = text
        self._max_sequence_len_tokens = max_sequence_len_tokens

    def check_fields(self, request: GenerationRequest) -> None:
        """Check what needs no prompt and costs nothing: before anything is spent on a request.

        Raises:
            InvalidRequestError: the time limit, the number of choices or of alternatives for
                prompt tokens is out of range, or log probabilities of the prompt are asked for
                when a stream is resumed.
        """
        # "not more than 0" also refuses NaN, which would never expire.
        if request.timeout_s is not None and not request.timeout_s > 0:
            raise InvalidRequestError("timeout_s", f"{request.timeout_s:g} is not above 0")
        if not 1 <= request.num_choices <= self._limits.max_num_choices:
            raise InvalidRequestError(
                "n", f"{request.num_choices} is not in [1, {self._limits.max_num_choices}]"
            )
        if request.num_prompt_logprobs is None:
            return
        if not 0 <= request.num_prompt_logprobs <= MAX_TOP_LOGPROBS:
            raise InvalidRequestError(
                "prompt_logprobs",
                f"{request.num_prompt_logprobs} is not in [0, {MAX_TOP_LOGPROBS}]",
            )
        if request.emitted_token_ids:
            raise InvalidRequestError(
                "emitted_token_ids", "excludes log probabilities of the prompt"
            )

    def prepare(
        self,
        request: GenerationRequest,
        prompt_token_ids: tuple[int, ...],
        arrival_s: float,
        adapter: AdapterWeights | None = None,
    ) -> PreparedRequest:
        """Check a request and build what its choices need.

        Args:
            request: what was asked.
            prompt_token_ids: its prompt as tokens.
            arrival_s: time of arrival by the engine's clock.
            adapter: weights of ``request.adapter``; its virtual tokens take room in the window,
                and its own text, if it has one, spells the answer.

        Raises:
            InvalidRequestError: the number of choices, a token id, ``max_tokens`` or the emitted
                tokens cannot be served; ``param`` names the field.
            InvalidSamplingParamsError: a token id is outside of the vocabulary, or
                ``min_tokens`` does not fit.
            PromptTooLongError: the prompt leaves no room for a token.
            ContextLengthExceededError: an explicit ``max_tokens`` does not fit behind the prompt,
                or the prompt does not fit by itself if no token is asked for.
        """
        self.check_fields(request)
        num_tokens = self._limits.vocabulary_size
        num_tokens += 0 if adapter is None else adapter.num_added_tokens
        _check_token_ids("prompt", prompt_token_ids, num_tokens)
        request.sampling.check_vocabulary(num_tokens)
        num_virtual_tokens = 0 if adapter is None else adapter.num_virtual_tokens
        max_tokens = self._max_tokens(request, len(prompt_token_ids), num_virtual_tokens)
        params = dataclasses.replace(request.sampling, max_tokens=max_tokens)
        self._check_emitted(request, params.max_tokens, num_tokens)
        text = self._text if adapter is None or adapter.text is None else adapter.text
        return PreparedRequest(
            request,
            prompt_token_ids,
            self._hold_back(text, params, num_tokens),
            PrefixNamespace(self._limits.model_id, request.adapter, request.cache_salt),
            tuple(
                self._prepare_choice(choice, request, params, prompt_token_ids, text)
                for choice in range(request.num_choices)
            ),
            arrival_s,
            num_virtual_tokens,
        )

    def _prepare_choice(
        self,
        choice: int,
        request: GenerationRequest,
        params: SamplingParams,
        prompt_token_ids: tuple[int, ...],
        text: TextFront,
    ) -> PreparedChoice:
        detokenizer = text.detokenizer(
            is_special_token_skipped=request.is_special_token_skipped,
            context_token_ids=prompt_token_ids,
        )
        output = ChoiceOutput(choice, request, params, text.eos_token_ids, detokenizer)
        emitted = request.emitted_token_ids[choice] if request.emitted_token_ids else ()
        end = output.replay(emitted)
        return PreparedChoice(derive_seed(request.seed, choice), output, emitted, end)

    def _hold_back(
        self, text: TextFront, params: SamplingParams, num_tokens: int
    ) -> SamplingParams:
        """Return what a row is drawn with: ``min_tokens`` holds an adapter's own EOS back too.

        The sampler knows the base model's only; to it the others are stop tokens. What they end
        is for ``ChoiceOutput`` to say.
        """
        further = text.eos_token_ids - self._text.eos_token_ids
        own = sorted(token_id for token_id in further if token_id < num_tokens)
        if not own or not params.min_tokens or params.ignore_eos:
            return params
        return dataclasses.replace(params, stop_token_ids=(*params.stop_token_ids, *own))

    def _max_tokens(
        self, request: GenerationRequest, num_prompt_tokens: int, num_virtual_tokens: int
    ) -> int:
        """Return the number of new tokens that is in force for each choice."""
        limit = self._max_sequence_len_tokens
        room = limit - num_virtual_tokens - num_prompt_tokens
        if request.is_max_tokens_explicit and request.sampling.max_tokens == 0:
            if request.num_prompt_logprobs is None and not request.is_prompt_reported:
                raise InvalidRequestError("max_tokens", "must be at least 1")
            if room < 0:
                raise ContextLengthExceededError(num_prompt_tokens, 0, limit, num_virtual_tokens)
            return 0
        if room <= 0:
            raise PromptTooLongError(num_prompt_tokens, limit, num_virtual_tokens)
        if not request.is_max_tokens_explicit:
            return min(self._limits.default_max_tokens, room)
        max_tokens = request.sampling.max_tokens
        if max_tokens > room:
            raise ContextLengthExceededError(
                num_prompt_tokens, max_tokens, limit, num_virtual_tokens
            )
        return max_tokens

    def _check_emitted(self, request: GenerationRequest, max_tokens: int, num_tokens: int) -> None:
        param = "emitted_token_ids"
        if len(request.emitted_token_ids) not in (0, request.num_choices):
            raise InvalidRequestError(
                param,
                f"{len(request.emitted_token_ids)} lists for {request.num_choices} choices",
            )
        for token_ids in request.emitted_token_ids:
            if token_ids:
                _check_token_ids(param, token_ids, num_tokens)
            if len(token_ids) > max_tokens:
                raise InvalidRequestError(
                    param, f"{len(token_ids)} tokens are more than max_tokens ({max_tokens})"
                )


def _check_token_ids(param: str, token_ids: tuple[int, ...], num_tokens: int) -> None:
    if not token_ids:
        raise InvalidRequestError(param, "must have at least one token")
    for token_id in (min(token_ids), max(token_ids)):
        if not 0 <= token_id < num_tokens:
            raise InvalidRequestError(param, f"token id {token_id} is not in [0, {num_tokens})")
