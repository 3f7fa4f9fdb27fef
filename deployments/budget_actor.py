"""The one process that counts the budgets of keys for all ingress replicas: a small named actor.

A thin shell: what it does is ``BudgetLedger``'s.
"""

from __future__ import annotations

import time
from typing import Any, Protocol

import ray
from ray.exceptions import ActorDiedError

from deployments.budget_records import AskRecord, ReplyRecord
from deployments.budgets import GRACE_S, BudgetLedger

_NAMESPACE = "medley"


class BudgetActor:
    """A ledger behind calls. Owner: its event loop."""

    def __init__(self, *, is_successor: bool) -> None:
        """Begin with an empty ledger.

        Args:
            is_successor: there was an actor before this one, so that others will tell first what
                they have spent.
        """
        is_successor = is_successor or ray.get_runtime_context().was_current_actor_reconstructed
        self._ledger = BudgetLedger(time.monotonic(), GRACE_S if is_successor else 0.0)

    async def answer(self, ask: AskRecord) -> ReplyRecord:
        """See ``BudgetLedger.answer``."""
        return self._ledger.answer(ask, time.monotonic())


class LedgerGoneError(Exception):
    """The ledger will not come back; another one has to be made."""


class Budgets(Protocol):
    """Where an ingress asks."""

    async def answer(self, ask: AskRecord) -> ReplyRecord:
        """Return what the ledger says.

        Raises:
            LedgerGoneError: it never will.
            Exception: whatever keeps it from doing so now.
        """
        ...


class RemoteBudgets:
    """The actor as an ingress replica reaches it.

    Lifetime: an actor ends with the handle of the replica that made it, so nobody lets go of one
    that may still come back.

    Owner: the replica's event loop.
    """

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    async def answer(self, ask: AskRecord) -> ReplyRecord:
        """Ask the actor; raises as ``Budgets.answer`` does."""
        try:
            reply: ReplyRecord = await self._actor.answer.remote(ask)
        except ActorDiedError as error:
            raise LedgerGoneError from error
        return reply


def connect_budgets(application: str, *, is_successor: bool) -> Budgets:
    """Return the application's actor, made if there is none. Blocks for some milliseconds.

    Ray restarts it when its process dies. It ends with the replica that made it; another one then
    makes it anew, and nothing is left when the application has gone.

    Args:
        application: name of the Serve application.
        is_successor: if it has to be made, see ``BudgetActor``.
    """
    actor = (
        ray.remote(BudgetActor)
        .options(
            name=f"budgets:{application}",
            namespace=_NAMESPACE,
            get_if_exists=True,
            num_cpus=0,
            max_restarts=-1,
            max_task_retries=0,
        )
        .remote(is_successor=is_successor)
    )
    return RemoteBudgets(actor)
