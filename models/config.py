"""Core configuration of one served model: frozen, no I/O, no torch.

Composition only; a class receives just its part. A value that is computed (from the model's
files or the machine) lives in a *plan* type made by a named function, never in a config.
"""

from __future__ import annotations

import dataclasses

from models.errors import ConfigError

DTYPES = ("bfloat16", "float16", "float32")
AUTO, MATMUL, VARLEN, REFERENCE = "auto", "matmul", "varlen", "reference"
ATTENTION_BACKENDS = (AUTO, MATMUL, VARLEN, REFERENCE)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which weights, under which name, on which device.

    Attributes:
        path: folder of a transformers model, a ``.gguf`` file, a hub id, or "" for the bundled one.
        model_id: the name that requests use.
        device: "cpu", "cuda" or "cuda:<index>".
        dtype: one of DTYPES.
        max_model_len_tokens: upper bound on prompt plus output; 0 takes the model's own window.
        num_threads: compute threads on the CPU; 0 takes every core that the process may use.
        chat_template: Jinja text that replaces the model's own template; "" keeps it.
        attention_backend: one of ATTENTION_BACKENDS; AUTO takes the fastest that the device and
            the model allow.
        is_batch_invariant: on a GPU, give every row the same bits in any company, at a cost in
            speed. On the CPU in bfloat16 that holds anyway.
    """

    path: str = ""
    model_id: str = "smollm2-135m-instruct"
    device: str = "cpu"
    dtype: str = "bfloat16"
    max_model_len_tokens: int = 0
    num_threads: int = 0
    chat_template: str = ""
    attention_backend: str = AUTO
    is_batch_invariant: bool = False

    def __post_init__(self) -> None:
        """Check what can be checked without files.

        Raises:
            ConfigError: naming the field.
        """
        if not self.model_id:
            raise ConfigError("model_id", "must not be empty")
        if self.dtype not in DTYPES:
            raise ConfigError("dtype", f"'{self.dtype}' is not one of {', '.join(DTYPES)}")
        if self.attention_backend not in ATTENTION_BACKENDS:
            raise ConfigError(
                "attention_backend",
                f"'{self.attention_backend}' is not one of {', '.join(ATTENTION_BACKENDS)}",
            )
        _check_at_least("max_model_len_tokens", self.max_model_len_tokens, 0)
        _check_at_least("num_threads", self.num_threads, 0)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheConfig:
    """Room for keys and values.

    Attributes:
        budget_bytes: bytes for the KV pool; the number of blocks follows from it.
        block_size_tokens: tokens of one block; an attention backend that needs larger ones (on a
            GPU, multiples of 256) gets the next multiple of what it needs.
        is_prefix_caching_enabled: keep the KV of finished requests for later ones that start alike.
    """

    budget_bytes: int = 1 << 30
    block_size_tokens: int = 16
    is_prefix_caching_enabled: bool = True

    def __post_init__(self) -> None:
        """Check ranges.

        Raises:
            ConfigError: naming the field.
        """
        _check_at_least("kv_budget_bytes", self.budget_bytes, 1)
        _check_at_least("block_size_tokens", self.block_size_tokens, 1)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Budgets of one step and of the waiting queue.

    Attributes:
        max_num_seqs: most sequences that run at the same time (the rows of a decode step).
        max_num_batched_tokens: most tokens of one step, decode and prefill together.
        max_num_waiting: most requests that wait for admission; one more is refused.
        max_num_choices: most choices of one request.
    """

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 256
    max_num_waiting: int = 512
    max_num_choices: int = 128

    def __post_init__(self) -> None:
        """Check ranges.

        Raises:
            ConfigError: naming the field.
        """
        _check_at_least("max_num_seqs", self.max_num_seqs, 1)
        _check_at_least("max_num_batched_tokens", self.max_num_batched_tokens, 1)
        _check_at_least("max_num_waiting", self.max_num_waiting, 1)
        _check_at_least("max_num_choices", self.max_num_choices, 1)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                "max_num_batched_tokens",
                f"{self.max_num_batched_tokens} is less than max_num_seqs ({self.max_num_seqs}): "
                "a decode step could not hold one token of every sequence",
            )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AdapterConfig:
    """Which adapters a model has and what they may take.

    Attributes:
        path: folder with one PEFT folder per adapter, or a URL of one that fsspec reads, such as
            "s3://bucket/adapters"; "" serves none.
        max_rank: largest rank of an adapter that is served.
        max_virtual_tokens: most tokens that an adapter of the prompt tuning kind (prompt tuning,
            P-tuning, prefix tuning) may put before every prompt. They count against the window,
            and their KV is computed and held like that of a prompt.
        max_num_slots: most adapters that are resident on the device.
        device_budget_bytes: most bytes of the resident ones.
        host_budget_bytes: most bytes of those in host memory, resident ones included.
        max_slot_wait_s: most seconds that a request waits for a slot, or for room in host memory.
        check_interval_s: seconds in which a URL or the hub is asked once per adapter whether its
            files have changed; a local folder is looked at every second.
        download_budget_bytes: most bytes of downloaded files on the local disk.
        is_hub_allowed: a request may name any adapter of the Hugging Face hub, as "owner/name".
        hub_revision: branch, tag or commit of those; "" takes their default branch.
        max_num_metered: most adapters that have metrics of their own; the others share one.
    """

    path: str = ""
    max_rank: int = 64
    max_virtual_tokens: int = 256
    max_num_slots: int = 32
    device_budget_bytes: int = 1 << 30
    host_budget_bytes: int = 2 << 30
    max_slot_wait_s: float = 30.0
    check_interval_s: float = 30.0
    download_budget_bytes: int = 8 << 30
    is_hub_allowed: bool = False
    hub_revision: str = ""
    max_num_metered: int = 100

    @property
    def is_enabled(self) -> bool:
        """Whether there can be adapters."""
        return bool(self.path) or self.is_hub_allowed

    def __post_init__(self) -> None:
        """Check ranges.

        Raises:
            ConfigError: naming the field.
        """
        _check_at_least("max_adapter_rank", self.max_rank, 1)
        _check_at_least("max_virtual_tokens", self.max_virtual_tokens, 1)
        _check_at_least("max_num_adapter_slots", self.max_num_slots, 1)
        _check_at_least("adapter_device_budget_bytes", self.device_budget_bytes, 1)
        _check_at_least("adapter_host_budget_bytes", self.host_budget_bytes, 1)
        if not self.max_slot_wait_s > 0:
            raise ConfigError("max_adapter_wait_s", f"{self.max_slot_wait_s:g} is not above 0")
        if not self.check_interval_s > 0:
            raise ConfigError(
                "adapter_check_interval_s", f"{self.check_interval_s:g} is not above 0"
            )
        _check_at_least("adapter_download_budget_bytes", self.download_budget_bytes, 1)
        _check_at_least("max_num_metered_adapters", self.max_num_metered, 0)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """All of one engine.

    Attributes:
        default_max_tokens: new tokens when the request names no limit (clamped to the room left).
        logits_processors: ``package.module:Name`` of further ``sampling.processors``, run in this
            order after the built-in ones.
        prompt_logprobs_budget_bytes: bytes that the logits of one step may take (in float32) for
            log probabilities of prompts; whatever it is, one position a step gets them.
    """

    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    kv_cache: KVCacheConfig = dataclasses.field(default_factory=KVCacheConfig)
    scheduler: SchedulerConfig = dataclasses.field(default_factory=SchedulerConfig)
    adapters: AdapterConfig = dataclasses.field(default_factory=AdapterConfig)
    default_max_tokens: int = 512
    logits_processors: tuple[str, ...] = ()
    prompt_logprobs_budget_bytes: int = 64 << 20

    def __post_init__(self) -> None:
        """Check ranges.

        Raises:
            ConfigError: naming the field.
        """
        _check_at_least("default_max_tokens", self.default_max_tokens, 1)
        _check_at_least("prompt_logprobs_budget_bytes", self.prompt_logprobs_budget_bytes, 1)
        for path in self.logits_processors:
            if not all(path.partition(":")):
                raise ConfigError(
                    "logits_processors", f"'{path}' does not have the form package.module:Name"
                )


def _check_at_least(field: str, value: int, low: int) -> None:
    if value < low:
        raise ConfigError(field, f"{value} is less than {low}")
