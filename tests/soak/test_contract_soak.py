"""Two thousand requests that schemathesis makes of /openapi.json; a test does a few hundred."""

import pytest

from tests.integration.conftest import service  # noqa: F401 - a fixture
from tests.integration.test_schemathesis import (  # noqa: F401 - a fixture among them
    check_operations,
    operations,
)

pytestmark = pytest.mark.soak

NUM_CASES = 2000
MAX_EXAMPLES = 400


def test_two_thousand_answers_are_as_described(operations):  # noqa: F811 - the fixture
    statuses = check_operations(operations, MAX_EXAMPLES)

    assert sum(statuses.values()) >= NUM_CASES
    assert not any(status >= 500 for status in statuses)
