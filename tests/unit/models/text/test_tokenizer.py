"""Text: prompts to ids, typed errors, and the set of tokens that end a text."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from models.errors import ChatTemplateError, ConfigError, InvalidRequestError
from models.requests import ChatPrompt, TextPrompt, TokenPrompt
from models.text.tokenizer import Text
from tests.unit.models.text.conftest import (
    CHATML,
    make_byte_level_tokenizer,
    make_sentencepiece_like_tokenizer,
)

HI = {"role": "user", "content": "Hi"}
# The answer is followed by nothing, and the next turn by its own token (as GLM does).
OPEN_TURNS = (
    "{% for m in messages %}{{ '<|user|>' if m.role == 'user' }}{{ m.content }}{% endfor %}"
)


def chat(*messages, **fields):
    return ChatPrompt(messages=messages, **fields)


def make_model_folder(folder, *, chat_template=None, generation_config=None, config=None):
    tokenizer = make_byte_level_tokenizer()
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **(config or {})}))
    if generation_config is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation_config))
    return str(folder)


@pytest.fixture(scope="module")
def text():
    return Text(make_byte_level_tokenizer(), chat_template=CHATML)


@pytest.fixture(scope="module")
def ids_of():
    return make_byte_level_tokenizer().convert_tokens_to_ids


def test_a_chat_of_the_bundled_model_is_encoded_as_transformers_does(bundled_text):
    messages = [{"role": "system", "content": "Be brief."}, HI]

    token_ids = bundled_text.encode(chat(*messages))

    assert list(token_ids) == bundled_text._tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )


def test_a_chat_gets_no_special_tokens_besides_the_templates():
    tokenizer = make_sentencepiece_like_tokenizer(kind="llama")
    tokenizer.add_bos_token = True
    text = Text(tokenizer, chat_template="{{ bos_token }}{{ messages[0].content }}")

    token_ids = text.encode(chat(HI))

    assert token_ids.count(tokenizer.bos_token_id) == 1


def test_plain_text_gets_the_special_tokens_of_the_tokenizer_unless_told_not_to():
    tokenizer = make_sentencepiece_like_tokenizer(kind="llama")
    tokenizer.add_bos_token = True
    text = Text(tokenizer)

    with_bos = text.encode(TextPrompt(text="hello"))
    without = text.encode(TextPrompt(text="hello", add_special_tokens=False))

    assert with_bos == (tokenizer.bos_token_id, *without)


def test_special_tokens_spelled_out_in_a_prompt_are_special_tokens(text, ids_of):
    (end,) = ids_of(["<|end|>"])

    assert end in text.encode(TextPrompt(text="a<|end|>"))
    assert text.encode(chat({"role": "user", "content": "<|end|>"})).count(end) == 2


def test_token_ids_are_taken_as_they_are(text):
    assert text.encode(TokenPrompt(token_ids=(7, 3, 7))) == (7, 3, 7)


@pytest.mark.parametrize("token_id", [-1, 1000])
def test_a_token_id_outside_of_the_models_vocabulary_is_refused_by_number(token_id):
    text = Text(make_byte_level_tokenizer(), vocabulary_size=1000)

    with pytest.raises(InvalidRequestError, match=rf"{token_id} is not in \[0, 1000\)") as caught:
        text.encode(TokenPrompt(token_ids=(1, token_id, 2)))

    assert caught.value.param == "prompt"


def test_the_models_vocabulary_may_exceed_the_tokenizers():
    text = Text(make_byte_level_tokenizer(), vocabulary_size=1000)

    assert text.vocabulary_size == 1000
    assert text.encode(TokenPrompt(token_ids=(999,))) == (999,)


def test_text_with_a_token_beyond_the_models_vocabulary_is_refused():
    tokenizer = make_byte_level_tokenizer(added=["<new>"])
    text = Text(tokenizer, vocabulary_size=len(tokenizer) - 1)

    with pytest.raises(InvalidRequestError, match="token id"):
        text.encode(TextPrompt(text="<new>"))


@pytest.mark.parametrize("prompt", [TextPrompt(text=""), TokenPrompt(token_ids=())])
def test_an_empty_prompt_is_refused(prompt, text):
    with pytest.raises(InvalidRequestError) as caught:
        text.encode(prompt)

    assert caught.value.param == "prompt"


def test_a_template_that_renders_nothing_is_an_empty_prompt():
    text = Text(make_byte_level_tokenizer(), chat_template="{# nothing #}")

    with pytest.raises(InvalidRequestError) as caught:
        text.encode(chat(HI))

    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        (TextPrompt(text="ab\ud83d"), "prompt"),
        (chat({"role": "user", "content": "\udc69"}), "messages"),
    ],
)
def test_half_a_surrogate_pair_is_refused(prompt, param, text):
    with pytest.raises(InvalidRequestError, match="surrogate") as caught:
        text.encode(prompt)

    assert caught.value.param == param


def test_a_model_without_a_chat_template_says_so():
    text = Text(make_byte_level_tokenizer())

    assert not text.has_chat_template
    with pytest.raises(ChatTemplateError, match="no chat template"):
        text.encode(chat(HI))


def test_a_configured_template_replaces_the_models_own(tmp_path):
    path = make_model_folder(tmp_path, chat_template="{{ raise_exception('own') }}")

    text = Text.load(path, chat_template="{{ messages[0].content }}")

    assert text.encode(chat(HI)) == text.encode(TextPrompt(text="Hi"))


def test_of_several_templates_the_default_one_is_taken():
    tokenizer = make_byte_level_tokenizer()
    tokenizer.chat_template = {"tool_use": "tools", "default": "{{ messages[0].content }}"}

    text = Text(tokenizer)

    assert text.encode(chat(HI)) == text.encode(TextPrompt(text="Hi"))


def test_the_bundled_model_ends_at_the_end_of_a_turn(bundled_text):
    end = bundled_text._tokenizer.convert_tokens_to_ids("<|im_end|>")

    assert bundled_text.eos_token_ids == {end}


def test_end_tokens_of_generation_config_tokenizer_and_template_are_joined(tmp_path, ids_of):
    path = make_model_folder(
        tmp_path, chat_template=CHATML, generation_config={"eos_token_id": [40, 41]}
    )

    assert Text.load(path).eos_token_ids == {40, 41, *ids_of(["</s>", "<|end|>"])}


def test_a_single_end_token_in_the_generation_config_counts(tmp_path, ids_of):
    path = make_model_folder(tmp_path, generation_config={"eos_token_id": 40})

    assert Text.load(path).eos_token_ids == {40, *ids_of(["</s>"])}


def test_without_a_generation_config_the_config_counts(tmp_path, ids_of):
    path = make_model_folder(tmp_path, config={"eos_token_id": 42})

    assert Text.load(path).eos_token_ids == {42, *ids_of(["</s>"])}


def test_a_token_that_begins_the_next_turn_ends_this_one(ids_of):
    text = Text(make_byte_level_tokenizer(), chat_template=OPEN_TURNS)

    assert text.eos_token_ids == set(ids_of(["</s>", "<|user|>"]))


def test_a_template_that_ends_turns_with_ordinary_text_adds_no_end_token(ids_of):
    source = "{% for m in messages %}{{ m.role }}: {{ m.content }}\nUser:<|end|>{% endfor %}"

    text = Text(make_byte_level_tokenizer(), chat_template=source)

    assert text.eos_token_ids == set(ids_of(["</s>"]))


def test_a_template_that_refuses_every_chat_adds_no_end_token(ids_of):
    text = Text(make_byte_level_tokenizer(), chat_template="{{ raise_exception('no') }}")

    assert text.eos_token_ids == set(ids_of(["</s>"]))


def test_a_folder_without_a_tokenizer_is_a_configuration_error(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')

    with pytest.raises(ConfigError, match="tokenizer") as caught:
        Text.load(str(tmp_path))

    assert caught.value.field == "model"
    assert "\n" not in str(caught.value)


def test_a_token_has_its_text_and_its_bytes(text, ids_of):
    space, accent, end = ids_of(["Ġ", "Ã", "<|end|>"])

    assert text.token_text(space) == (" ", b" ")
    assert text.token_text(accent) == ("\ufffd", b"\xc3")
    assert text.token_text(end) == ("<|end|>", b"<|end|>")
    assert text.token_text(10**6) == ("", b"")


def test_a_byte_fallback_token_is_its_byte():
    tokenizer = make_sentencepiece_like_tokenizer(kind="llama")
    text = Text(tokenizer)
    newline, lead, word = tokenizer.convert_tokens_to_ids(["<0x0A>", "<0xE2>", "▁hello"])

    assert text.token_text(newline) == ("\n", b"\n")
    assert text.token_text(lead) == ("\ufffd", b"\xe2")
    assert text.token_text(word) == (" hello", b" hello")


def test_the_bytes_of_an_encoded_text_are_the_text(bundled_text):
    words = "naïve 日本 👩‍👩‍👧‍👦\n\n1,234.5"

    pieces = [
        bundled_text.token_text(token_id)[1]
        for token_id in bundled_text.encode(TextPrompt(text=words))
    ]

    assert b"".join(pieces).decode() == words


def test_many_threads_encode_at_the_same_time(bundled_text):
    prompts = [chat({"role": "user", "content": f"{number} words " * 50}) for number in range(64)]
    expected = [bundled_text.encode(prompt) for prompt in prompts]

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(bundled_text.encode, prompts)) == expected
