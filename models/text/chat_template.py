"""Renders a model's chat template within limits. Tokenises nothing.

The template comes with the model and is trusted as much as its weights are; what it loops over
comes from a request and is not trusted at all. So rendering runs in Jinja's immutable sandbox and
is metered: loops, calls and filters take steps from a budget, and the output has a limit. A
request that makes an honest template run for long fails; it does not occupy a thread.
"""

from __future__ import annotations

import contextvars
import dataclasses
import datetime
import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from models.errors import ChatTemplateError, ConfigError, InvalidRequestError
from models.requests import ChatPrompt

# Names that the renderer itself sets, or that steer it elsewhere; a request may not.
RESERVED_VARIABLES = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "documents",
        "max_length",
        "messages",
        "padding",
        "sanitize_control_tokens",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)
RESERVED_PREFIX = "return_"

# Everything that a template can raise; MemoryError for a result that is too large to be built.
_FAILURES = (
    jinja2.TemplateError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    MemoryError,
    RuntimeError,
    TypeError,
    ValueError,
)
_MAX_REASON_CHARACTERS = 1000
# Written behind the last message and cut off again, with all that the template puts after it. If
# the template strips contents, the blank goes, and so must the blanks before the mark.
_OPEN_END = "<<<medley: the message goes on here>>> "
_CHARACTERS_PER_STEP = 1024


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RenderLimits:
    """How much one rendering may do.

    Attributes:
        max_steps: loop iterations, calls, and elements that filters go through. A step takes
            between 0.3 and 4 microseconds.
        max_characters: of the rendered text, and of any text made by repetition.
    """

    max_steps: int = 2_000_000
    max_characters: int = 1 << 24


def _local_time() -> datetime.datetime:
    return datetime.datetime.now().astimezone()


class ChatTemplate:
    """One compiled template.

    Owner: any thread; rendering keeps its state to itself.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        *,
        limits: RenderLimits | None = None,
        clock: Callable[[], datetime.datetime] = _local_time,
    ) -> None:
        """Compile a template.

        Args:
            source: Jinja text.
            special_tokens: variables such as ``bos_token`` that templates may name.
            limits: of each rendering; None takes the defaults.
            clock: what ``strftime_now`` in a template reads.

        Raises:
            ConfigError: the template does not compile.
        """
        self._limits = limits or RenderLimits()
        self._special_tokens = dict(special_tokens)
        self._knows_developer = "developer" in source
        self._knows_tool_calls = "tool_calls" in source
        environment = _MeteredEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
        )
        environment.globals["strftime_now"] = lambda form: clock().strftime(form)
        environment.globals["raise_exception"] = _raise_exception
        environment.filters["tojson"] = _to_json
        environment.meter_filters()
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError("chat_template", f"line {error.lineno}: {error.message}") from error

    def render(self, prompt: ChatPrompt) -> str:
        """Turn messages into the text of a prompt.

        Fields of a message that are None are left out, since templates tell "absent" from "null"
        badly. The role "developer" becomes "system" where the template does not know it.

        Raises:
            InvalidRequestError: no messages, tool calls that the template would drop, a reserved
                template variable, or a final message that cannot be continued.
            ChatTemplateError: the template refused the messages, or did too much.
        """
        self._check(prompt)
        messages = [self._message(message) for message in prompt.messages]
        if not prompt.continue_final_message:
            return self._run(messages, prompt)
        final = messages[-1].get("content")
        if not isinstance(final, str):
            raise InvalidRequestError(
                "continue_final_message", "the final message has no text to continue"
            )
        messages[-1]["content"] = final + _OPEN_END
        return _cut_open_end(self._run(messages, prompt))

    def _check(self, prompt: ChatPrompt) -> None:
        if not prompt.messages:
            raise InvalidRequestError("messages", "must not be empty")
        if prompt.continue_final_message and prompt.add_generation_prompt:
            raise InvalidRequestError(
                "continue_final_message",
                "excludes add_generation_prompt: the final message stays open, or a new one begins",
            )
        if not self._knows_tool_calls and any(map(_has_tool_calls, prompt.messages)):
            raise InvalidRequestError(
                "messages", "this model's chat template cannot render the tool calls in them"
            )
        for name in prompt.template_variables:
            if (
                name in RESERVED_VARIABLES
                or name in self._special_tokens
                or name.startswith(RESERVED_PREFIX)
            ):
                raise InvalidRequestError(
                    "chat_template_kwargs", f"'{name}' is reserved and cannot be set"
                )

    def _message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        fields = {name: value for name, value in message.items() if value is not None}
        if fields.get("role") == "developer" and not self._knows_developer:
            fields["role"] = "system"
        return fields

    def _run(self, messages: list[dict[str, Any]], prompt: ChatPrompt) -> str:
        """Run the template within the limits.

        Raises:
            ChatTemplateError: in its own words.
        """
        variables = {
            **self._special_tokens,
            "tools": None,
            "documents": None,
            **prompt.template_variables,
            "messages": messages,
            "add_generation_prompt": prompt.add_generation_prompt,
        }
        token = _meter.set(_Meter(self._limits))
        try:
            return "".join(_limited(self._template.generate(variables), self._limits))
        except _FAILURES as error:
            raise ChatTemplateError(_explain(error)) from error
        finally:
            _meter.reset(token)


def _has_tool_calls(message: Mapping[str, Any]) -> bool:
    return bool(message.get("tool_calls"))


class _LimitError(jinja2.TemplateError):
    """A rendering did too much."""


class _Meter:
    """What is left of one rendering's budget."""

    __slots__ = ("_max_steps", "_steps_left", "max_characters")

    def __init__(self, limits: RenderLimits) -> None:
        self._max_steps = self._steps_left = limits.max_steps
        self.max_characters = limits.max_characters

    def take(self, num_steps: int) -> None:
        """Take steps from the budget.

        Raises:
            _LimitError: nothing is left.
        """
        self._steps_left -= num_steps
        if self._steps_left < 0:
            raise _LimitError(f"rendering them takes more than {self._max_steps} steps")


