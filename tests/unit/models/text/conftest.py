"""Tokenizers: the bundled model's, and small ones of the other kinds."""

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from models.text.tokenizer import Text

WORDS = ("hello", "world", "the", "and", "ing", "lo", "wor", "12", "..")
SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<|user|>", "<|end|>")
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,!?'\"-:;()"
CHATML = (
    "{% for message in messages %}{{ '<|user|>' + message['role'] + '\n' + message['content'] }}"
    "{{ '<|end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|user|>assistant\n' }}{% endif %}"
)


def make_sentencepiece_like_tokenizer(*, kind):
    """Unigram with byte fallback, decoded as Llama ("llama") or Mistral ("metaspace") do."""
    pieces = ["▁", *(f"▁{word}" for word in WORDS), *WORDS, *LETTERS, "é", "日", "本"]
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    vocabulary = [(token, 0.0) for token in (*SPECIAL_TOKENS, *byte_tokens)]
    vocabulary += [(piece, -10.0 + len(piece)) for piece in dict.fromkeys(pieces)]
    backend = Tokenizer(models.Unigram(vocabulary, unk_id=0, byte_fallback=True))
    if kind == "llama":
        backend.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        backend.decoder = decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
        backend.decoder = decoders.Sequence(
            [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="always"), decoders.Fuse()]
        )
    return wrap(backend)


def make_byte_level_tokenizer(*, merges=(), added=()):
    """Byte-level BPE whose vocabulary is the 256 bytes and what the merges make."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *alphabet))}
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    backend = Tokenizer(models.BPE(vocabulary, list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(token, normalized=False) for token in added])
    return wrap(backend)


def wrap(backend):
    backend.add_special_tokens(list(SPECIAL_TOKENS))
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


@pytest.fixture(scope="session")
def bundled_text(bundled_model_path):
    return Text.load(str(bundled_model_path))
