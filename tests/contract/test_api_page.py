"""docs/api.md is whole and true: every field has a row, and every row a test that exists."""

import ast
import dataclasses
import functools
import inspect
import re
from pathlib import Path

import gradient.resources.agents.chat.completions
import gradient.resources.chat.completions
import octoai.text_gen.client
import openai.resources.chat.completions
import openai.resources.completions
import pytest
from typing_extensions import is_typeddict

from deployments import agent_fields, answer_schemas, messages, wire
from deployments.agent_fields import AgentFields, KnowledgeBaseFilter
from deployments.http_errors import ERROR_TABLE
from deployments.messages import CalledFunction, ChatMessage, ToolCall
from deployments.openapi_operations import ADMIN_OPERATIONS, OPERATIONS
from deployments.unsupported import _NEUTRAL_VALUES
from deployments.wire import (
    ChatRequest,
    CompletionRequest,
    GenerationFields,
    StreamOptions,
    parse_chat_request,
    parse_completion_request,
)
from deployments.wire_model import WireModel

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "api.md"

BOTH = "Fields of both operations"
CHATS = "Fields of chats"
COMPLETIONS = "Fields of completions"
AGENTS = "Fields of agents"
WITHOUT_EFFECT = "Fields without effect"
REFUSED = "Refused fields"
OF_REQUESTS = (BOTH, CHATS, COMPLETIONS, AGENTS, WITHOUT_EFFECT, REFUSED)


def names_in(text):
    return frozenset(text.split())


# From the three APIs' own documents, not from this code.
OCTOAI_CHAT = names_in("""
    messages model peft max_tokens temperature top_p min_p repetition_penalty frequency_penalty
    presence_penalty logit_bias logprobs top_logprobs loglikelihood log_prompt ignore_eos n stop
    stream stream_options response_format tools tool_choice user
""")
OCTOAI_COMPLETIONS = names_in("""
    prompt best_of echo logprobs seed suffix model peft max_tokens temperature top_p min_p
    repetition_penalty frequency_penalty presence_penalty logit_bias loglikelihood log_prompt
    ignore_eos n stop stream stream_options user
""")
OCTOAI_EARLIER = names_in("octoai functions function_call")
DIGITALOCEAN_CHAT = names_in("""
    messages model max_tokens max_completion_tokens temperature top_p frequency_penalty
    presence_penalty logit_bias logprobs top_logprobs n stop stream stream_options metadata user
    tools tool_choice seed reasoning_effort agent
""")
DIGITALOCEAN_AGENT = names_in("""
    messages temperature top_p max_tokens max_completion_tokens stream stop stream_options
    frequency_penalty presence_penalty k retrieval_method kb_filters
    filter_kb_content_by_query_metadata instruction_override include_retrieval_info
    include_functions_info include_guardrails_info provide_citations
""")
OPENAI_CHAT = names_in("""
    messages model max_completion_tokens max_tokens n stop seed logprobs top_logprobs logit_bias
    temperature top_p frequency_penalty presence_penalty stream stream_options service_tier store
    metadata tools tool_choice parallel_tool_calls reasoning_effort verbosity modalities audio
    prediction web_search_options safety_identifier prompt_cache_key prompt_cache_options
    prompt_cache_retention moderation functions function_call user response_format
""")
OPENAI_COMPLETIONS = names_in("""
    model prompt best_of echo frequency_penalty logit_bias logprobs max_tokens n presence_penalty
    seed stop stream stream_options suffix temperature top_p user
""")
# vLLM, SGLang, TGI, LoRAX, llama.cpp.
OTHER_SERVERS = names_in("""
    top_k min_p repetition_penalty ignore_eos ignore_eos_token min_tokens stop_token_ids
    include_stop_str_in_output no_stop_trim skip_special_tokens spaces_between_special_tokens
    bad_words allowed_token_ids logprob_token_ids use_beam_search length_penalty prompt_logprobs
    echo add_special_tokens add_generation_prompt continue_final_message chat_template
    chat_template_kwargs documents truncate_prompt_tokens truncation_side structured_outputs
    guided_json guided_regex guided_choice guided_grammar regex ebnf json_schema stop_regex grammar
    guideline tool_prompt response_format return_token_ids return_tokens_as_token_ids priority
    request_id rid cache_salt session_id extra_key kv_transfer_params vllm_xargs
    thinking_token_budget include_reasoning reasoning_effort separate_reasoning stream_reasoning
    stream_interval repetition_detection input_ids lora_path adapter_id adapter_source
    merged_adapters api_token typical_p watermark truncate do_sample details best_of
    return_full_text lora id_slot cache_prompt n_probs n_predict repeat_penalty repeat_last_n
    mirostat mirostat_tau mirostat_eta dry_multiplier dry_base dry_allowed_length
    dry_penalty_last_n dry_sequence_breakers xtc_probability xtc_threshold samplers
    t_max_predict_ms timings_per_token return_progress response_fields reasoning_format
""")
MESSAGE_FIELDS = names_in("""
    role content name tool_call_id reasoning_content reasoning refusal tool_calls function_call
    audio
""")
# How a client sends, not what.
OF_CLIENTS_THEMSELVES = names_in(
    "self extra_headers extra_query extra_body timeout request_options"
)
CONTENT_PARTS = names_in("text image_url input_audio file refusal")


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """A row of a table of the page."""

    what: str
    tests: tuple[str, ...]


