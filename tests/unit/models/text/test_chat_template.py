"""Rendering: as transformers does it, refused in the template's own words, and never for long."""

import datetime

import pytest

from models.errors import ChatTemplateError, ConfigError, InvalidRequestError
from models.requests import ChatPrompt
from models.text.chat_template import ChatTemplate, RenderLimits
from tests.unit.models.text.conftest import CHATML, make_byte_level_tokenizer

SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
USER = {"role": "user", "content": "Hi  there \n"}
ANSWER = {"role": "assistant", "content": " Well, \n"}
SYSTEM = {"role": "system", "content": "Be nice."}

# What templates in the wild do, one habit each.
TEMPLATES = {
    "chatml": CHATML,
    "special tokens": (
        "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    ),
    "stripping": "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] | trim }}\n{% endfor %}",
    "blocks on lines of their own": (
        "{%- for m in messages %}\n    {% if m.role == 'user' %}\nU: {{ m.content }}\n"
        "    {% else %}\nA: {{ m.content }}\n    {% endif %}\n{% endfor %}\n"
    ),
    "namespace": (
        "{% set ns = namespace(found='') %}{% for m in messages %}{% if m.role == 'user' %}"
        "{% set ns.found = m.content %}{% endif %}{% endfor %}{{ ns.found }}|"
        "{{ messages[-1]['content'] }}"
    ),
    "loop variables": (
        "{% for m in messages %}{{ loop.index0 }}/{{ loop.length }}/{{ loop.last }}"
        "{{ m.content }}{% if not loop.last %}{{ loop.nextitem.role }}{% endif %}{% endfor %}"
    ),
    "loop controls": (
        "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}"
        "{{ m.content }}{% if loop.index > 5 %}{% break %}{% endif %}{% endfor %}"
    ),
    "json": "{{ messages | tojson }}{{ {'a': 'é<'} | tojson(indent=2) }}{{ messages[-1].content }}",
    "generation": (
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    ),
    "filters": (
        "{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') "
        "| list | join('|') }}{{ (messages | last).content | upper | replace('W', 'V') }}"
        "{{ messages[-1].content }}"
    ),
    "macro": (
        "{% macro say(m) %}{{ m.role ~ ': ' ~ m.content }}{% endmacro %}"
        "{% for m in messages %}{{ say(m) }}{% endfor %}"
    ),
    "defaults": (
        "{{ tools is none }}{{ documents is defined }}{{ enable_thinking | default('?') }}"
        "{{ add_generation_prompt }}{{ unknown }}{{ messages[-1].content }}"
    ),
    "slices": "{% for m in messages[1:] %}{{ m.content.split(',')[0] }}{% endfor %}{{ '-' * 3 }}"
    "{{ messages[-1].content }}",
    "recursive": (
        "{% for item in [[1, [2]], [3]] recursive %}{% if item is iterable %}({{ loop(item) }})"
        "{% else %}{{ item }}{% endif %}{% endfor %}{{ messages[-1].content }}"
    ),
}

# Here transformers leaves its mark in the text.
WRITE_MESSAGES_TWICE = {"json", "filters"}


@pytest.fixture(scope="module")
def tokenizer():
    return make_byte_level_tokenizer()


def render(source, *messages, limits=None, **fields):
    prompt = ChatPrompt(messages=messages, **fields)
    return ChatTemplate(source, SPECIAL_TOKENS, limits=limits).render(prompt)


@pytest.mark.parametrize("name", TEMPLATES)
def test_renders_as_transformers_does(name, tokenizer):
    source = TEMPLATES[name]
    messages = (SYSTEM, USER, ANSWER, USER)

    text = render(source, *messages, template_variables={"enable_thinking": False})

    assert text == tokenizer.apply_chat_template(
        list(messages),
        chat_template=source,
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=False,
    )


@pytest.mark.parametrize("name", sorted(TEMPLATES.keys() - WRITE_MESSAGES_TWICE))
def test_continues_the_final_message_as_transformers_does(name, tokenizer):
    source = TEMPLATES[name]
    messages = (SYSTEM, USER, ANSWER)

    text = render(source, *messages, add_generation_prompt=False, continue_final_message=True)

    assert text == tokenizer.apply_chat_template(
        list(messages), chat_template=source, tokenize=False, continue_final_message=True
    )


def test_an_answer_to_be_continued_stays_open():
    text = render(CHATML, USER, ANSWER, add_generation_prompt=False, continue_final_message=True)

    assert text.endswith("<|user|>assistant\n Well, \n")


def test_an_empty_answer_can_be_continued():
    empty = {"role": "assistant", "content": ""}

    text = render(CHATML, USER, empty, add_generation_prompt=False, continue_final_message=True)

    assert text.endswith("<|user|>assistant\n")


def test_a_message_that_is_written_twice_can_be_continued():
    source = "{{ messages | tojson }}{{ messages[0].content }}."

    text = render(source, USER, add_generation_prompt=False, continue_final_message=True)

    assert text == '[{"role": "user", "content": "Hi  there \\n"}]Hi  there \n'


def test_a_template_that_leaves_out_the_message_to_be_continued_is_refused():
    with pytest.raises(ChatTemplateError, match="leaves out the final message"):
        render(
            "{{ messages[0].content }}",
            USER,
            ANSWER,
            add_generation_prompt=False,
            continue_final_message=True,
        )


def test_a_final_message_without_text_cannot_be_continued():
    with pytest.raises(InvalidRequestError) as caught:
        render(
            CHATML,
            USER,
            {"role": "assistant", "content": None},
            add_generation_prompt=False,
            continue_final_message=True,
        )

    assert caught.value.param == "continue_final_message"


def test_continuing_and_opening_a_turn_exclude_each_other():
    with pytest.raises(InvalidRequestError) as caught:
        render(CHATML, USER, continue_final_message=True)

    assert caught.value.param == "continue_final_message"


def test_no_messages_are_an_error_that_names_them():
    with pytest.raises(InvalidRequestError) as caught:
        render(CHATML)

    assert caught.value.param == "messages"


def test_the_templates_own_words_reach_the_caller():
    source = "{{ raise_exception('roles must alternate') }}"

    with pytest.raises(ChatTemplateError) as caught:
        render(source, USER)

    assert caught.value.reason == "roles must alternate"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ missing.field }}", "'missing' is undefined"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ messages[0].tool_calls[0].name }}", "has no attribute 'tool_calls'"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages | int + messages }}", "TypeError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    ],
)
def test_whatever_a_template_raises_is_typed_and_says_why(source, words):
    with pytest.raises(ChatTemplateError, match=words):
        render(source, USER)


