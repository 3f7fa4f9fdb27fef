"""Text: the front of a model's tokenizer. Holds no weights and knows no queue."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from tokenizers import AddedToken as TokenizerToken
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from models.errors import ChatTemplateError, ConfigError, InvalidRequestError
from models.requests import ChatPrompt, Prompt, TextPrompt
from models.text.added_tokens import AddedToken
from models.text.chat_template import ChatTemplate
from models.text.detokenizer import IncrementalDetokenizer, SpellingTable
from models.text.infill import find_infill_tokens
from models.text.isolated_template import IsolatedTemplate, TemplateProcess

# Stands for the assistant's words where the end of its turn is looked for.
_WORDS = "medleywords"


class TemplateRenderer(Protocol):
    """What is needed of a chat template."""

    def render(self, prompt: ChatPrompt) -> str:
        """Turn messages into the text of a prompt; raises as ``ChatTemplate.render`` does."""
        ...


class Text:
    """Prompts to token ids, token ids to text.

    Special tokens that a prompt spells out (``<|im_end|>`` in a message, say) are read as special
    tokens, in plain text and in chats alike: this is the default of transformers.

    Owner: any thread. Nothing changes after loading but a cache of computed values.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        chat_template: str = "",
        eos_token_ids: Iterable[int] = (),
        vocabulary_size: int | None = None,
    ) -> None:
        """Wrap a tokenizer.

        Args:
            tokenizer: a transformers tokenizer, used by nobody else.
            chat_template: Jinja text that replaces the tokenizer's own; "" keeps that.
            eos_token_ids: what the model's configuration says ends a text.
            vocabulary_size: rows of the model's embedding; None counts the tokenizer's tokens.

        Raises:
            ConfigError: the template does not compile, or the tokenizer cannot be streamed.
        """
        self._tokenizer = tokenizer
        self.vocabulary_size = vocabulary_size or len(tokenizer)
        self._spellings = SpellingTable(tokenizer)
        self.special_tokens: Mapping[str, str] = _special_tokens(tokenizer)
        own = _own_chat_template(tokenizer)
        source = chat_template or own
        # An adapter that brings one of them brings nothing new.
        self.known_templates = frozenset({"", own or "", source or ""})
        self._template: TemplateRenderer | None = (
            ChatTemplate(source, self.special_tokens) if source is not None else None
        )
        # Where templates of requests are rendered; it starts with the first of them.
        self.template_process = TemplateProcess()
        self.eos_token_ids = frozenset(eos_token_ids) | self._tokenizer_eos() | self._turn_end()

    @classmethod
    def load(
        cls, path: str, *, chat_template: str = "", vocabulary_size: int | None = None
    ) -> Text:
        """Load the tokenizer of a model.

        ``eos_token_ids`` is the union of what the generation config (or, without one, the config)
        names, the tokenizer's own EOS token, and the special token that the chat template writes
        behind the assistant's words.

        Args:
            path: local folder or hub id.
            chat_template: Jinja text that replaces the model's own; "" keeps that.
            vocabulary_size: rows of the model's embedding; None counts the tokenizer's tokens.

        Raises:
            ConfigError: no tokenizer there, or it cannot be served.
        """
        try:
            tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
            return cls(
                tokenizer,
                chat_template=chat_template,
                eos_token_ids=_configured_eos(path),
                vocabulary_size=vocabulary_size,
            )
        except ConfigError:
            raise
        except Exception as error:  # the tokenizers library raises no other class
            raise ConfigError(
                "model", f"the tokenizer of '{path}' cannot be used: {_first_line(error)}"
            ) from error

    def describe_tokenizer(self) -> str:
        """Return the tokenizer as its ``tokenizer.json`` has it, "" if it has none."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        return "" if backend is None else str(backend.to_str())

    def known_token_ids(self, token: str) -> frozenset[int]:
        """Return the id of a token that the tokenizer has and the model can draw, or nothing."""
        token_id = self._tokenizer.get_vocab().get(token)
        is_known = token_id is not None and token_id < self.vocabulary_size
        return frozenset((token_id,)) if is_known else frozenset()

    def extended(self, tokens: Sequence[AddedToken]) -> Text:
        """Return the same text with further tokens.

        Args:
            tokens: with the ids that follow the tokenizer's.
        """
        other = copy.copy(self)
        other._tokenizer = copy.deepcopy(self._tokenizer)
        for token in tokens:
            fields = {
                field.name: getattr(token, field.name)
                for field in dataclasses.fields(token)
                if field.name not in ("id", "content")
            }
            other._tokenizer.add_tokens([TokenizerToken(token.content, **fields)])
        other._spellings = SpellingTable(other._tokenizer)
        return other

    def with_rows(self, num_added: int) -> Text:
        """Return the same text for a model that has rows for further token ids.

        Args:
            num_added: how many ids behind ``vocabulary_size``.
        """
        other = copy.copy(self)
        other.vocabulary_size = self.vocabulary_size + num_added
        return other

    def adapted(self, template: TemplateRenderer | None, eos_token_ids: frozenset[int]) -> Text:
        """Return the same text with another template and further tokens that end an answer.

        Args:
            template: None keeps the one there is.
            eos_token_ids: besides those of this text.
        """
        other = copy.copy(self)
        if template is not None:
            other._template = template
        other.eos_token_ids = self.eos_token_ids | eos_token_ids | other._turn_end()
        return other

    @property
    def has_chat_template(self) -> bool:
        """Whether chats can be rendered."""
        return self._template is not None

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """Return the token ids of a prompt.

        Raises:
            ChatTemplateError: the template refused the messages, or there is none.
            InvalidRequestError: the prompt is empty, is not valid Unicode, or has an id outside
                of the vocabulary; ``param`` names the field.
        """
        if isinstance(prompt, ChatPrompt):
            return self._encode("messages", self._render(prompt), add_special_tokens=False)
        if isinstance(prompt, TextPrompt):
            if prompt.suffix:
                return self._encode_infill(prompt)
            return self._encode("prompt", prompt.text, add_special_tokens=prompt.add_special_tokens)
        return self._checked("prompt", prompt.token_ids)

    def detokenizer(
        self, *, is_special_token_skipped: bool = True, context_token_ids: Sequence[int] = ()
    ) -> IncrementalDetokenizer:
        """Return a detokenizer for text that follows the context."""
        return IncrementalDetokenizer(
            self._spellings,
            is_special_token_skipped=is_special_token_skipped,
            context_token_ids=context_token_ids,
        )

    def token_text(self, token_id: int) -> tuple[str, bytes]:
        """Return one token's text as it stands behind other text, and its bytes.

        The text has U+FFFD where the bytes are only a part of a character. Special tokens are
        spelled out; an id that the tokenizer does not know has neither text nor bytes.
        """
        data = self._spellings[token_id].following
        return data.decode(errors="replace"), data

    def _render(self, prompt: ChatPrompt) -> str:
        if prompt.template:
            own = IsolatedTemplate(self.template_process, "", prompt.template, self.special_tokens)
            return own.render(prompt)
        if self._template is None:
            raise ChatTemplateError("this model has no chat template")
        return self._template.render(prompt)

    def _encode(self, param: str, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequestError(
                param, f"is not valid Unicode: a lone surrogate at character {error.start}"
            ) from error
        token_ids = self._tokenizer(
            text,
            add_special_tokens=add_special_tokens,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )["input_ids"]
        return self._checked(param, token_ids)

    def _encode_infill(self, prompt: TextPrompt) -> tuple[int, ...]:
        """Return prefix, suffix and the opening of the middle, each behind its token."""
        tokens = find_infill_tokens(self._tokenizer.get_added_vocab())
        if tokens is None:
            raise InvalidRequestError("suffix", "this model has no fill-in-the-middle tokens")
        # Of an empty text a tokenizer gives what it begins every text with, BOS or nothing.
        opening = self._tokenizer("", add_special_tokens=prompt.add_special_tokens)["input_ids"]
        before = self._encode_part("prompt", prompt.text)
        behind = self._encode_part("suffix", prompt.suffix)
        whole = (*opening, tokens.prefix, *before, tokens.suffix, *behind, tokens.middle)
        return self._checked("prompt", whole)

    def _encode_part(self, param: str, text: str) -> tuple[int, ...]:
        return self._encode(param, text, add_special_tokens=False) if text else ()

    def _checked(self, param: str, token_ids: Sequence[int]) -> tuple[int, ...]:
        if not token_ids:
            raise InvalidRequestError(param, "must have at least one token")
        for token_id in (min(token_ids), max(token_ids)):
            if not 0 <= token_id < self.vocabulary_size:
                raise InvalidRequestError(
                    param, f"token id {token_id} is not in [0, {self.vocabulary_size})"
                )
        return tuple(token_ids)

    def _tokenizer_eos(self) -> frozenset[int]:
        token_id = self._tokenizer.eos_token_id
        return frozenset() if token_id is None else frozenset((token_id,))

    def _turn_end(self) -> frozenset[int]:
        """Return the special token that the chat template writes behind the assistant's words.

        Some templates write one only if another turn follows, or begin the next turn with it;
        then it is this one that a model writes at its end.
        """
        user = {"role": "user", "content": "x"}
        answer = {"role": "assistant", "content": _WORDS}
        for messages in ((user, answer), (user, answer, user)):
            token_id = self._special_token_behind_words(messages)
            if token_id is not None:
                return frozenset((token_id,))
        return frozenset()

    def _special_token_behind_words(self, messages: tuple[Mapping[str, str], ...]) -> int | None:
        try:
            rendered = self._render(ChatPrompt(messages=messages, add_generation_prompt=False))
        except ChatTemplateError:
            return None
        _, _, tail = rendered.rpartition(_WORDS)
        token_ids = self._tokenizer(tail, add_special_tokens=False, verbose=False)["input_ids"]
        for token_id in token_ids:
            spelling = self._spellings[token_id]
            if spelling.is_special:
                return int(token_id)
            if spelling.following.strip():
                return None
        return None


def _own_chat_template(tokenizer: Any) -> str | None:
    """Return the tokenizer's template, the one named "default" if there are several."""
    try:
        template: str = tokenizer.get_chat_template()
    except ValueError:
        return None
    return template


def _special_tokens(tokenizer: Any) -> dict[str, str]:
    """Return the special tokens by the names under which templates know them."""
    return {name: str(token) for name, token in tokenizer.special_tokens_map.items()}


def _configured_eos(path: str) -> frozenset[int]:
    """Return the EOS ids of the generation config, or of the config if there is none."""
    try:
        eos = GenerationConfig.from_pretrained(path).eos_token_id
    except OSError:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
        eos = config.get_text_config(decoder=True).eos_token_id
    if eos is None:
        return frozenset()
    return frozenset(eos) if isinstance(eos, list) else frozenset((eos,))


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", maxsplit=1)[0]
