"""Errors of the engine: the whole tree, and who is at fault.

    ModelServiceError
      RequestError                   the caller's fault; the same request fails again
        InvalidRequestError            param, reason
        PromptTooLongError             num_prompt_tokens, max_model_len_tokens,
                                       num_virtual_tokens
        ContextLengthExceededError     num_prompt_tokens, max_tokens, max_model_len_tokens,
                                       num_virtual_tokens
        ChatTemplateError              reason (the template's own words)
        ModelNotFoundError             model_id
        InvalidAdapterIdError          adapter_id
        AdapterNotFoundError           adapter_id
        AdapterIncompatibleError       adapter_id, reason
        DeadlineExceededError          timeout_s
      CapacityError                  ours; the same request may succeed later
        QueueFullError                 num_waiting, max_num_waiting
        DrainingError                  the replica takes no new work
        AdapterLoadFailedError         adapter_id, reason, retry_after_s
        AdapterSlotTimeoutError        adapter_id, wait_s
      EngineError                    ours
        SequenceFailedError            reason; one sequence could not go on, the engine can
        EngineDeadError                reason; the step loop ended, the replica is replaced
      ConfigError                    at start, never for a request: field, reason
      OutOfBlocksError               internal; the scheduler turns it into preemption

Every class keeps the pickle rule, since errors cross processes: positional constructor,
the same values to ``super().__init__``, text made in ``__str__``, fields of str, int or
float only.
"""


class ModelServiceError(Exception):
    """Root of everything that ``models`` raises on purpose."""


class RequestError(ModelServiceError):
    """The caller's fault: the same request would fail again."""


class InvalidRequestError(RequestError):
    """A field of the request has a value that cannot be served."""

    def __init__(self, param: str, reason: str) -> None:
        super().__init__(param, reason)
        self.param = param
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.param}: {self.reason}" if self.param else self.reason


class PromptTooLongError(RequestError):
    """The prompt alone leaves no room for a token in the model's window."""

    def __init__(
        self, num_prompt_tokens: int, max_model_len_tokens: int, num_virtual_tokens: int = 0
    ) -> None:
        super().__init__(num_prompt_tokens, max_model_len_tokens, num_virtual_tokens)
        self.num_prompt_tokens = num_prompt_tokens
        self.max_model_len_tokens = max_model_len_tokens
        self.num_virtual_tokens = num_virtual_tokens

    def __str__(self) -> str:
        return (
            f"the prompt has {self.num_prompt_tokens} tokens"
            f"{_and_virtual_tokens(self.num_virtual_tokens)}; this model's window of "
            f"{self.max_model_len_tokens} tokens must hold "
            f"{'them' if self.num_virtual_tokens else 'it'} and at least one new token"
        )


class ContextLengthExceededError(RequestError):
    """An explicit max_tokens does not fit behind the prompt."""

    def __init__(
        self,
        num_prompt_tokens: int,
        max_tokens: int,
        max_model_len_tokens: int,
        num_virtual_tokens: int = 0,
    ) -> None:
        super().__init__(num_prompt_tokens, max_tokens, max_model_len_tokens, num_virtual_tokens)
        self.num_prompt_tokens = num_prompt_tokens
        self.max_tokens = max_tokens
        self.max_model_len_tokens = max_model_len_tokens
        self.num_virtual_tokens = num_virtual_tokens

    def __str__(self) -> str:
        total = self.max_tokens + self.num_prompt_tokens + self.num_virtual_tokens
        return (
            f"max_tokens is {self.max_tokens} and the prompt has {self.num_prompt_tokens} tokens"
            f"{_and_virtual_tokens(self.num_virtual_tokens)}, together {total}; this model's "
            f"window is {self.max_model_len_tokens} tokens"
        )


def _and_virtual_tokens(num_virtual_tokens: int) -> str:
    return f" behind the adapter's {num_virtual_tokens} virtual ones" if num_virtual_tokens else ""