def test_a_very_long_reason_is_cut():
    with pytest.raises(ChatTemplateError) as caught:
        render("{{ raise_exception(messages[0].content) }}", {"content": "x" * 10**6})

    assert len(caught.value.reason) == 1000


def test_a_template_with_an_error_in_it_is_a_configuration_error_with_its_line():
    with pytest.raises(ConfigError, match="line 2") as caught:
        ChatTemplate("fine\n{% for %}", SPECIAL_TOKENS)

    assert caught.value.field == "chat_template"


def test_a_template_with_an_unknown_filter_is_a_configuration_error():
    with pytest.raises(ConfigError, match="nothing"):
        ChatTemplate("{{ messages | nothing }}", SPECIAL_TOKENS)


def test_fields_that_are_none_are_as_if_absent():
    source = "{% if messages[0].tool_calls is defined %}calls{% else %}none{% endif %}"

    assert render(source, {"role": "assistant", "content": "", "tool_calls": None}) == "none"


def test_developer_becomes_system_where_the_template_does_not_know_it():
    developer = {"role": "developer", "content": "x"}
    knowing = "{{ messages[0].role }}{# developer #}"

    assert render("{{ messages[0].role }}", developer) == "system"
    assert render(knowing, developer) == "developer"


def test_the_callers_messages_are_left_alone():
    message = {"role": "developer", "content": "x", "name": None}

    render(CHATML, message, add_generation_prompt=False, continue_final_message=True)

    assert message == {"role": "developer", "content": "x", "name": None}


