"""The process in which chat templates of adapters are rendered. Reads requests, writes answers.

Whoever made an adapter is not trusted, and Jinja's sandbox limits neither time nor memory of what
a template makes of a text. So such templates run in a process of their own: without an
environment, with a limit of memory, unable to write files, and ended by its parent when it takes
too long (``models.text.isolated_template``). It imports no torch.

A message is its length in 4 bytes, big-endian, and JSON.
"""

from __future__ import annotations

import collections
import hashlib
import json
import resource
import sys
from typing import Any, BinaryIO

from models.errors import ChatTemplateError, ConfigError, InvalidRequestError
from models.requests import ChatPrompt
from models.text.chat_template import ChatTemplate, RenderLimits

LENGTH_BYTES = 4
READY = {"ready": True}
MAX_MEMORY_BYTES = 1 << 30

# A step takes 4 us at most: about a second.
_LIMITS = RenderLimits(max_steps=250_000, max_characters=1 << 22)
_MAX_NUM_TEMPLATES = 64

Templates = collections.OrderedDict[str, ChatTemplate]


def answer(request: dict[str, Any], templates: Templates) -> dict[str, Any]:
    """Render one prompt, or compile a template only.

    Args:
        request: ``source``, ``special_tokens`` and ``prompt`` (fields of a ChatPrompt, or None).
        templates: those that were compiled before; this one is among them afterwards.

    Returns:
        ``text``, or ``failed`` ("compile", "request" or "template") with ``param`` and ``reason``.
    """
    try:
        template = _compile(request["source"], request["special_tokens"], templates)
    except ConfigError as error:
        return _failure("compile", error.reason)
    except Exception as error:  # noqa: BLE001 - Python's compiler has many, such as RecursionError
        return _failure("compile", type(error).__name__)
    if request["prompt"] is None:
        return {"text": ""}
    try:
        return {"text": template.render(ChatPrompt(**request["prompt"]))}
    except InvalidRequestError as error:
        return _failure("request", error.reason, error.param)
    except ChatTemplateError as error:
        return _failure("template", error.reason)
    except Exception as error:  # noqa: BLE001 - whatever it is, the template did it
        return _failure("template", type(error).__name__)


def serve(source: BinaryIO, target: BinaryIO) -> None:
    """Answer requests until there are no more."""
    templates: Templates = collections.OrderedDict()
    write_message(target, READY)
    while (length := source.read(LENGTH_BYTES)) and len(length) == LENGTH_BYTES:
        request = json.loads(source.read(int.from_bytes(length, "big")))
        write_message(target, answer(request, templates))


def write_message(target: BinaryIO, message: dict[str, Any]) -> None:
    """Write one message."""
    encoded = json.dumps(message).encode()
    target.write(len(encoded).to_bytes(LENGTH_BYTES, "big") + encoded)
    target.flush()


def main() -> None:
    """Give up what is not needed, then serve standard input."""
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    serve(sys.stdin.buffer, sys.stdout.buffer)


def _compile(source: str, special_tokens: dict[str, str], templates: Templates) -> ChatTemplate:
    told = json.dumps([source, special_tokens], sort_keys=True)
    key = hashlib.sha256(told.encode()).hexdigest()
    template = templates.pop(key, None)
    if template is None:
        template = ChatTemplate(source, special_tokens, limits=_LIMITS)
    templates[key] = template
    if len(templates) > _MAX_NUM_TEMPLATES:
        templates.popitem(last=False)
    return template


def _failure(kind: str, reason: str, param: str = "") -> dict[str, Any]:
    return {"failed": kind, "param": param, "reason": reason}
