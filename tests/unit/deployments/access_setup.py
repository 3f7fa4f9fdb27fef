"""An ingress with keys and a ledger in this process."""

import contextlib
import json
import time

import httpx
import yaml

from deployments import ingress as ingress_module
from deployments.access import AccessConfig
from deployments.admin_key import AdminKey
from deployments.api_keys import hash_key
from deployments.budgets import BudgetLedger
from deployments.ingress import Ingress
from tests.unit.deployments.fakes import LIMITS, MODEL_ID, FakeHandle

ADMIN_KEY = "the-admin-key"
DEFAULT_MAX_TOKENS = 100


class LocalBudgets:
    """The ledger, without an actor around it."""

    def __init__(self):
        self.ledger = BudgetLedger(time.monotonic())
        self.num_connected = 0

    def connect(self, is_successor):
        self.num_connected += 1
        return self

    async def answer(self, ask):
        return self.ledger.answer(ask, time.monotonic())

    def used(self, name, unit):
        return self.ledger.used(name, unit, time.monotonic())


def record(name, **fields):
    """The record of the key "<name>-key"."""
    return {"name": name, "sha256": hash_key(f"{name}-key").hex(), **fields}


def bearer(name):
    return {"authorization": f"Bearer {name}-key"}


class Gate:
    """The ingress, its client, its models and its budgets."""

    def __init__(self, ingress, client, handles, budgets, path):
        self.ingress = ingress
        self.client = client
        self.handles = handles
        self.budgets = budgets
        self.path = path

    async def post(self, path, body, name="alice", **headers):
        return await self.client.post(path, json=body, headers={**bearer(name), **headers})

    async def get(self, path, name="alice"):
        return await self.client.get(path, headers=bearer(name))

    @property
    def calls(self):
        return [call for handle in self.handles.values() for call in handle.calls]


@contextlib.asynccontextmanager
async def open_gate(monkeypatch, tmp_path, *records, handles=None, cors_origins=(), limits=LIMITS):
    """An ingress that knows these keys; without any it lets everybody in."""
    budgets = LocalBudgets()
    monkeypatch.setattr(ingress_module, "_connect_budgets", budgets.connect)
    path = tmp_path / "keys.yaml"
    path.write_text(yaml.safe_dump(list(records)))
    handles = handles or {MODEL_ID: FakeHandle()}
    ingress = Ingress(
        limits,
        handles,
        admin_key=AdminKey.of(ADMIN_KEY),
        access=AccessConfig(
            keys_path=path if records else None,
            default_max_tokens=dict.fromkeys(handles, DEFAULT_MAX_TOKENS),
            cors_origins=cors_origins,
        ),
    )
    transport = httpx.ASGITransport(ingress.__serve_build_asgi_app__())
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        yield Gate(ingress, client, handles, budgets, path)
    await ingress.begin_shutdown(0.0)


def read_error(response):
    return json.loads(response.text)["error"]