class ChatTemplateError(RequestError):
    """The model's chat template refused the messages."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return f"the chat template refused these messages: {self.reason}"


class ModelNotFoundError(RequestError):
    """No such model is served here."""

    def __init__(self, model_id: str) -> None:
        super().__init__(model_id)
        self.model_id = model_id

    def __str__(self) -> str:
        return f"the model '{self.model_id}' does not exist"


class InvalidAdapterIdError(RequestError):
    """What names an adapter breaks the grammar of adapter ids."""

    def __init__(self, adapter_id: str) -> None:
        super().__init__(adapter_id)
        self.adapter_id = adapter_id

    def __str__(self) -> str:
        # It may be long and hold anything.
        shown = ascii(self.adapter_id[:64])
        return (
            f"{shown} is not the id of an adapter: that is a name of letters, digits, '.', '_' and "
            "'-', at most 96 characters long, or two of them joined by '/'"
        )


class AdapterNotFoundError(RequestError):
    """No adapter of this id exists for the model."""

    def __init__(self, adapter_id: str) -> None:
        super().__init__(adapter_id)
        self.adapter_id = adapter_id

    def __str__(self) -> str:
        return f"the adapter '{self.adapter_id}' does not exist"


class AdapterIncompatibleError(RequestError):
    """The adapter exists but does not fit this model or this configuration."""

    def __init__(self, adapter_id: str, reason: str) -> None:
        super().__init__(adapter_id, reason)
        self.adapter_id = adapter_id
        self.reason = reason

    def __str__(self) -> str:
        return f"the adapter '{self.adapter_id}' cannot be used with this model: {self.reason}"


class DeadlineExceededError(RequestError):
    """The request's own time limit passed before it was finished."""

    def __init__(self, timeout_s: float) -> None:
        super().__init__(timeout_s)
        self.timeout_s = timeout_s

    def __str__(self) -> str:
        return f"the request was not finished within its limit of {self.timeout_s:g} s"


class CapacityError(ModelServiceError):
    """Ours: there is no room now; the same request may succeed later."""


class QueueFullError(CapacityError):
    """The waiting queue is at its limit."""

    def __init__(self, num_waiting: int, max_num_waiting: int) -> None:
        super().__init__(num_waiting, max_num_waiting)
        self.num_waiting = num_waiting
        self.max_num_waiting = max_num_waiting

    def __str__(self) -> str:
        return f"the queue is full ({self.num_waiting} of {self.max_num_waiting} places taken)"


class DrainingError(CapacityError):
    """The replica is shutting down and takes no new work."""

    def __str__(self) -> str:
        return "the server is shutting down"


class AdapterLoadFailedError(CapacityError):
    """The adapter's files could not be read; the next try may succeed."""

    def __init__(self, adapter_id: str, reason: str, retry_after_s: float) -> None:
        super().__init__(adapter_id, reason, retry_after_s)
        self.adapter_id = adapter_id
        self.reason = reason
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return f"the adapter '{self.adapter_id}' could not be loaded: {self.reason}"


class AdapterSlotTimeoutError(CapacityError):
    """All places for adapters stayed in use by other requests for as long as one may wait."""

    def __init__(self, adapter_id: str, wait_s: float) -> None:
        super().__init__(adapter_id, wait_s)
        self.adapter_id = adapter_id
        self.wait_s = wait_s

    def __str__(self) -> str:
        return (
            f"no place became free for the adapter '{self.adapter_id}' within {self.wait_s:g} s; "
            "all are in use by other adapters"
        )


class EngineError(ModelServiceError):
    """Ours: the engine could not do what it should."""


class SequenceFailedError(EngineError):
    """One sequence cannot go on (for example its logits are NaN); the engine can."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return f"generation failed: {self.reason}"


class EngineDeadError(EngineError):
    """The step loop ended; every open stream gets this and the replica is replaced."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return f"the engine stopped: {self.reason}"


class ConfigError(ModelServiceError):
    """The service cannot start as configured; never raised for a request."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(field, reason)
        self.field = field
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.field}: {self.reason}" if self.field else self.reason


class OutOfBlocksError(ModelServiceError):
    """The KV ledger has no free block; never leaves ``models``."""

    def __init__(self, num_needed: int, num_free: int) -> None:
        super().__init__(num_needed, num_free)
        self.num_needed = num_needed
        self.num_free = num_free

    def __str__(self) -> str:
        return f"{self.num_needed} KV blocks needed, {self.num_free} free"
