"""The warning in the log when requests come in at an address that others reach."""

import logging

import httpx
import pytest

from deployments.open_door import OpenDoorWarning, is_public
from tests.unit.deployments.access_setup import open_gate, record

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    "host", ["", "0.0.0.0", "::", "10.1.2.3", "192.0.2.1", "fe80::1%eth0", "medley.example.org"]
)
def test_others_may_reach_this(host):
    assert is_public(host)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost", "LOCALHOST"])
def test_only_this_machine_reaches_that(host):
    assert not is_public(host)


async def answer(scope, receive, send):
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body", "body": b""})


@pytest.mark.parametrize(("host", "count"), [("10.1.2.3", 1), ("127.0.0.1", 0), ("[::1]", 0)])
async def test_the_first_request_at_a_public_address_is_warned_of_once(host, count, caplog):
    transport = httpx.ASGITransport(OpenDoorWarning(answer))
    async with httpx.AsyncClient(transport=transport, base_url=f"http://{host}:80") as client:
        with caplog.at_level(logging.WARNING, "ray.serve"):
            for _ in range(3):
                assert (await client.get("/")).status_code == 204

    assert caplog.text.count("no API keys are set") == count


async def test_with_keys_there_is_no_warning(monkeypatch, tmp_path, caplog):
    async with open_gate(monkeypatch, tmp_path, record("alice")) as gate:
        with caplog.at_level(logging.WARNING, "ray.serve"):
            await gate.client.get("http://10.1.2.3/health")

    assert "no API keys" not in caplog.text
