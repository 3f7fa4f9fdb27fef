"""A GGUF file of a Llama with one layer and random weights, as llama.cpp would write it."""

import gguf
import numpy as np
from tokenizers import pre_tokenizers

HIDDEN = 64
HEADS = 4
KV_HEADS = 2
VOCABULARY = ["<|end|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "ĊĊ"]
CHAT_TEMPLATE = "{% for m in messages %}{{ m.content }}<|end|>{% endfor %}"


def write_tiny_gguf(path, *, architecture="llama", pre_tokenizer="gpt-2", has_output=False):
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(2 * HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_vocab_size(len(VOCABULARY))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer)
    writer.add_token_list(VOCABULARY)
    writer.add_token_types([3] + [1] * (len(VOCABULARY) - 1))
    writer.add_token_merges(["Ċ Ċ"])
    writer.add_eos_token_id(0)
    writer.add_chat_template(CHAT_TEMPLATE)
    for name, (values, kind) in tensors(has_output).items():
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tensors(has_output):
    """Return name -> (float32 values, how they are stored)."""
    random = np.random.default_rng(0)
    kinds = gguf.GGMLQuantizationType
    shapes = {
        "token_embd.weight": ((len(VOCABULARY), HIDDEN), kinds.Q8_0),
        "output_norm.weight": ((HIDDEN,), kinds.F32),
        "blk.0.attn_norm.weight": ((HIDDEN,), kinds.F32),
        "blk.0.ffn_norm.weight": ((HIDDEN,), kinds.F32),
        "blk.0.attn_q.weight": ((HIDDEN, HIDDEN), kinds.Q4_1),
        "blk.0.attn_k.weight": ((HIDDEN * KV_HEADS // HEADS, HIDDEN), kinds.Q4_1),
        "blk.0.attn_v.weight": ((HIDDEN * KV_HEADS // HEADS, HIDDEN), kinds.Q4_1),
        "blk.0.attn_output.weight": ((HIDDEN, HIDDEN), kinds.Q4_0),
        "blk.0.ffn_gate.weight": ((2 * HIDDEN, HIDDEN), kinds.Q4_0),
        "blk.0.ffn_up.weight": ((2 * HIDDEN, HIDDEN), kinds.Q8_0),
        "blk.0.ffn_down.weight": ((HIDDEN, 2 * HIDDEN), kinds.Q4_1),
    }
    if has_output:
        shapes["output.weight"] = ((len(VOCABULARY), HIDDEN), kinds.Q8_0)
    return {
        name: (random.standard_normal(shape, dtype=np.float32), kind)
        for name, (shape, kind) in shapes.items()
    }
