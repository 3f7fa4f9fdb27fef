"""Tests of adapters' own tokenizer files, against what transformers makes of the same files."""

import json
import sys

import pytest
from transformers import AutoTokenizer

from models.errors import AdapterIncompatibleError, ChatTemplateError, InvalidRequestError
from models.requests import ChatPrompt, TextPrompt
from models.text.adapter_text import AdapterTexts, TextFiles
from models.text.tokenizer import Text
from tests.unit.models.text.conftest import (
    CHATML,
    make_byte_level_tokenizer,
    make_sentencepiece_like_tokenizer,
)

OWN_TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
CHAT = ChatPrompt(messages=({"role": "user", "content": "hello"},))
NUM_ROWS = 400


def make_tokenizer():
    tokenizer = make_byte_level_tokenizer(merges=[("l", "l"), ("h", "e")], added=["<base>"])
    tokenizer.chat_template = CHATML
    return tokenizer


@pytest.fixture(scope="module")
def base():
    return Text(make_tokenizer(), eos_token_ids=(2,), vocabulary_size=NUM_ROWS)


@pytest.fixture(scope="module")
def texts(base):
    opened = AdapterTexts(base)
    yield opened
    opened.close()


@pytest.fixture
def saved(tmp_path):
    """Saves a tokenizer as transformers does, and returns its files."""

    def save(tokenizer):
        tokenizer.save_pretrained(tmp_path)
        names = ("chat_template.jinja", "tokenizer_config.json", "tokenizer.json")
        contents = [
            (tmp_path / name).read_bytes() if (tmp_path / name).exists() else b"" for name in names
        ]
        return TextFiles(template=contents[0], config=contents[1], tokenizer=contents[2])

    return save


def edited(files, change):
    described = json.loads(files.tokenizer)
    change(described)
    return TextFiles(tokenizer=json.dumps(described).encode())


def test_the_base_models_own_files_change_nothing(texts, saved):
    own = texts.read("a", saved(make_tokenizer()))

    assert own.text is None
    assert own.warnings == ()
    assert own.num_bytes == 0


def test_the_models_own_template_gives_way_to_a_configured_one(saved):
    base = Text(make_tokenizer(), chat_template="configured {{ messages[0].content }}")
    texts = AdapterTexts(base)

    assert texts.read("a", saved(make_tokenizer())).text is None
    own = texts.read("a", TextFiles(template=OWN_TEMPLATE.encode())).text
    assert own.encode(CHAT) != base.encode(CHAT)
    texts.close()


def test_no_files_change_nothing(texts):
    assert texts.read("a", TextFiles()).text is None


@pytest.mark.parametrize(
    "files",
    [
        TextFiles(template=OWN_TEMPLATE.encode()),
        TextFiles(config=json.dumps({"chat_template": OWN_TEMPLATE}).encode()),
        TextFiles(
            config=json.dumps(
                {
                    "chat_template": [
                        {"name": "tool_use", "template": "no"},
                        {"name": "default", "template": OWN_TEMPLATE},
                    ]
                }
            ).encode()
        ),
        TextFiles(
            template=OWN_TEMPLATE.encode(), config=json.dumps({"chat_template": "no"}).encode()
        ),
    ],
)
def test_chats_are_rendered_with_the_adapters_template(texts, base, files):
    text = texts.read("a", files).text

    expected = base.encode(
        TextPrompt(text="[user] hello<|end|>[assistant] ", add_special_tokens=False)
    )
    assert text.encode(CHAT) == expected != base.encode(CHAT)
    plain = TextPrompt(text="hello")
    assert text.encode(plain) == base.encode(plain)


def test_a_template_knows_its_own_special_tokens_before_the_bases(texts, base):
    config = {"chat_template": "{{ eos_token }}{{ bos_token }}{{ messages[0].content }}"}
    config["eos_token"] = {"content": "<|end|>", "__type": "AddedToken"}
    own = texts.read("a", TextFiles(config=json.dumps(config).encode())).text
    bos = base.special_tokens.get("bos_token", "")

    expected = TextPrompt(text=f"<|end|>{bos}hello", add_special_tokens=False)
    assert own.encode(CHAT) == base.encode(expected)


