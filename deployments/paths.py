"""The paths of the HTTP API, in one place for its routes and for its description."""

from __future__ import annotations

CHAT_PATH = "/v1/chat/completions"
# DigitalOcean's, under its two bases: there a request is an agent's unless it says otherwise.
AGENT_PATHS = ("/chat/completions", "/api/v1/chat/completions")
CHAT_PATHS = (CHAT_PATH, *AGENT_PATHS)
COMPLETION_PATH = "/v1/completions"
MODELS_PATH = "/v1/models"
TOKENIZE_PATH = "/tokenize"
DETOKENIZE_PATH = "/detokenize"
HEALTH_PATH = "/health"
VERSION_PATH = "/version"
OPENAPI_PATH = "/openapi.json"
DOCS_PATH = "/docs"