@functools.cache
def read_page():
    """Section -> the name in a row's first cell -> the row."""
    sections = {}
    rows = {}
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            rows = sections.setdefault(line.removeprefix("## "), {})
        elif line.startswith("| ") and not line.startswith("| ---"):
            name, what, tests = line.strip("| ").split(" | ")
            if tests == "Test":
                continue
            name = name.strip("`")
            assert name not in rows, f"{name} has two rows"
            rows[name] = Row(what=what, tests=tuple(re.findall(r"`([^`]+)`", tests)))
    return sections


def rows_of(*names):
    return {field: row for name in names for field, row in read_page()[name].items()}


@functools.cache
def list_tests(path):
    """The names of a file's tests, those of a class behind its own."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    functions = ast.FunctionDef | ast.AsyncFunctionDef
    names = {node.name for node in tree.body if isinstance(node, functions)}
    for holder in tree.body:
        if isinstance(holder, ast.ClassDef):
            names |= {
                f"{holder.name}::{node.name}" for node in holder.body if isinstance(node, functions)
            }
    return names


@pytest.mark.parametrize("section", read_page())
def test_every_row_names_tests_that_exist(section):
    for name, row in rows_of(section).items():
        assert row.tests, f"{name} has no test"
        for test in row.tests:
            path, _, function = test.partition("::")
            assert path.startswith("tests/"), test
            assert function.rpartition("::")[2].startswith("test_"), test
            assert function in list_tests(path), f"{name}: {test} does not exist"


@pytest.mark.parametrize("section", [*OF_REQUESTS, "Messages", "Content parts"])
def test_every_field_of_a_request_is_honoured_or_without_effect_or_refused(section):
    for name, row in rows_of(section).items():
        assert re.match(r"(Honoured|No effect|Refused)\b", row.what), name


@pytest.mark.parametrize(
    "names",
    [
        OCTOAI_CHAT,
        OCTOAI_COMPLETIONS,
        OCTOAI_EARLIER,
        DIGITALOCEAN_CHAT,
        DIGITALOCEAN_AGENT,
        OPENAI_CHAT,
        OPENAI_COMPLETIONS,
        OTHER_SERVERS,
    ],
)
def test_every_field_of_an_api_has_a_row(names):
    assert names <= rows_of(*OF_REQUESTS).keys()


@pytest.mark.parametrize(
    "method",
    [
        openai.resources.chat.completions.Completions.create,
        openai.resources.completions.Completions.create,
        gradient.resources.chat.completions.CompletionsResource.create,
        gradient.resources.agents.chat.completions.CompletionsResource.create,
        octoai.text_gen.client.TextGenClient.create_chat_completion,
        octoai.text_gen.client.TextGenClient.create_completion,
    ],
)
def test_every_parameter_of_the_installed_clients_has_a_row(method):
    parameters = inspect.signature(method).parameters.keys() - OF_CLIENTS_THEMSELVES

    assert len(parameters) > 15
    assert parameters <= rows_of(*OF_REQUESTS).keys()


@pytest.mark.parametrize(
    ("kind", "sections"),
    [
        (GenerationFields, [BOTH]),
        (ChatRequest, [BOTH, CHATS, AGENTS]),
        (CompletionRequest, [BOTH, COMPLETIONS]),
        (AgentFields, [AGENTS]),
        (ChatMessage, ["Messages"]),
    ],
)
def test_every_field_of_a_request_model_has_a_row(kind, sections):
    assert kind.model_fields.keys() <= rows_of(*sections).keys()


@pytest.mark.parametrize(
    ("kind", "section", "prefix"),
    [
        (StreamOptions, BOTH, "stream_options."),
        (KnowledgeBaseFilter, AGENTS, "kb_filters."),
        (ToolCall, "Messages", "tool_calls[]."),
        (CalledFunction, "Messages", "tool_calls[].function."),
    ],
)
def test_every_field_of_an_object_in_a_request_has_a_row(kind, section, prefix):
    assert {prefix + name for name in kind.model_fields} <= rows_of(section).keys()


def test_no_request_model_was_forgotten_here():
    kinds = {
        kind
        for module in (wire, agent_fields, messages)
        for _, kind in inspect.getmembers(module, inspect.isclass)
        if issubclass(kind, WireModel) and kind is not WireModel
    }

    whole = {GenerationFields, ChatRequest, CompletionRequest, AgentFields, ChatMessage}
    assert kinds == whole | {StreamOptions, KnowledgeBaseFilter, ToolCall, CalledFunction}


def test_the_refused_fields_are_those_of_the_table():
    assert rows_of(REFUSED).keys() == _NEUTRAL_VALUES.keys()


@pytest.mark.parametrize(
    ("parse", "body"),
    [
        (parse_chat_request, {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}),
        (parse_completion_request, {"model": "m", "prompt": "Hi"}),
    ],
)
def test_the_fields_without_effect_have_none(parse, body):
    for name in rows_of(WITHOUT_EFFECT):
        assert parse({**body, name: "x"}).ignored_fields == (name,)


def test_every_field_of_a_message_and_every_kind_of_part_has_a_row():
    assert rows_of("Messages").keys() >= MESSAGE_FIELDS
    assert rows_of("Content parts").keys() >= CONTENT_PARTS


def test_every_key_of_an_answer_has_a_row():
    told = {re.split(r"[.\]]+", name)[-1] for name in rows_of("Answers")}
    kinds = [
        kind
        for kind in vars(answer_schemas).values()
        if is_typeddict(kind) and kind.__module__ == answer_schemas.__name__
    ]

    assert len(kinds) > 20
    for kind in kinds:
        assert kind.__annotations__.keys() <= told, kind


def test_every_code_of_the_error_table_has_a_row_with_its_status():
    rows = rows_of("Error codes")

    assert rows.keys() == {row.code for row in ERROR_TABLE.values()}
    for row in ERROR_TABLE.values():
        assert rows[row.code].what.startswith(str(row.status.value)), row.code


def test_every_route_has_a_row():
    routes = {f"{o.method.upper()} {o.path}" for o in (*OPERATIONS, *ADMIN_OPERATIONS)}

    assert routes <= rows_of("Routes").keys()
