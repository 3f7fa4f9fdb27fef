"""Who asks what of which adapter: mixes of adapters, and adapters with random weights."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from models.adapters.weights import AdapterWeights, ModuleDelta, ModuleShape
from models.requests import AdapterRef

RANK = 16
_MIXED_RANKS = (4, 8, 16, 32, 64)
_ZIPF_EXPONENT = 1.1
# Adapters share so many sets of tensors: more than the caches of a processor hold.
_NUM_TENSOR_SETS = 16
_STANDARD_DEVIATION_B = 1e-3


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSizes:
    """How much work the table is made of.

    Attributes:
        num_clients: requests that are open at the same time.
        num_prompt_tokens: length of every prompt.
        num_new_tokens: length of every answer; where slots change tenants the mean, so that
            answers do not all end in the same step.
        num_requests: of each mix.
        num_churn_requests: of each mix whose working set is larger than the slots.
        num_working_set: adapters of these mixes.
        num_cold: adapters whose first token is timed.
    """

    num_clients: int = 32
    num_prompt_tokens: int = 158
    num_new_tokens: int = 48
    num_requests: int = 32
    num_churn_requests: int = 64
    num_working_set: int = 128
    num_cold: int = 7


FULL = AdapterSizes()
# To see that everything runs; its figures mean nothing.
QUICK = AdapterSizes(
    num_clients=4,
    num_prompt_tokens=20,
    num_new_tokens=3,
    num_requests=4,
    num_churn_requests=8,
    num_cold=2,
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """An adapter.

    Attributes:
        number: tells it from others of its rank.
        rank: of all its pairs.
    """

    number: int
    rank: int = RANK


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """One load.

    Attributes:
        name: what the table calls it.
        choices: the adapter of each request in the order in which they are put; None is the base.
        lengths: new tokens of each.
    """

    name: str
    choices: tuple[Choice | None, ...]
    lengths: tuple[int, ...]


def make_mixes(sizes: AdapterSizes) -> tuple[Mix, ...]:
    """Return the mixes in the order of the table."""
    generator = random.Random(0)
    count = sizes.num_requests
    numbers = range(sizes.num_working_set)
    zipf = [(number + 1) ** -_ZIPF_EXPONENT for number in numbers]

    def steady(name: str, choices: Sequence[Choice | None]) -> Mix:
        return Mix(name=name, choices=tuple(choices), lengths=(sizes.num_new_tokens,) * count)

    def churning(name: str, weights: Sequence[float] | None) -> Mix:
        drawn = generator.choices(numbers, weights, k=sizes.num_churn_requests)
        shortest, longest = sizes.num_new_tokens // 2, sizes.num_new_tokens * 3 // 2
        return Mix(
            name=name,
            choices=tuple(Choice(number=number) for number in drawn),
            lengths=tuple(generator.randint(max(1, shortest), longest) for _ in drawn),
        )

    ranks = itertools.islice(itertools.cycle(_MIXED_RANKS), count)
    working_set = f"a working set of {sizes.num_working_set}"
    return (
        steady("base rows only", [None] * count),
        steady("one adapter", [Choice(number=0)] * count),
        steady("8 adapters", [Choice(number=index % 8) for index in range(count)]),
        steady("an adapter for each row", [Choice(number=index) for index in range(count)]),
        steady(
            f"an adapter for each row, ranks {_MIXED_RANKS[0]} to {_MIXED_RANKS[-1]}",
            [Choice(number=index, rank=rank) for index, rank in enumerate(ranks)],
        ),
        churning(f"{working_set}, uniform", None),
        churning(f"{working_set}, Zipf({_ZIPF_EXPONENT})", zipf),
    )


class AdapterShelf:
    """Makes adapters with random pairs on all linear layers, in host memory.

    Each has a version of its own; tensors are shared by every sixteenth.

    Owner: one thread.
    """

    def __init__(self, modules: Sequence[ModuleShape]) -> None:
        """Begin empty.

        Args:
            modules: what adapters may change; norms stay as they are.
        """
        self._linears = tuple(module for module in modules if not module.is_norm)
        self._tensors: dict[tuple[int, int], Mapping[str, ModuleDelta]] = {}

    def get(self, choice: Choice) -> AdapterWeights:
        """Return an adapter."""
        key = (choice.rank, choice.number % _NUM_TENSOR_SETS)
        deltas = self._tensors.get(key)
        if deltas is None:
            deltas = self._tensors[key] = self._draw(choice.rank, seed=key[1])
        return AdapterWeights(
            ref=AdapterRef(f"adapter-{choice.rank}-{choice.number}", "v1"),
            modules=deltas,
            rank=choice.rank,
            num_bytes=sum(delta.num_bytes for delta in deltas.values()),
        )

    def save(self, choice: Choice, folder: Path) -> None:
        """Write an adapter as PEFT does."""
        tensors = {}
        for name, delta in self._draw(choice.rank, seed=choice.number).items():
            assert delta.lora_a is not None
            assert delta.lora_b is not None
            prefix = f"base_model.model.{name}"
            tensors[f"{prefix}.lora_A.weight"] = delta.lora_a
            tensors[f"{prefix}.lora_B.weight"] = delta.lora_b
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": choice.rank,
            "lora_alpha": choice.rank,
            "target_modules": "all-linear",
        }
        folder.mkdir(parents=True)
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        (folder / "adapter_config.json").write_text(json.dumps(config))

    def _draw(self, rank: int, *, seed: int) -> dict[str, ModuleDelta]:
        generator = torch.Generator().manual_seed(seed)
        return {
            module.name: ModuleDelta(
                lora_a=torch.randn(rank, module.num_inputs, generator=generator)
                / module.num_inputs**0.5,
                lora_b=torch.randn(module.num_outputs, rank, generator=generator)
                * _STANDARD_DEVIATION_B,
            )
            for module in self._linears
        }
