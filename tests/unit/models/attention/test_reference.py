"""ReferenceAttention against its definition in numbers of Python."""

import math

import pytest
import torch

from models.attention.reference import ReferenceAttention
from tests.unit.models.attention.steps import Sequences


def slow_attention(
    queries, keys, values, *, scaling, sliding_window=None, softcap=None, sinks=None
):
    """Attend token by token and head by head, in float64; [length, H, Dv]."""
    num_heads, length, _ = queries.shape
    output = torch.zeros(length, num_heads, values.shape[-1], dtype=torch.float64)
    for head in range(num_heads):
        kv_head = head // (num_heads // keys.shape[0])
        for position in range(length):
            first = 0 if sliding_window is None else max(0, position + 1 - sliding_window)
            scores = [
                float(queries[head, position].double() @ keys[kv_head, other].double()) * scaling
                for other in range(first, position + 1)
            ]
            if softcap is not None:
                scores = [math.tanh(score / softcap) * softcap for score in scores]
            exponentials = [math.exp(score) for score in scores]
            total = sum(exponentials) + (math.exp(float(sinks[head])) if sinks is not None else 0)
            for other, exponential in enumerate(exponentials, start=first):
                output[position, head] += exponential / total * values[kv_head, other].double()
    return output


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scaling": 0.3},
        {"sliding_window": 5},
        {"softcap": 1.5},
        {"s_aux": torch.tensor([0.5, -1.0, 2.0, 0.0])},
        {"sliding_window": 18, "softcap": 2.0},
    ],
    ids=str,
)
def test_the_reference_computes_what_attention_is(options):
    sequences = Sequences([37, 5], make_backend=ReferenceAttention, value_width=8)
    expected = slow_attention(
        sequences.queries[0],
        sequences.keys[0],
        sequences.values[0],
        scaling=options.get("scaling", 16**-0.5),
        sliding_window=options.get("sliding_window"),
        softcap=options.get("softcap"),
        sinks=options.get("s_aux"),
    )

    chunk = sequences.step({1: (0, 5), 0: (0, 36)}, **options)[0]
    decode = sequences.step({0: (36, 37)}, **options)[0]

    assert torch.allclose(torch.cat([chunk, decode]).double(), expected, atol=1e-5)


def test_half_precision_is_rounded_at_the_end_only():
    half = Sequences([20], make_backend=ReferenceAttention, dtype=torch.bfloat16)
    full = Sequences([20], make_backend=ReferenceAttention)
    for name in ("queries", "keys", "values"):
        setattr(full, name, [tensor.float() for tensor in getattr(half, name)])

    assert torch.equal(half.run(0, [20]), full.run(0, [20]).bfloat16())
