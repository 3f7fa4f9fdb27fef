"""Every error of ours has its row in the one table."""

import pytest

from deployments.http_errors import ERROR_TABLE, HttpError, describe_error
from models.errors import ModelServiceError
from sampling.errors import SamplingError
from tests.contract.error_classes import leaves, make_error

LEAVES = [leaf for root in (ModelServiceError, SamplingError, HttpError) for leaf in leaves(root)]

# Official clients repeat a request by themselves after these, and after every 5xx.
REPEATED_STATUSES = (408, 409, 429)


@pytest.mark.parametrize("leaf", LEAVES, ids=lambda leaf: leaf.__name__)
def test_every_leaf_has_a_row(leaf):
    assert leaf in ERROR_TABLE


def test_every_row_is_a_leaf():
    assert set(ERROR_TABLE) == set(LEAVES)


@pytest.mark.parametrize("leaf", LEAVES, ids=lambda leaf: leaf.__name__)
def test_every_row_gives_a_whole_answer(leaf):
    problem = describe_error(make_error(leaf))

    assert problem.status == ERROR_TABLE[leaf].status
    assert 400 <= problem.status < 600
    assert problem.error["code"] == ERROR_TABLE[leaf].code
    assert problem.error["message"]
    assert problem.to_body("id")
    assert problem.to_event()


@pytest.mark.parametrize("leaf", LEAVES, ids=lambda leaf: leaf.__name__)
def test_a_status_that_clients_repeat_says_when_or_that_it_is_no_use(leaf):
    problem = describe_error(make_error(leaf))

    if problem.status in REPEATED_STATUSES or problem.status > 500:
        assert {"retry-after", "x-should-retry"} & dict(problem.headers).keys()
