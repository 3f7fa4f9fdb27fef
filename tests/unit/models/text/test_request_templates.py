"""A chat template that a request brings: rendered apart, limited, and never kept."""

import pytest
from transformers import PreTrainedTokenizerFast

from models.errors import ChatTemplateError, InvalidRequestError
from models.requests import ChatPrompt
from models.text.tokenizer import Text
from tests.unit.models.text.test_infill import text_of

MESSAGES = ({"role": "user", "content": "b"},)
OWN = "a {% for m in messages %}{{ m.content }} {% endfor %}{{ bos_token }}"


@pytest.fixture(scope="module")
def text():
    text, _ = text_of([])
    yield text
    text.template_process.close()


def test_a_request_may_bring_a_template_of_its_own(text):
    token_ids = text.encode(ChatPrompt(messages=MESSAGES, template=OWN))

    assert isinstance(text, Text)
    _, words = text_of([])
    assert token_ids == (words["a"], words["b"], words["[BOS]"])
    with pytest.raises(ChatTemplateError, match="no chat template"):
        text.encode(ChatPrompt(messages=MESSAGES))


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 'a' * 999999999 }}",
        "{% if %}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ raise_exception('no') }}",
    ],
)
def test_what_a_template_must_not_do_is_the_callers_error(text, template):
    with pytest.raises(ChatTemplateError, match="the request's own"):
        text.encode(ChatPrompt(messages=MESSAGES, template=template))
    assert text.encode(ChatPrompt(messages=MESSAGES, template=OWN))


def test_reserved_variables_stay_reserved(text):
    variables = {"messages": []}

    with pytest.raises(InvalidRequestError, match="reserved"):
        text.encode(ChatPrompt(messages=MESSAGES, template=OWN, template_variables=variables))


def test_without_such_a_request_no_process_is_started():
    text = Text(PreTrainedTokenizerFast(tokenizer_object=text_of([])[0]._tokenizer._tokenizer))

    assert text.template_process._process is None
