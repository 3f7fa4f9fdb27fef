"""Token ids behind the base model's are valid in the text of an adapter that has rows for them."""

import pytest

from models.errors import InvalidRequestError
from models.requests import TextPrompt, TokenPrompt
from models.text.adapter_text import AdapterTexts, TextFiles
from models.text.tokenizer import Text
from tests.unit.models.text.test_adapter_text import make_tokenizer

SIZE = len(make_tokenizer())


@pytest.fixture
def texts():
    opened = AdapterTexts(Text(make_tokenizer(), vocabulary_size=SIZE))
    yield opened
    opened.close()


def test_an_added_token_is_spelled_in_prompts_and_answers(texts, tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["[PAD]"], special_tokens=True)
    tokenizer.save_pretrained(tmp_path)
    files = TextFiles(tokenizer=(tmp_path / "tokenizer.json").read_bytes())

    own = texts.read("a", files, num_added_rows=1)

    assert own.warnings == ()
    assert own.text.encode(TextPrompt(text="[PAD]")) == (SIZE,)
    assert own.text.token_text(SIZE) == ("[PAD]", b"[PAD]")


def test_without_a_tokenizer_of_its_own_ids_are_valid_and_spell_nothing(texts):
    text = texts.read("a", TextFiles(), num_added_rows=2).text

    assert text.encode(TokenPrompt(token_ids=(1, SIZE + 1))) == (1, SIZE + 1)
    assert text.token_text(SIZE + 1) == ("", b"")
    with pytest.raises(InvalidRequestError, match=f"token id {SIZE + 2} is not in"):
        text.encode(TokenPrompt(token_ids=(SIZE + 2,)))


def test_the_base_model_does_not_notice(texts):
    base = Text(make_tokenizer(), vocabulary_size=SIZE)
    AdapterTexts(base).read("a", TextFiles(), num_added_rows=2)

    with pytest.raises(InvalidRequestError, match=f"token id {SIZE} is not in"):
        base.encode(TokenPrompt(token_ids=(SIZE,)))
