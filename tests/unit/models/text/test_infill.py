"""Prompts with a suffix: only for models that have the tokens, and then in their order."""

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from models.errors import InvalidRequestError
from models.requests import TextPrompt
from models.text.tokenizer import Text

WORDS = ["[BOS]", "a", "b", "c", "<a>"]
FAMILIES = [
    ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"],
    ["<fim_prefix>", "<fim_suffix>", "<fim_middle>"],
    ["<fim-prefix>", "<fim-suffix>", "<fim-middle>"],
    ["<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"],  # noqa: RUF001
]


def text_of(special):
    words = {word: number for number, word in enumerate([*WORDS, *special])}
    inner = Tokenizer(models.WordLevel(words, unk_token="<a>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.post_processor = TemplateProcessing(
        single="[BOS] $A", special_tokens=[("[BOS]", words["[BOS]"])]
    )
    inner.add_special_tokens(["[BOS]", *special])
    return Text(PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="[BOS]")), words


@pytest.mark.parametrize("family", FAMILIES)
def test_prefix_and_suffix_stand_behind_their_tokens(family):
    text, words = text_of(family)
    before, behind, middle = (words[name] for name in family)

    whole = text.encode(TextPrompt(text="a b", suffix="c"))
    bare = text.encode(TextPrompt(text="a", suffix="c", add_special_tokens=False))
    empty = text.encode(TextPrompt(text="", suffix="c", add_special_tokens=False))

    a, b, c = words["a"], words["b"], words["c"]
    assert whole == (words["[BOS]"], before, a, b, behind, c, middle)
    assert bare == (before, a, behind, c, middle)
    assert empty == (before, behind, c, middle)


@pytest.mark.parametrize("special", [[], FAMILIES[0][:2], [FAMILIES[0][0], *FAMILIES[1][1:]]])
def test_a_model_without_all_three_tokens_refuses_a_suffix_by_name(special):
    text, _ = text_of(special)

    with pytest.raises(InvalidRequestError) as caught:
        text.encode(TextPrompt(text="a", suffix="c"))

    assert caught.value.param == "suffix"
    assert text.encode(TextPrompt(text="a", suffix=""))


def test_a_suffix_that_is_no_unicode_is_refused_by_name():
    text, _ = text_of(FAMILIES[0])

    with pytest.raises(InvalidRequestError) as caught:
        text.encode(TextPrompt(text="a", suffix="\ud800"))

    assert caught.value.param == "suffix"
