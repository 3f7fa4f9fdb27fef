"""What the path of a configuration's adapters is: a local folder, or a URL. Looks nothing up."""

from __future__ import annotations

import re
from pathlib import Path

# "s3://bucket/adapters", "simplecache::gs://bucket": what fsspec reads as a URL.
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(?:://|::)")
_LOCAL_PREFIXES = ("file://", "local://")


def local_folder(path: str) -> Path | None:
    """Return the folder of this machine that a path names; None if it is a URL.

    Files of this machine are read where they lie, however they are written.
    """
    for prefix in _LOCAL_PREFIXES:
        if path.startswith(prefix):
            return Path(path.removeprefix(prefix)).expanduser()
    return None if _URL.match(path) else Path(path).expanduser()
