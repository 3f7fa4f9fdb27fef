"""Tests of chat templates that are not trusted: what they may do, and what ends them."""

import json
import os
import subprocess
import sys
import threading
import time

import pytest

from models.errors import ChatTemplateError, DrainingError, InvalidRequestError
from models.requests import ChatPrompt
from models.text.chat_template import ChatTemplate
from models.text.isolated_template import IsolatedTemplate, TemplateProcess, TemplateProcessError

PLAIN = "{% for m in messages %}{{ m.role }}:{{ m.content }}{{ eos_token }}{% endfor %}"
PROMPT = ChatPrompt(messages=({"role": "user", "content": "héllo \ud83d"},))


@pytest.fixture(scope="module")
def process():
    opened = TemplateProcess(timeout_s=1.0)
    yield opened
    opened.close()


def render(process, source, prompt=PROMPT, **special_tokens):
    return IsolatedTemplate(process, "org/a", source, special_tokens).render(prompt)


@pytest.mark.parametrize(
    "prompt",
    [
        PROMPT,
        ChatPrompt(messages=({"role": "user", "content": None, "tool_calls": []},)),
        ChatPrompt(messages=PROMPT.messages, add_generation_prompt=False),
        ChatPrompt(
            messages=({"role": "assistant", "content": "go on"},),
            add_generation_prompt=False,
            continue_final_message=True,
        ),
        ChatPrompt(messages=PROMPT.messages, template_variables={"eager": True, "n": [1, None]}),
    ],
)
@pytest.mark.parametrize(
    "source", [PLAIN, PLAIN + "{% if add_generation_prompt %}>{% endif %}{{ eager }}{{ n }}"]
)
def test_a_text_is_what_the_template_gives_in_this_process(process, source, prompt):
    expected = ChatTemplate(source, {"eos_token": "<e>"}).render(prompt)

    assert render(process, source, prompt, eos_token="<e>") == expected


def test_messages_at_fault_are_told_as_ever(process):
    with pytest.raises(InvalidRequestError) as caught:
        render(process, PLAIN, ChatPrompt(messages=()))

    assert caught.value.param == "messages"
    with pytest.raises(InvalidRequestError, match="reserved"):
        render(
            process, PLAIN, ChatPrompt(messages=PROMPT.messages, template_variables={"tools": []})
        )


def test_a_template_that_refuses_is_told_with_its_words_and_its_adapter(process):
    with pytest.raises(ChatTemplateError, match=r"no systems \(.*adapter 'org/a'\)"):
        render(process, "{{ raise_exception('no systems') }}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% include '/etc/passwd' %}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ 1 / 0 }}",
        "{{ 'x'|center(10**10) }}",
        "{{ 'a' * 10**12 }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    ],
)
def test_what_a_template_may_not_do_fails_and_the_process_goes_on(process, source):
    with pytest.raises(ChatTemplateError):
        render(process, source)
    before = process._process.pid

    assert render(process, "ok") == "ok"
    assert process._process.pid == before


@pytest.mark.parametrize(
    "source",
    [
        "{% set n = namespace(x='aaaaaaaa') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}"
        "{% endfor %}",
        "{{ lipsum(n=1000000) }}",
        "{{ ('a' * 1000000)|replace('a', 'b' * 1000000)|length }}",
    ],
)
def test_a_template_that_takes_time_or_memory_is_ended_and_the_next_one_is_rendered(
    process, source
):
    started_s = time.monotonic()
    with pytest.raises(ChatTemplateError, match="org/a"):
        render(process, source)

    assert time.monotonic() - started_s < 20
    assert render(process, "ok") == "ok"


@pytest.mark.parametrize(
    "source", ["{% if %}", "{{ " + "[" * 3000 + "]" * 3000 + " }}", "{{ ''|nothing }}"]
)
def test_what_does_not_compile_is_told(process, source):
    assert IsolatedTemplate(process, "a", source, {}).check()
    assert not IsolatedTemplate(process, "a", PLAIN, {}).check()


def test_the_process_has_no_environment_no_files_to_write_and_no_torch(process, tmp_path):
    render(process, "ok")
    pid = process._process.pid

    with open(f"/proc/{pid}/environ", "rb") as environ:  # noqa: PTH123
        assert environ.read().strip(b"\0") == b""
    with open(f"/proc/{pid}/limits") as limits:  # noqa: PTH123
        table = {line[:26].strip(): line[26:].split() for line in limits}
    assert table["Max file size"][:2] == ["0", "0"]
    assert table["Max address space"][0] == str(1 << 30)
    with open(f"/proc/{pid}/maps") as maps:  # noqa: PTH123
        assert "libtorch" not in maps.read()


def test_a_process_that_was_killed_is_started_again(process):
    render(process, "ok")
    process._process.kill()
    process._process.wait()

    with pytest.raises(ChatTemplateError, match="broke off"):
        render(process, "ok")

    assert render(process, "ok") == "ok"


def test_many_threads_get_their_own_answers(process):
    answers = {}

    def ask(number):
        for _ in range(20):
            prompt = ChatPrompt(messages=({"role": "user", "content": str(number)},))
            answers.setdefault(number, set()).add(render(process, PLAIN, prompt))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    assert answers == {number: {f"user:{number}"} for number in range(6)}


def test_closing_ends_the_process_and_nothing_is_rendered_any_more():
    process = TemplateProcess()
    render(process, "ok")
    pid = process._process.pid

    process.close()
    process.close()

    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    with pytest.raises(DrainingError):
        render(process, "ok")


def test_a_process_that_does_not_start_is_told(monkeypatch):
    monkeypatch.setattr("models.text.isolated_template._SCRIPT", "print('no')")
    process = TemplateProcess()

    with pytest.raises(TemplateProcessError):
        process.ask({})
    process.close()


def test_the_process_ends_with_its_parent():
    script = (
        "import os\n"
        "from models.requests import ChatPrompt\n"
        "from models.text.isolated_template import *\n"
        "process = TemplateProcess()\n"
        "IsolatedTemplate(process, 'a', 'ok', {}).check()\n"
        "print(process._process.pid, flush=True)\n"
        "os._exit(0)"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    pid = int(json.loads(result.stdout))

    deadline_s = time.monotonic() + 20
    while _is_running(pid):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def _is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:  # noqa: PTH123
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
