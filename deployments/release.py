"""Which release of Medley this is."""

from __future__ import annotations

import importlib.metadata

try:
    VERSION = importlib.metadata.version("medley")
except importlib.metadata.PackageNotFoundError:
    # A checkout that is run without having been installed.
    VERSION = "unknown"
