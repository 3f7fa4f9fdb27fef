"""MatmulAttention against slow, obvious attention, and its row independence."""

import math
from types import SimpleNamespace

import pytest
import torch

from models.attention.matmul import VALUE_SPAN_TOKENS, MatmulAttention
from models.config import KVCacheConfig
from models.errors import ConfigError
from models.kv_cache.store import KVCachePool, LayerShape, plan_kv_cache
from models.loading.arithmetic import product_dtype
from models.runner.inputs import pack
from models.scheduling.step_plan import ScheduledSequence

BLOCK_SIZE = 16
MODULE = SimpleNamespace(layer_idx=0)
CPU = torch.device("cpu")


class Sequences:
    """Random keys, values and queries of several sequences, run through one pool."""

    def __init__(
        self, lengths, *, dtype=torch.float32, num_heads=4, num_kv_heads=2, width=16, seed=0
    ):
        self.lengths = lengths
        self.shape = LayerShape(num_kv_heads, width, width)
        generator = torch.Generator().manual_seed(seed)

        def draw(num_heads, length):
            return torch.randn(num_heads, length, width, generator=generator).to(dtype)

        self.queries = [draw(num_heads, length) for length in lengths]
        self.keys = [draw(num_kv_heads, length) for length in lengths]
        self.values = [draw(num_kv_heads, length) for length in lengths]
        num_blocks = sum(-(-length // BLOCK_SIZE) for length in lengths) + 4
        bytes_per_block = num_kv_heads * 2 * width * dtype.itemsize * BLOCK_SIZE
        plan = plan_kv_cache(
            KVCacheConfig(
                budget_bytes=bytes_per_block * (num_blocks + 1), block_size_tokens=BLOCK_SIZE
            ),
            [self.shape],
            dtype,
        )
        self.pool = KVCachePool(plan, [self.shape], dtype, CPU)
        self.backend = MatmulAttention(self.pool, product_dtype(dtype, CPU))
        ids = iter(torch.randperm(plan.num_blocks, generator=generator).tolist())
        self.tables = [
            tuple(next(ids) for _ in range(-(-length // BLOCK_SIZE))) for length in lengths
        ]

    def step(self, spans, *, multiple=1, **keywords):
        """Run {sequence: (start, end)} as one step; return {sequence: [q, H, D]}."""
        parts = [
            ScheduledSequence(index, (0,) * (end - start), start, self.tables[index], False)
            for index, (start, end) in spans.items()
        ]
        inputs = pack(
            parts,
            block_size=BLOCK_SIZE,
            null_block_id=self.pool.null_block_id,
            multiple=multiple,
            device=CPU,
        )
        num_rows = inputs.token_ids.shape[1]
        query, key, value = (
            torch.zeros(1, tensors[0].shape[0], num_rows, tensors[0].shape[2]).to(tensors[0].dtype)
            for tensors in (self.queries, self.keys, self.values)
        )
        rows = {}
        for part, last in zip(parts, inputs.last_rows, strict=True):
            where = slice(last + 1 - len(part.token_ids), last + 1)
            span = slice(part.start, part.end)
            query[0, :, where] = self.queries[part.seq_id][:, span]
            key[0, :, where] = self.keys[part.seq_id][:, span]
            value[0, :, where] = self.values[part.seq_id][:, span]
            rows[part.seq_id] = where
        self.backend.begin_step(inputs.layout)
        output, weights = self.backend(MODULE, query, key, value, None, **keywords)
        assert weights is None
        return {index: output[0, where] for index, where in rows.items()}

    def run(self, index, chunks, **keywords):
        """Run one sequence alone in chunks of the given sizes; return [length, H, D]."""
        outputs, start = [], 0
        for size in chunks:
            outputs.append(self.step({index: (start, start + size)}, **keywords)[index])
            start += size
        assert start == self.lengths[index]
        return torch.cat(outputs)


def slow_attention(
    queries, keys, values, *, scaling, sliding_window=None, softcap=None, sinks=None
):
    """Attend token by token and head by head, in float64; [length, H, D]."""
    num_heads, length, width = queries.shape
    output = torch.zeros(length, num_heads, width, dtype=torch.float64)
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
def test_attention_equals_a_slow_reference_for_every_way_to_cut_a_prompt(options):
    sequences = Sequences([37])
    expected = slow_attention(
        sequences.queries[0],
        sequences.keys[0],
        sequences.values[0],
        scaling=options.get("scaling", 16**-0.5),
        sliding_window=options.get("sliding_window"),
        softcap=options.get("softcap"),
        sinks=options.get("s_aux"),
    )

    for chunks in ([37], [1] * 37, [16, 16, 5], [20, 1, 1, 15]):
        output = sequences.run(0, chunks, **options)
        assert torch.allclose(output.double(), expected, atol=1e-5)


def test_steps_that_mix_decodes_and_chunks_equal_the_reference():
    sequences = Sequences([40, 33, 21, 5])
    expected = [
        slow_attention(query, key, value, scaling=0.25)
        for query, key, value in zip(
            sequences.queries, sequences.keys, sequences.values, strict=True
        )
    ]
    sequences.step({0: (0, 39), 1: (0, 32), 2: (0, 10)}, scaling=0.25)

    output = sequences.step(
        {3: (0, 5), 0: (39, 40), 2: (10, 21), 1: (32, 33)}, multiple=8, scaling=0.25
    )

    for index, (start, end) in {0: (39, 40), 1: (32, 33), 2: (10, 21), 3: (0, 5)}.items():
        assert torch.allclose(output[index].double(), expected[index][start:end], atol=1e-5)


@pytest.mark.parametrize("width", [16, 64, 80, 128])
@pytest.mark.parametrize("length", [30, 700, VALUE_SPAN_TOKENS + 300])
def test_bfloat16_rows_are_equal_bit_for_bit_alone_and_in_any_company(width, length):
    longer = length + 513
    lengths = [length, longer, 3, length // 2, *[length - 3] * 6]
    sequences = Sequences(lengths, dtype=torch.bfloat16, num_heads=6, num_kv_heads=2, width=width)
    whole = sequences.run(0, [length])
    cuts = [length // 3, 1, 1, length // 5]
    cut = sequences.run(0, [*cuts, length - sum(cuts)])
    for index in range(1, len(lengths)):
        sequences.run(index, [lengths[index]])

    alone = sequences.step({0: (length - 1, length)})[0]
    company = sequences.step({index: (size - 1, size) for index, size in enumerate(lengths)})[0]
    mixed = sequences.step({1: (longer - 40, longer), 0: (length - 1, length), 2: (0, 3)})[0]

    assert torch.equal(cut, whole)
    assert torch.equal(alone[0], whole[-1])
    assert torch.equal(company[0], whole[-1])
    assert torch.equal(mixed[0], whole[-1])


def test_a_former_tenants_nan_does_not_reach_the_next_one():
    sequences = Sequences([20])
    expected = sequences.run(0, [20])
    sequences.pool.keys[0][:, :-1] = float("nan")
    sequences.pool.values[0][:, :-1] = float("nan")

    output = sequences.run(0, [18, 1, 1])

    assert torch.equal(output, expected) or torch.allclose(output, expected, atol=1e-6)
    assert not output.isnan().any()


def test_a_neighbours_nan_stays_with_the_neighbour():
    sequences = Sequences([20, 20, 7], dtype=torch.bfloat16)
    for index in range(3):
        sequences.run(index, [sequences.lengths[index]])
    expected = sequences.step({0: (19, 20), 2: (6, 7)})
    sequences.keys[1][:, -1] = float("nan")
    sequences.values[1][:, -1] = float("nan")

    output = sequences.step({0: (19, 20), 1: (19, 20), 2: (6, 7)})

    assert output[1].isnan().all()
    assert torch.equal(output[0], expected[0])
    assert torch.equal(output[2], expected[2])


def test_padding_rows_are_zero_and_store_nothing():
    sequences = Sequences([5])
    before = sequences.pool.keys[0].clone()

    sequences.step({0: (0, 5)}, multiple=8)

    changed = (sequences.pool.keys[0] != before).any(dim=-1).any(dim=0)
    assert int(changed.sum()) == 5


def test_an_unknown_attention_keyword_is_refused_by_name():
    sequences = Sequences([5])

    with pytest.raises(ConfigError, match="alibi_bias"):
        sequences.step({0: (0, 5)}, alibi_bias=torch.zeros(4))