def test_what_ends_an_answer_is_the_bases_end_and_the_adapters_own(texts, base):
    vocabulary = make_tokenizer().get_vocab()
    config = json.dumps({"eos_token": "<base>"}).encode()

    own = texts.read("a", TextFiles(template=OWN_TEMPLATE.encode(), config=config)).text

    ends = {vocabulary["<base>"], vocabulary["<|end|>"]}
    assert own.eos_token_ids == base.eos_token_ids | ends
    assert vocabulary["<base>"] not in base.eos_token_ids


def test_an_eos_token_that_nobody_knows_ends_nothing(texts):
    config = json.dumps({"eos_token": "<nobody>"}).encode()

    assert texts.read("a", TextFiles(config=config)).text is None


def test_added_tokens_are_read_and_spelled_as_transformers_does(texts, base, saved, tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["<plan>", "snow flake"])
    tokenizer.add_tokens(["<think>"], special_tokens=True)
    files = saved(tokenizer)

    text = texts.read("a", files).text

    reference = AutoTokenizer.from_pretrained(tmp_path)
    for prompt in ("<plan>hello", "a snow flake<think>b", "<base><|end|> snow", "<think><plan>"):
        ids = text.encode(TextPrompt(text=prompt, add_special_tokens=False))
        assert list(ids) == reference.encode(prompt, add_special_tokens=False)
        for is_skipped in (True, False):
            detokenizer = text.detokenizer(is_special_token_skipped=is_skipped)
            spelled = detokenizer.feed(ids) + detokenizer.flush()
            assert spelled == reference.decode(ids, skip_special_tokens=is_skipped)
    plan_id = reference.convert_tokens_to_ids("<plan>")
    assert text.token_text(plan_id) == ("<plan>", b"<plan>")
    # The base knows nothing of it.
    assert plan_id not in base.encode(TextPrompt(text="<plan>"))
    assert base.token_text(plan_id) == ("", b"")


def test_equal_tokenizers_are_loaded_once(texts, saved):
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["<plan>"])
    files = saved(tokenizer)
    config = json.dumps({"eos_token": "<|end|>"}).encode()

    first = texts.read("a", files).text
    second = texts.read("b", TextFiles(tokenizer=files.tokenizer, config=config)).text

    assert first._tokenizer is second._tokenizer
    assert first._spellings is second._spellings


def test_a_token_without_a_row_is_reported_and_refused_in_prompts(saved):
    base = Text(make_tokenizer(), vocabulary_size=len(make_tokenizer()))
    texts = AdapterTexts(base)
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["[PAD]"], special_tokens=True)

    own = texts.read("a", saved(tokenizer))

    assert "adds 1 tokens for which the model has no rows" in own.warnings[0]
    assert own.text.encode(TextPrompt(text="hello"))
    with pytest.raises(InvalidRequestError, match="token id"):
        own.text.encode(TextPrompt(text="[PAD]"))
    texts.close()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda d: d["model"]["vocab"].update(he=5000), "another vocabulary"),
        (lambda d: d["model"]["vocab"].pop("he"), "another vocabulary"),
        (lambda d: d["model"].update(merges=[]), "other merges"),
        (lambda d: d["model"].update(vocab=None), "another vocabulary"),
        (lambda d: d.update(model=None), "describes no tokenizer"),
        (lambda d: d.update(added_tokens={}), "lists no added tokens"),
        (lambda d: d["added_tokens"].pop(0), "has not the base model's added token 0"),
        (lambda d: d["added_tokens"][0].update(id=77), "has not the base model's added token 0"),
        (lambda d: d["added_tokens"].append({"id": 999, "content": "x"}), "ids from"),
        (lambda d: d["added_tokens"].append({"id": 0, "content": "x"}), "twice"),
        (lambda d: d["added_tokens"].append({"id": "1", "content": "x"}), "without id"),
        (lambda d: d["added_tokens"].append({"id": True, "content": "x"}), "without id"),
        (lambda d: d["added_tokens"].append({"id": 999, "content": ""}), "empty"),
        (lambda d: d["added_tokens"].append({"id": 999, "content": "a\0b"}), "not printable"),
        (lambda d: d["added_tokens"].append({"id": 999, "content": "x" * 999}), "long"),
        (lambda d: d["added_tokens"].extend([{}] * 5000), "over 4096"),
    ],
)
def test_another_vocabulary_is_refused_by_name(texts, saved, change, reason):
    files = edited(saved(make_tokenizer()), change)

    with pytest.raises(AdapterIncompatibleError, match=reason) as caught:
        texts.read("org/a", files)
    assert caught.value.adapter_id == "org/a"


