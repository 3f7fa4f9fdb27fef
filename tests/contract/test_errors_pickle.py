"""Errors cross processes: they arrive with the same class, fields and words."""

import pickle

import pytest
from ray import cloudpickle
from ray.exceptions import RayTaskError

from deployments.ray_errors import unwrap_ray_error
from models.errors import ModelServiceError
from sampling.errors import SamplingError
from tests.contract.error_classes import leaves, make_error

CLASSES = [leaf for root in (ModelServiceError, SamplingError) for leaf in leaves(root)]


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("module", [pickle, cloudpickle], ids=lambda module: module.__name__)
def test_an_error_survives_pickling(kind, module):
    error = make_error(kind)

    arrived = module.loads(module.dumps(error))

    assert type(arrived) is kind
    assert vars(arrived) == vars(error)
    assert all(type(value) in (str, int, float) for value in vars(error).values())
    assert str(arrived) == str(error)
    assert str(error)


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_an_error_that_ray_wraps_is_caught_and_unwrapped_as_itself(kind):
    error = make_error(kind)
    wrapped = RayTaskError("f", "Traceback: ...", error)

    arrived = pickle.loads(pickle.dumps(wrapped)).as_instanceof_cause()

    assert isinstance(arrived, kind)
    assert type(unwrap_ray_error(arrived)) is kind
    assert str(unwrap_ray_error(arrived)) == str(error)