# Unset while a template is compiled, where Jinja folds constants through the same filters.
_meter: contextvars.ContextVar[_Meter | None] = contextvars.ContextVar("meter", default=None)


class _MeteredCodeGenerator(CodeGenerator):
    """Compiles every loop to one over a metered iterable."""

    def visit_Template(  # noqa: N802 - named by Jinja
        self, node: nodes.Template, frame: Any = None
    ) -> None:
        """Wrap the loops, then compile."""
        for loop in list(node.find_all(nodes.For)):
            loop.iter = nodes.Filter(
                loop.iter, "metered_loop", [], [], None, None, lineno=loop.lineno
            )
        super().visit_Template(node, frame)


class _MeteredEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox with a meter on loops, calls, filters and repetition."""

    code_generator_class = _MeteredCodeGenerator
    intercepted_binops = frozenset({"*", "**"})

    def meter_filters(self) -> None:
        """Meter the filters that the environment has now, and add the one for loops."""
        for name, function in self.filters.items():
            self.filters[name] = _metered(function)
        self.filters["metered_loop"] = _metered_loop

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Call an object from a template; the odd names keep keyword arguments free."""
        _take(1 + _size(getattr(__obj, "__self__", None)))
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Multiply or raise to a power, unless the result is huge.

        Raises:
            _LimitError: it is.
        """
        meter = _meter.get()
        if meter is not None and _product_size(operator, left, right) > meter.max_characters:
            raise _LimitError(f"a result of '{operator}' is too large")
        return super().call_binop(context, operator, left, right)


class _GenerationBlock(Extension):
    """``{% generation %}``: marks the assistant's words for training; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 - declared so by Jinja

    def parse(self, parser: Parser) -> nodes.Node:
        """Return the statements inside of the block."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _limited(chunks: Iterable[str], limits: RenderLimits) -> Iterator[str]:
    """Pass the rendered text on up to its limit.

    Raises:
        _LimitError: there is more.
    """
    num_left = limits.max_characters
    for chunk in chunks:
        num_left -= len(chunk)
        if num_left < 0:
            raise _LimitError(f"the text has more than {limits.max_characters} characters")
        yield chunk


def _take(num_steps: int) -> None:
    meter = _meter.get()
    if meter is not None:
        meter.take(num_steps)


@jinja2.pass_context  # keeps the loop from being run at compile time
def _metered_loop(context: Context, iterable: Iterable[Any]) -> Iterator[Any]:  # noqa: ARG001
    for item in iterable:
        _take(1)
        yield item


def _metered(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the filter with a meter; it keeps the marks by which Jinja passes the context."""

    @functools.wraps(function)
    def metered(*args: Any, **kwargs: Any) -> Any:
        _take(1 + sum(_size(value) for value in args))
        return function(*args, **kwargs)

    return metered


def _size(value: object) -> int:
    """Return the steps that going through a value once takes."""
    if isinstance(value, str):
        return len(value) // _CHARACTERS_PER_STEP
    if isinstance(value, (list, tuple, dict, range)):
        return len(value)
    return 0


def _product_size(operator: str, left: Any, right: Any) -> int:
    """Return about how many elements, or bytes of a number, a result has."""
    if isinstance(left, int) and isinstance(right, int):
        if operator == "**":
            return left.bit_length() * max(right, 0) // 8
        return (left.bit_length() + right.bit_length()) // 8
    for sequence, count in ((left, right), (right, left)):
        if isinstance(sequence, (str, list, tuple)) and isinstance(count, int):
            return len(sequence) * max(count, 0)
    return 0


def _cut_open_end(text: str) -> str:
    """Cut the text where the final message ends.

    Raises:
        ChatTemplateError: the template did not write that message.
    """
    mark = _OPEN_END.rstrip()
    head, found, tail = text.rpartition(mark)
    if not found:
        raise ChatTemplateError("it leaves out the final message, which was to be continued")
    # Some templates write a message twice.
    head = head.replace(_OPEN_END, "").replace(mark, "")
    return head if tail.startswith(" ") else head.rstrip()


def _explain(error: BaseException) -> str:
    if isinstance(error, jinja2.TemplateError):
        reason = error.message or type(error).__name__
    else:
        reason = f"{type(error).__name__}: {error}"
    return reason[:_MAX_REASON_CHARACTERS]


def _raise_exception(message: object) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON as templates expect it: characters as they are, no HTML escapes."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
