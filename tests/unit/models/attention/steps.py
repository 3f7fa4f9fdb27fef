"""Random sequences that tests run through a backend, step by step."""

import torch

from models.attention.matmul import MatmulAttention
from models.config import KVCacheConfig
from models.kv_cache.store import KVCachePool, LayerShape, plan_kv_cache
from models.loading.arithmetic import product_dtype
from models.runner.inputs import pack
from models.scheduling.step_plan import ScheduledSequence

CPU = torch.device("cpu")


class Module:
    layer_idx = 0


def matmul(pool):
    return MatmulAttention(pool, product_dtype(pool.keys[0].dtype, pool.keys[0].device))


class Sequences:
    """Random keys, values and queries of several sequences, run through one pool."""

    def __init__(
        self,
        lengths,
        *,
        make_backend=matmul,
        dtype=torch.float32,
        num_heads=4,
        num_kv_heads=2,
        width=16,
        value_width=None,
        block_size=16,
        device=CPU,
        seed=0,
    ):
        self.lengths = lengths
        self.device = device
        value_width = value_width or width
        self.shape = LayerShape(num_kv_heads, width, value_width)
        generator = torch.Generator().manual_seed(seed)

        def draw(num_heads, length, width):
            return torch.randn(num_heads, length, width, generator=generator).to(device, dtype)

        self.queries = [draw(num_heads, length, width) for length in lengths]
        self.keys = [draw(num_kv_heads, length, width) for length in lengths]
        self.values = [draw(num_kv_heads, length, value_width) for length in lengths]
        num_blocks = sum(-(-length // block_size) for length in lengths) + 4
        bytes_per_block = num_kv_heads * (width + value_width) * dtype.itemsize * block_size
        plan = plan_kv_cache(
            KVCacheConfig(
                budget_bytes=bytes_per_block * (num_blocks + 1), block_size_tokens=block_size
            ),
            [self.shape],
            dtype,
        )
        self.pool = KVCachePool(plan, [self.shape], dtype, device)
        self.backend = make_backend(self.pool)
        ids = iter(torch.randperm(plan.num_blocks, generator=generator).tolist())
        self.tables = [
            tuple(next(ids) for _ in range(-(-length // block_size))) for length in lengths
        ]

    def step(self, spans, *, multiple=1, is_attention_by_row=False, **keywords):
        """Run {sequence: (start, end)} as one step; return {sequence: [q, H, Dv]}."""
        parts = [
            ScheduledSequence(index, (0,) * (end - start), start, self.tables[index], False)
            for index, (start, end) in spans.items()
        ]
        inputs = pack(
            parts,
            block_size=self.pool.plan.block_size_tokens,
            null_block_id=self.pool.null_block_id,
            multiple=multiple,
            is_attention_by_row=is_attention_by_row,
            device=self.device,
        )
        num_rows = inputs.token_ids.shape[1]
        query, key, value = (
            tensors[0].new_zeros(1, tensors[0].shape[0], num_rows, tensors[0].shape[2])
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
        output, weights = self.backend(Module, query, key, value, None, **keywords)
        assert weights is None
        assert output.shape == (1, num_rows, query.shape[1], value.shape[3])
        assert not output[0, inputs.layout.num_tokens :].any()
        return {index: output[0, where] for index, where in rows.items()}

    def run(self, index, chunks, **keywords):
        """Run one sequence alone in chunks of the given sizes; return [length, H, Dv]."""
        outputs, start = [], 0
        for size in chunks:
            outputs.append(self.step({index: (start, start + size)}, **keywords)[index])
            start += size
        assert start == self.lengths[index]
        return torch.cat(outputs)