def test_another_way_to_split_text_is_reported_and_not_used(texts, saved):
    def change(described):
        described["pre_tokenizer"]["add_prefix_space"] = True
        described["normalizer"] = {"type": "Lowercase"}
        described["truncation"] = {"max_length": 3}

    own = texts.read("a", edited(saved(make_tokenizer()), change))

    assert own.text is None
    assert "another normalizer and pre_tokenizer" in own.warnings[0]


def test_merges_in_the_older_form_are_the_same(texts, saved):
    def change(described):
        described["model"]["merges"] = [" ".join(pair) for pair in described["model"]["merges"]]

    assert texts.read("a", edited(saved(make_tokenizer()), change)).warnings == ()


@pytest.mark.parametrize("kind", ["llama", "metaspace"])
def test_unigram_vocabularies_are_compared_too(kind, saved):
    base = Text(make_sentencepiece_like_tokenizer(kind=kind))
    texts = AdapterTexts(base)
    same = saved(make_sentencepiece_like_tokenizer(kind=kind))

    assert texts.read("a", TextFiles(tokenizer=same.tokenizer)).text is None
    other = edited(same, lambda described: described["model"]["vocab"][5].__setitem__(1, -99.0))
    with pytest.raises(AdapterIncompatibleError, match="another vocabulary"):
        texts.read("a", other)
    texts.close()


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        (TextFiles(template=b"{% if %}"), "does not compile"),
        (TextFiles(template=b"\xff"), "no UTF-8"),
        (TextFiles(template=b"x" * (300 << 10)), "more than"),
        (TextFiles(config=b"{"), "no JSON"),
        (TextFiles(config=b"[" * 100_000), "no JSON"),
        (TextFiles(config=b"[]"), "no JSON object"),
        (TextFiles(config=b" " * (9 << 20)), "the limit is"),
        (TextFiles(config=b'{"chat_template": 7}'), "no text"),
        (TextFiles(config=b'{"eos_token": 7}'), "no short text"),
        (TextFiles(config=json.dumps({"eos_token": "x" * 999}).encode()), "no short text"),
        (TextFiles(tokenizer=b"{"), "no JSON"),
        (TextFiles(tokenizer=b"[]"), "describes no tokenizer"),
        (TextFiles(tokenizer=b" " * (9 << 20)), "much larger"),
    ],
)
def test_files_that_make_no_sense_are_refused_by_name(texts, files, reason):
    with pytest.raises(AdapterIncompatibleError, match=reason):
        texts.read("a", files)


def test_a_template_that_fails_for_a_chat_names_the_adapter(texts):
    text = texts.read("org/a", TextFiles(template=b"{{ messages[0].content.nothing.x }}")).text

    with pytest.raises(ChatTemplateError, match="org/a"):
        text.encode(CHAT)


def test_code_that_tokenizer_files_name_is_never_run(texts):
    config = {
        "auto_map": {"AutoTokenizer": ["evil.Evil", None]},
        "tokenizer_class": "Evil",
        "eos_token": "<base>",
    }

    own = texts.read("a", TextFiles(config=json.dumps(config).encode()))

    assert type(own.text) is Text
    assert "evil" not in sys.modules
