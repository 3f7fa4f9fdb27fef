"""A tiny random model with a byte tokenizer, as a folder that can be served."""

from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.tiny_models import FAMILIES, make_model

EOS = "<|end|>"
# What the tests call it.
TINY_ID = "tiny"
TINY_WINDOW_TOKENS = 4096

_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'system' and not loop.first %}"
    "{{ raise_exception('the system message must come first') }}"
    "{% endif %}"
    "<{{ message.role }}>{{ message.content }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def save_tiny_model(folder: Path) -> None:
    """Write the model and its tokenizer; every byte is a token, and so is the end.

    The end has no weight of its own to be drawn by: random logits draw it about once in 257
    tokens, which ``ignore_eos`` avoids where a test needs length.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate(alphabet)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS)
    wrapped.chat_template = _CHAT_TEMPLATE
    wrapped.save_pretrained(folder)
    llama = next(family for family in FAMILIES if family.name == "llama")
    make_model(
        llama,
        vocab_size=len(wrapped),
        max_position_embeddings=TINY_WINDOW_TOKENS,
        eos_token_id=wrapped.eos_token_id,
    ).save_pretrained(folder)
