"""Requests that schemathesis makes of /openapi.json, against the running service.

Not all of its checks are wanted: what fields allow together no schema tells, so that a request in
which each field is allowed may be a 400.
"""

import collections
import random
import zlib

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.integration.tiny_service_model import TINY_ID

schemathesis = pytest.importorskip("schemathesis")
checks = pytest.importorskip("schemathesis.specs.openapi.checks")

pytestmark = pytest.mark.integration

# Of each operation with a body: a few hundred requests together.
MAX_EXAMPLES = 40
MAX_TOKENS = 4
# Beside the required ones; more of them contradict each other.
MAX_OPTIONAL_FIELDS = 3
LIMIT_S = 60
REQUIRED = {"model", "messages", "prompt", "tokens"}


@pytest.fixture(scope="module")
def operations(service):
    """The operations without the administrator's, which other tests of this service rely on."""
    document = httpx.get(f"{service.url}/openapi.json").json()
    document["paths"] = {
        path: methods
        for path, methods in document["paths"].items()
        if not any("Administration" in described["tags"] for described in methods.values())
    }
    schema = schemathesis.openapi.from_dict(document)
    schema.config.update(base_url=service.url)
    found = [result.ok() for result in schema.get_all_operations()]
    assert {operation.path for operation in found} >= document["paths"].keys() - {"/openapi.json"}
    return found


def test_every_answer_is_as_described(operations):
    statuses = check_operations(operations, MAX_EXAMPLES)

    # Neither is everything refused.
    assert statuses[200] > sum(statuses.values()) / 5
    assert statuses[400] > 0


def check_operations(operations, max_examples):
    """Check every operation; return how often each status came."""
    statuses = collections.Counter()
    for operation in operations:
        check_operation(operation, max_examples, statuses)
    return statuses


def check_operation(operation, max_examples, statuses):
    @settings(
        max_examples=max_examples,
        deadline=None,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy())
    def check(case):
        if isinstance(case.body, dict):
            case.body = keep_small(case.body)
        response = case.call_and_validate(
            checks=[
                schemathesis.checks.not_a_server_error,
                checks.status_code_conformance,
                checks.content_type_conformance,
                checks.response_headers_conformance,
                checks.response_schema_conformance,
            ],
            timeout=LIMIT_S,
        )
        statuses[int(response.status_code)] += 1

    check()


def mend(message):
    """A message of fields that go together, if it is one."""
    if not isinstance(message, dict) or message.get("role") == "assistant":
        return message
    kept = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**kept, "content": "Hi"} if kept.get("content") is None else kept


def keep_small(body):
    """Few of the fields, a model that there is, and few tokens to generate."""
    optional = sorted(body.keys() - REQUIRED)
    chosen = random.Random(zlib.crc32(repr(body).encode(errors="replace")))
    kept = {*REQUIRED, *chosen.sample(optional, min(len(optional), MAX_OPTIONAL_FIELDS))}
    small = {name: value for name, value in body.items() if name in kept}
    if "model" in small:
        small["model"] = TINY_ID
    if isinstance(small.get("messages"), list):
        small["messages"] = [mend(message) for message in small["messages"]]
    if "messages" in small or "prompt" in small:
        small["max_tokens"] = MAX_TOKENS
        small.pop("max_completion_tokens", None)
    return small
