"""The paged contract of ``torch.nn.attention.varlen.varlen_attn``, kept to the letter and slow.

Written from torch's docstring and the checks of FlashAttention 2, not from our caller: what the
kernel refuses is refused here, and what it does not read is not read.
"""

import torch


def emulated_varlen(
    query,
    key,
    value,
    cu_seq_q,
    cu_seq_k,
    max_q,
    max_k,
    *,
    return_aux=None,
    scale=None,
    window_size=(-1, -1),
    enable_gqa=False,
    seqused_k=None,
    block_table=None,
    num_splits=None,
):
    """Attend; query [T, H, D], key and value pages [total_pages, page_size, Hkv, D]."""
    num_pages, page_size, num_kv_heads, width = key.shape
    total_q, num_heads, _ = query.shape
    num_sequences = cu_seq_q.numel() - 1
    assert return_aux is None
    assert query.dtype in (torch.float16, torch.bfloat16)
    assert query.dtype == key.dtype == value.dtype
    assert query.shape == (total_q, num_heads, width)
    assert value.shape == key.shape
    assert width <= 256
    assert width % 8 == 0
    assert page_size % 256 == 0
    assert enable_gqa or num_heads == num_kv_heads
    assert num_heads % num_kv_heads == 0
    assert num_splits == 1  # others are broken in some versions
    for tensor, shape in (
        (cu_seq_q, (num_sequences + 1,)),
        (cu_seq_k, (num_sequences + 1,)),
        (seqused_k, (num_sequences,)),
        (block_table, (num_sequences, block_table.shape[1])),
    ):
        assert tensor.dtype == torch.int32
        assert tensor.shape == shape
    for tensor in (cu_seq_q, cu_seq_k, seqused_k):
        assert tensor.is_contiguous()
    for tensor in (query, key, value, block_table):
        assert tensor.stride(-1) == 1
    starts = cu_seq_q.tolist()
    assert starts[0] == 0
    assert starts[-1] == total_q
    assert (cu_seq_q.diff() > 0).all()
    assert max_q == int(cu_seq_q.diff().max())
    assert isinstance(max_k, int)
    assert max_k >= int(seqused_k.max())
    left, right = window_size
    output = torch.full_like(query, torch.nan)
    for number in range(num_sequences):
        used = int(seqused_k[number])
        rows = range(starts[number], starts[number + 1])
        pages = block_table[number, : -(-used // page_size)].tolist()
        assert all(0 <= page < num_pages for page in pages)
        keys, values = (
            torch.cat([pool[page] for page in pages])[:used].float() for pool in (key, value)
        )
        for index, row in enumerate(rows):
            # Aligned to the lower right corner: the last row sees the last key.
            position = used - len(rows) + index
            first = 0 if left < 0 else max(0, position - left)
            stop = used if right < 0 else min(used, position + right + 1)
            for head in range(num_heads):
                kv_head = head // (num_heads // num_kv_heads)
                scores = keys[first:stop, kv_head] @ query[row, head].float()
                scores *= width**-0.5 if scale is None else scale
                weights = torch.softmax(scores, dim=0)
                output[row, head] = (weights @ values[first:stop, kv_head]).to(query.dtype)
    return output
