"""AdapterTexts: what an adapter's own tokenizer files change for its prompts and answers.

The files are not trusted. Nothing of them is executed but the chat template, in a process of its
own; of a ``tokenizer.json`` only tables are compared and added tokens are taken.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import json
import threading
from collections.abc import Mapping
from typing import Any

from models.errors import AdapterIncompatibleError, ChatTemplateError
from models.text.added_tokens import AddedTokens, BaseVocabulary, OwnTokenizerError
from models.text.isolated_template import MAX_TEMPLATE_BYTES, IsolatedTemplate, TemplateProcess
from models.text.tokenizer import Text

_MAX_CONFIG_BYTES = 8 << 20
_MAX_SPECIAL_TOKEN_CHARACTERS = 256
_SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token")
_EOS_NAME = "eos_token"
_DEFAULT_TEMPLATE_NAME = "default"
_MAX_NUM_REMEMBERED = 64
# Each is a tokenizer in memory.
_MAX_NUM_EXTENDED = 8


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TextFiles:
    """The contents of an adapter's files, "" where there is none.

    Attributes:
        template: ``chat_template.jinja``.
        config: ``tokenizer_config.json``.
        tokenizer: ``tokenizer.json``.
    """

    template: bytes = b""
    config: bytes = b""
    tokenizer: bytes = b""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OwnText:
    """How one adapter's prompts and answers are spelled.

    Attributes:
        text: its front; None is the base model's own.
        num_bytes: memory that it takes besides, about.
        warnings: sentences for the operator.
    """

    text: Text | None = None
    num_bytes: int = 0
    warnings: tuple[str, ...] = ()


class AdapterTexts:
    """Reads tokenizer files of adapters; equal ones are read once.

    An adapter's template goes before a configured one, since the adapter was trained with it; if
    it is the model's own, it counts as none: training saves that beside every adapter.
    A ``tokenizer.json`` must have the vocabulary of the base model; it may add tokens. All else
    that it says of splitting text is the base model's, with a warning if it says otherwise.
    The end of an answer is what ends the base model's, the adapter's own EOS token, and what its
    template writes behind the assistant's words.

    Owner: any thread. Lifetime: a process starts with the first template and ends with ``close``.
    """

    def __init__(self, base: Text, process: TemplateProcess | None = None) -> None:
        """Wrap a base model's text.

        Args:
            base: of the model.
            process: where templates are rendered; None takes the base's.
        """
        self._base = base
        self._process = process or base.template_process
        self._lock = threading.Lock()
        self._vocabulary: BaseVocabulary | None = None
        # sha256 of a tokenizer.json -> what it adds
        self._added: collections.OrderedDict[str, AddedTokens] = collections.OrderedDict()
        # What it adds -> the base with that
        self._extended: collections.OrderedDict[AddedTokens, Text] = collections.OrderedDict()

    def read(self, adapter_id: str, files: TextFiles, *, num_added_rows: int = 0) -> OwnText:
        """Return what files change; takes seconds for a large tokenizer, once.

        Args:
            adapter_id: whose.
            files: of the adapter.
            num_added_rows: token ids behind the base model's that the adapter has rows for.

        Raises:
            AdapterIncompatibleError: they cannot be used; the reason is one sentence.
            DrainingError: this was closed.
        """
        try:
            return self._read(adapter_id, files, num_added_rows)
        except OwnTokenizerError as error:
            raise AdapterIncompatibleError(adapter_id, str(error)) from error

    def close(self) -> None:
        """End the process. Idempotent."""
        self._process.close()

    def _read(self, adapter_id: str, files: TextFiles, num_added_rows: int) -> OwnText:
        config = _parse_config(files.config)
        special_tokens = _special_tokens_of(config)
        source = _template_of(files.template, config)
        warnings: tuple[str, ...] = ()
        text = self._base
        if files.tokenizer:
            added = self._read_tokenizer(files.tokenizer)
            warnings = added.warnings
            if added.tokens:
                text = self._extend(added)
                warnings += self._warn_of_rows(added, num_added_rows)
        if num_added_rows:
            text = text.with_rows(num_added_rows)
        eos_token_ids = text.known_token_ids(special_tokens.get(_EOS_NAME, ""))
        has_own_eos = not eos_token_ids <= self._base.eos_token_ids
        is_new = source not in self._base.known_templates
        if not is_new and text is self._base and not has_own_eos:
            return OwnText(warnings=warnings)
        template = None
        if is_new:
            tokens = {**self._base.special_tokens, **special_tokens}
            template = IsolatedTemplate(self._process, adapter_id, source, tokens)
            _check_template(template)
        return OwnText(
            text=text.adapted(template, eos_token_ids),
            num_bytes=len(files.template) + len(files.config) + len(files.tokenizer),
            warnings=warnings,
        )

    def _read_tokenizer(self, encoded: bytes) -> AddedTokens:
        key = hashlib.sha256(encoded).hexdigest()
        with self._lock:
            if key in self._added:
                self._added.move_to_end(key)
                return self._added[key]
            if self._vocabulary is None:
                self._vocabulary = BaseVocabulary(self._base.describe_tokenizer())
            vocabulary = self._vocabulary
        added = vocabulary.compare(encoded)
        with self._lock:
            self._added[key] = added
            if len(self._added) > _MAX_NUM_REMEMBERED:
                self._added.popitem(last=False)
        return added

    def _warn_of_rows(self, added: AddedTokens, num_added_rows: int) -> tuple[str, ...]:
        num_rows = self._base.vocabulary_size + num_added_rows
        beyond = [each for each in added.tokens if each.id >= num_rows]
        if not beyond:
            return ()
        return (
            f"its tokenizer.json adds {len(beyond)} tokens for which the model has no rows; "
            "prompts that spell them are refused",
        )

    def _extend(self, added: AddedTokens) -> Text:
        with self._lock:
            text = self._extended.get(added)
            if text is None:
                text = self._base.extended(added.tokens)
                self._extended[added] = text
                if len(self._extended) > _MAX_NUM_EXTENDED:
                    self._extended.popitem(last=False)
            self._extended.move_to_end(added)
            return text


def _parse_config(encoded: bytes) -> Mapping[str, Any]:
    if not encoded:
        return {}
    if len(encoded) > _MAX_CONFIG_BYTES:
        raise OwnTokenizerError(
            f"its tokenizer_config.json has {len(encoded)} bytes; the limit is {_MAX_CONFIG_BYTES}"
        )
    try:
        config = json.loads(encoded)
    except (ValueError, RecursionError) as error:
        raise OwnTokenizerError("its tokenizer_config.json is no JSON") from error
    if not isinstance(config, dict):
        raise OwnTokenizerError("its tokenizer_config.json is no JSON object")
    return config


def _special_tokens_of(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens by name, each given as text or as an object with its content."""
    tokens = {}
    for name in _SPECIAL_TOKEN_NAMES:
        value = config.get(name)
        content = value.get("content") if isinstance(value, dict) else value
        if content is None:
            continue
        if not isinstance(content, str) or len(content) > _MAX_SPECIAL_TOKEN_CHARACTERS:
            raise OwnTokenizerError(f"the {name} of its tokenizer_config.json is no short text")
        tokens[name] = content
    return tokens


def _template_of(encoded: bytes, config: Mapping[str, Any]) -> str:
    """Return the chat template, "" if there is none."""
    named = config.get("chat_template")
    if encoded:
        try:
            source = encoded.decode()
        except UnicodeDecodeError as error:
            raise OwnTokenizerError("its chat_template.jinja is no UTF-8") from error
    elif isinstance(named, list):
        source = next(
            (
                each["template"]
                for each in named
                if isinstance(each, dict)
                and each.get("name") == _DEFAULT_TEMPLATE_NAME
                and isinstance(each.get("template"), str)
            ),
            "",
        )
    elif named is None or isinstance(named, str):
        source = named or ""
    else:
        raise OwnTokenizerError("the chat_template of its tokenizer_config.json is no text")
    if len(source.encode(errors="replace")) > MAX_TEMPLATE_BYTES:
        raise OwnTokenizerError(f"its chat template has more than {MAX_TEMPLATE_BYTES} bytes")
    return source


def _check_template(template: IsolatedTemplate) -> None:
    try:
        reason = template.check()
    except ChatTemplateError as error:
        raise OwnTokenizerError(f"its chat template cannot be used: {error.reason}") from error
    if reason:
        raise OwnTokenizerError(f"its chat template does not compile: {reason}")
