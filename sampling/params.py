"""What one request asks of sampling and stopping. Holds no tensors and imports no torch."""

from __future__ import annotations

import dataclasses
import math

from sampling.errors import InvalidSamplingParamsError

MAX_TOP_LOGPROBS = 20
SEED_MODULUS = 2**64


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling and stopping parameters of one request; every default is a no-op.

    Ranges are checked here; token ids are checked against a vocabulary by ``check_vocabulary``.

    Attributes:
        temperature: 0 is greedy; otherwise logits are divided by it. At least 0, finite.
        top_p: nucleus mass in [0, 1]; 0 keeps the top token only, 1 is off.
        top_k: number of best tokens kept; 0 and -1 are off.
        min_p: keeps tokens of at least ``min_p`` times the best one's probability, in [0, 1].
        typical_p: locally typical mass in (0, 1]; 1 is off.
        repetition_penalty: above 0; over prompt and output; 1 is off.
        frequency_penalty: in [-2, 2]; times the count in the output.
        presence_penalty: in [-2, 2]; once if the token is in the output.
        logit_bias: pairs (token id, bias in [-100, 100]), added before temperature.
        allowed_token_ids: when not empty, only these may be chosen.
        bad_words_token_ids: token sequences that must not appear in the output.
        max_tokens: most new tokens of one choice, at least 1 (0 only scores the prompt).
        min_tokens: EOS and stop ids are held back until this many tokens are out.
        stop_token_ids: further ids that end the sequence.
        ignore_eos: the model's EOS set does not end the sequence.
        num_top_logprobs: None reports no log probabilities; k >= 0 reports the chosen token's and
            those of the k best.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    max_tokens: int = 512
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    num_top_logprobs: int | None = None

    def __post_init__(self) -> None:
        """Check every range.

        Raises:
            InvalidSamplingParamsError: a value is out of range; ``param`` names the field.
        """
        _check("temperature", self.temperature, 0.0, math.inf)
        _check("top_p", self.top_p, 0.0, 1.0)
        _check("min_p", self.min_p, 0.0, 1.0)
        _check("typical_p", self.typical_p, 0.0, 1.0, is_low_open=True)
        _check("repetition_penalty", self.repetition_penalty, 0.0, math.inf, is_low_open=True)
        _check("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check("top_k", self.top_k, -1, math.inf)
        _check("max_tokens", self.max_tokens, 0, math.inf)
        _check("min_tokens", self.min_tokens, 0, math.inf)
        if self.num_top_logprobs is not None:
            _check("top_logprobs", self.num_top_logprobs, 0, MAX_TOP_LOGPROBS)
        if self.min_tokens > self.max_tokens:
            raise InvalidSamplingParamsError(
                "min_tokens", f"{self.min_tokens} is more than max_tokens ({self.max_tokens})"
            )
        for _, bias in self.logit_bias:
            _check("logit_bias", bias, -100.0, 100.0)

    @property
    def is_greedy(self) -> bool:
        """Whether the best token is always taken."""
        return self.temperature == 0.0

    def check_vocabulary(self, vocabulary_size: int) -> None:
        """Check every token id against ``[0, vocabulary_size)``.

        Raises:
            InvalidSamplingParamsError: an id is outside; ``param`` names the field.
        """
        fields: tuple[tuple[str, tuple[int, ...]], ...] = (
            ("logit_bias", tuple(token_id for token_id, _ in self.logit_bias)),
            ("allowed_token_ids", self.allowed_token_ids),
            ("stop_token_ids", self.stop_token_ids),
            ("bad_words", tuple(i for word in self.bad_words_token_ids for i in word)),
        )
        for param, token_ids in fields:
            for token_id in token_ids:
                if not 0 <= token_id < vocabulary_size:
                    raise InvalidSamplingParamsError(
                        param, f"token id {token_id} is not in [0, {vocabulary_size})"
                    )


def _check(param: str, value: float, low: float, high: float, *, is_low_open: bool = False) -> None:
    is_high_enough = value > low if is_low_open else value >= low
    if not (math.isfinite(value) and is_high_enough and value <= high):
        opening = "(" if is_low_open else "["
        closing = "]" if math.isfinite(high) else ")"
        raise InvalidSamplingParamsError(
            param, f"{value:g} is not in {opening}{low:g}, {high:g}{closing}"
        )


def derive_seed(seed: int, choice: int) -> int:
    """Return the seed of one choice of a request with n > 1.

    ``derive_seed(s, 0) == s``: choice 0 equals the single request with the same seed, and
    choice i equals the single request whose seed is ``derive_seed(s, i)``. Other choices are
    spread by the finaliser of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom
    Number Generators, 2014), reduced to a signed 64-bit integer so that it is a valid seed again.

    Args:
        seed: any integer in [-2**63, 2**63).
        choice: 0 or more.
    """
    if choice == 0:
        return seed
    mixed = mix_64(seed + choice * 0x9E3779B97F4A7C15)
    return mixed - SEED_MODULUS if mixed >= SEED_MODULUS // 2 else mixed


def mix_64(value: int) -> int:
    """Return the SplitMix64 finaliser of ``value`` modulo 2**64, as an unsigned integer."""
    z = value % SEED_MODULUS
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % SEED_MODULUS
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % SEED_MODULUS
    return z ^ (z >> 31)
