"""Reads what Serve says of the application on this machine's Ray, and starts nothing."""

from __future__ import annotations

import logging


def read_status(application_name: str = "medley") -> tuple[list[str], bool]:
    """Ask the running Ray.

    Args:
        application_name: the Serve application.

    Returns:
        Lines for a person, and whether the application runs.
    """
    import ray
    from ray import serve

    logging.getLogger("ray").setLevel(logging.ERROR)
    try:
        ray.init(
            address="auto",
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except ConnectionError:
        return ["no Ray is running on this machine"], False
    try:
        application = serve.status().applications.get(application_name)
    finally:
        ray.shutdown()
    if application is None:
        return [f"Ray is running, but no application '{application_name}'"], False
    lines = [f"{application_name}: {application.status.value} {application.message}".rstrip()]
    for name, deployment in application.deployments.items():
        replicas = ", ".join(
            f"{count} {state}" for state, count in deployment.replica_states.items()
        )
        lines.append(f"  {name}: {deployment.status.value} ({replicas or 'no replica'})")
    return lines, application.status.value == "RUNNING"