def test_template_variables_reach_the_template():
    text = render(
        "{{ enable_thinking }}{{ n + 1 }}",
        USER,
        template_variables={"enable_thinking": True, "n": 1},
    )

    assert text == "True2"


@pytest.mark.parametrize(
    "name",
    [
        "chat_template",
        "tokenize",
        "add_generation_prompt",
        "continue_final_message",
        "tools",
        "messages",
        "documents",
        "return_dict",
        "return_tensors",
        "bos_token",
    ],
)
def test_reserved_template_variables_are_refused_by_name(name):
    with pytest.raises(InvalidRequestError, match=f"'{name}'") as caught:
        render(CHATML, USER, template_variables={name: "x"})

    assert caught.value.param == "chat_template_kwargs"


def test_the_date_comes_from_the_clock():
    template = ChatTemplate(
        "{{ strftime_now('%Y-%m-%d') }}",
        SPECIAL_TOKENS,
        clock=lambda: datetime.datetime(2031, 5, 17, tzinfo=datetime.UTC),
    )

    assert template.render(ChatPrompt(messages=(USER,))) == "2031-05-17"


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in v %}{% for b in v %}{% endfor %}{% endfor %}",
        "{% for a in v if a < 0 %}{% endfor %}" * 20,
        "{% for a in v %}{% set x = v | select('odd') | list %}{% endfor %}",
        "{% for a in v %}{% set x = v | sort | first %}{% endfor %}",
        "{% for a in v recursive %}{{ loop(v) }}{% endfor %}",
        "{% for a in range(v[-1]) %}{% for b in range(v[-1]) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(40) }}",
        "{% for a in v %}{% set x = text.count('ab') %}{% endfor %}",
        "{% for a in v %}{% set x = text | upper %}{% endfor %}",
    ],
)
def test_a_template_that_loops_over_much_is_stopped(source):
    limits = RenderLimits(max_steps=10_000)
    variables = {"v": list(range(1000)), "text": "a" * 20_000}

    with pytest.raises(ChatTemplateError, match=r"more than 10000 steps|RecursionError"):
        render(source, USER, limits=limits, template_variables=variables)


def test_work_within_the_limit_is_done():
    text = render(
        "{% for a in v %}{% for b in v %}.{% endfor %}{% endfor %}",
        USER,
        limits=RenderLimits(max_steps=10_200),
        template_variables={"v": list(range(100))},
    )

    assert len(text) == 10_000


def test_each_rendering_has_its_own_budget():
    template = ChatTemplate(
        "{% for a in v %}.{% endfor %}", SPECIAL_TOKENS, limits=RenderLimits(max_steps=100)
    )
    prompt = ChatPrompt(messages=(USER,), template_variables={"v": list(range(90))})

    assert [template.render(prompt) for _ in range(3)] == ["." * 90] * 3


def test_too_much_text_is_refused():
    limits = RenderLimits(max_characters=1000)

    with pytest.raises(ChatTemplateError, match="more than 1000 characters"):
        render("{% for m in messages %}{{ m.content }}{% endfor %}", *[USER] * 200, limits=limits)


@pytest.mark.parametrize("source", ["{{ 'ab' * n }}", "{{ n * ['a'] }}", "{{ 10 ** n }}"])
def test_repetition_that_fills_the_memory_is_refused(source):
    with pytest.raises(ChatTemplateError, match="too large"):
        render(source, USER, template_variables={"n": 10**12})


def test_a_huge_range_is_refused():
    with pytest.raises(ChatTemplateError, match="Range too big"):
        render("{% for a in range(n) %}{% endfor %}", USER, template_variables={"n": 10**9})


def test_deeply_nested_data_is_refused_and_not_a_crash():
    nested = []
    for _ in range(100_000):
        nested = [nested]

    with pytest.raises(ChatTemplateError, match="RecursionError"):
        render("{{ v | tojson }}", USER, template_variables={"v": nested})
