"""Turns whatever a handle raises into an error of ours. Knows nothing of HTTP."""

from __future__ import annotations

from ray.exceptions import RayActorError, RayTaskError
from ray.serve.exceptions import (
    BackPressureError,
    DeploymentUnavailableError,
    ReplicaUnavailableError,
)

from models.errors import EngineDeadError, QueueFullError

_REPLICA_GONE = (RayActorError, ReplicaUnavailableError, DeploymentUnavailableError)


def unwrap_ray_error(error: Exception) -> Exception:
    """Return the error as its raiser meant it.

    An error of ours arrives bare over gRPC, and as a class derived from RayTaskError and its own
    through Ray's object store; a replica that died or refuses more work shows as errors of Ray.

    Args:
        error: what a call through a handle raised.
    """
    while isinstance(error, RayTaskError) and isinstance(error.cause, Exception):
        error = error.cause
    if isinstance(error, BackPressureError):
        num_queued, max_queued = error.args[:2]
        return QueueFullError(num_queued, max_queued)
    if isinstance(error, _REPLICA_GONE):
        return EngineDeadError("no replica of the model can be reached")
    return error
