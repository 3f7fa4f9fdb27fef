"""``medley hash-key``: makes the record of an API key. Writes no file."""

from __future__ import annotations

import json
import re
import secrets
from typing import TextIO

from cluster.console import Console
from deployments.api_keys import hash_key
from deployments.key_file import KEY_NAME
from models.errors import ConfigError

_PREFIX = "mk-"
_NUM_RANDOM_BYTES = 32
# What a header can carry, and long enough that nobody guesses it from its hash.
_KEY = re.compile(r"[!-~]{16,512}")


def run_hash_key(name: str, key_input: TextIO | None, console: Console) -> None:
    """Print a record for the keys file; the key itself goes where progress goes, if it is new.

    Args:
        name: whose key it is.
        key_input: has the key as its first line; None draws a key.
        console: to print to.

    Raises:
        ConfigError: the name or the key cannot be used. Does not tell the key.
    """
    if not KEY_NAME.fullmatch(name):
        raise ConfigError("name", "must be 1 to 128 printable ASCII characters without spaces")
    if key_input is None:
        key = _PREFIX + secrets.token_urlsafe(_NUM_RANDOM_BYTES)
        console.warn(f"the key of {name}, which is shown only now: {key}")
    else:
        key = key_input.readline().strip()
        if not _KEY.fullmatch(key):
            raise ConfigError(
                "key", "must be 16 to 512 printable ASCII characters without spaces, on one line"
            )
    # JSON strings are YAML strings too: no name is read as a number.
    console.announce(f"- name: {json.dumps(name)}\n  sha256: {json.dumps(hash_key(key).hex())}")
