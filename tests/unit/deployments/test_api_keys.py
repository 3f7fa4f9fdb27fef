"""Keys: what they allow, and that finding one compares digests in constant time."""

import hashlib

import pytest

from deployments import api_keys
from deployments.api_keys import EVERYTHING, ApiKey, Grants, KeyRing, hash_key
from deployments.spending import Unit

ALICE = ApiKey(name="alice", digest=hash_key("alice-key"))
BOB = ApiKey(name="bob", digest=hash_key("bob-key"), requests_per_minute=5)


@pytest.fixture
def ring():
    return KeyRing([ALICE, BOB])


def test_a_key_is_found_by_its_bearer_header(ring):
    assert ring.find("Bearer alice-key") is ALICE
    assert ring.find("bearer   bob-key ") is BOB


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        "alice-key",
        "Basic alice-key",
        "Bearer alice-ke",
        "Bearer alice-key1",
        "Bearer ALICE-KEY",
        "Bearer alice-key,bob-key",
        f"Bearer {hash_key('alice-key').hex()}",
        "Bearer \xe4\xf6",
    ],
)
def test_anything_else_is_no_key(ring, header):
    assert ring.find(header) is None


def test_no_keys_let_nobody_in():
    assert KeyRing().find("Bearer ") is None
    assert len(KeyRing()) == 0


@pytest.mark.parametrize("header", ["Bearer alice-key", "Bearer wrong", "Basic alice-key", None])
def test_every_look_compares_two_whole_digests_in_constant_time(ring, header, monkeypatch):
    compared = []

    monkeypatch.setattr(api_keys.hmac, "compare_digest", lambda *pair: compared.append(pair))
    ring.find(header)
    assert len(compared) == 1
    assert {len(digest) for digest in compared[0]} == {32}

    # And it is that comparison that decides.
    monkeypatch.setattr(api_keys.hmac, "compare_digest", lambda *pair: False)
    assert ring.find("Bearer alice-key") is None


def test_a_digest_is_plain_sha256_and_shown_by_nobody():
    assert hash_key("k") == hashlib.sha256(b"k").digest()
    assert ALICE.digest.hex() not in repr(ALICE)
    assert str(ALICE.digest) not in repr(ALICE)


def test_patterns_are_whole_names_or_beginnings():
    grants = Grants(models=("base", "llama-*"), adapters=("team/*", "one"))

    assert grants.allows_model("base")
    assert grants.allows_model("llama-3")
    assert not grants.allows_model("base2")
    assert not grants.allows_model("my-llama-3")
    assert grants.allows_adapter("team/x")
    assert grants.allows_adapter("one")
    assert not grants.allows_adapter("team")
    assert not grants.allows_adapter("teams/x")
    assert not grants.allows_adapter("one/more")


def test_by_default_everything_is_allowed_and_an_empty_list_allows_nothing():
    assert EVERYTHING.allows_model("any")
    assert EVERYTHING.allows_adapter("any/thing")
    assert not Grants(adapters=()).allows_adapter("any")


def test_only_what_is_limited_has_a_limit():
    assert ALICE.limits == {}
    assert BOB.limits == {Unit.REQUESTS: 5}
