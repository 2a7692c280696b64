"""ChatEnvironment: the sandbox in which a model's chat template runs, with limits on its time and its size.

A template is code that came with the model. Jinja's sandbox keeps it from Python's own attributes; what is added
here keeps it from running for ever and from making values without end: each turn of a loop and each call of a
macro looks at the clock, and each operation that can make a large value of small ones is checked before it runs.
What is not checked is how long a single one of the remaining filters (sort, unique, map) takes over values that are
within the limits: seconds, at worst, on a thread of its own.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sized
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_CHARACTERS = 4 << 20
"""Of a rendered prompt, and of any text on the way there."""
MAX_NUMBER_BITS = 256
MAX_WIDTH = 1000
"""Of padding and indentation."""
_UNUSED = ("center", "urlize", "wordwrap", "xmlattr", "batch", "slice")
"""Filters that make much of little, and that no chat needs."""
_PADDING = ("center", "expandtabs", "ljust", "rjust", "zfill")
_WIDTH = re.compile(r"\*|\d{4}")


class TooSlowError(TemplateError):
    """The time given was not enough."""


class _Budget:
    """What is left of one rendering's time and size."""

    def __init__(self, seconds: float) -> None:
        self._end = time.thread_time() + seconds
        self._seconds = seconds
        self._characters = 4 * MAX_CHARACTERS

    def tick(self) -> None:
        if time.thread_time() > self._end:
            raise TooSlowError(f"it takes longer than {self._seconds:g} s")

    def spend(self, characters: int) -> None:
        self._characters -= characters
        if self._characters < 0:
            raise _too_large()


_budget: ContextVar[_Budget] = ContextVar("budget")


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Templates of a ChatEnvironment render inside of this; `seconds` are of this thread's processor time."""
    token = _budget.set(_Budget(seconds))
    try:
        yield
    finally:
        _budget.reset(token)


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """Raises TooSlowError, or TemplateError for a value that would be too large."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(finalize=_count, **options)
        del self.globals["lipsum"]
        for name in _UNUSED:
            del self.filters[name]
        indent = self.filters["indent"]
        self.filters["replace"] = _replace
        self.filters["format"] = lambda text, *args, **kwargs: _percent(str(text), kwargs or args)
        self.filters["indent"] = lambda text, width=4, *args, **kwargs: indent(text, _narrow(width), *args, **kwargs)

    def _generate(self, source: nodes.Template, *args: Any, **options: Any) -> str:
        """Puts a look at the clock into all that repeats."""
        for node in source.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):
            tick = nodes.Call(nodes.EnvironmentAttribute("tick"), [], [], None, None)
            node.body.insert(0, nodes.ExprStmt(tick).set_lineno(node.lineno))  # type: ignore[attr-defined]
        return super()._generate(source, *args, **options)

    @staticmethod
    def tick() -> None:
        _budget.get().tick()

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        match operator:
            case "+" if isinstance(left, Sized) and isinstance(right, Sized):
                _budget.get().spend(len(left) + len(right))
            case "*":
                _check_product(left, right)
            case "**":
                _check_power(left, right)
            case "%" if isinstance(left, str):
                return _percent(left, right)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        _budget.get().tick()
        method = getattr(__obj, "__wrapped__", __obj)  # jinja2 puts a function of its own around str.format
        if isinstance(text := getattr(method, "__self__", None), str):
            _check_method(text, method.__name__, args, kwargs)
        result = super().call(__context, __obj, *args, **kwargs)
        if isinstance(result, str):
            _budget.get().spend(len(result))
        return result


def _count(value: Any) -> Any:
    """Each value that is put out, be it into a variable."""
    budget = _budget.get(None)  # constants are put out by the compiler
    if budget is not None:
        budget.tick()
        budget.spend(len(value) if isinstance(value, str) else 16)
    return value


def _check_method(text: str, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    if name == "replace":
        _check_replaced(text, *args[:2])
    elif name in _PADDING:
        for width in (*args, *kwargs.values()):
            _narrow(width if isinstance(width, int) else 0)
    elif name in ("format", "format_map") and _WIDTH.search(text):
        raise _too_large()
    elif name == "join" and args and isinstance(args[0], Sized):
        _budget.get().spend(len(text) * len(args[0]))


def _replace(value: Any, old: Any, new: Any, count: int | None = None) -> str:
    text = str(value)
    _check_replaced(text, str(old), str(new))
    return text.replace(str(old), str(new), -1 if count is None else count)


def _check_replaced(text: str, old: str = "", new: str = "") -> None:
    _budget.get().spend(len(text) + text.count(old) * len(new))


def _percent(text: str, values: Any) -> str:
    if _WIDTH.search(text):
        raise _too_large()
    result: str = text % values
    _budget.get().spend(len(result))
    return result


def _narrow(width: Any) -> Any:
    size = width if isinstance(width, int) else len(width)
    if size > MAX_WIDTH:
        raise _too_large()
    return width


def _check_product(left: Any, right: Any) -> None:
    for value, times in ((left, right), (right, left)):
        if isinstance(value, Sized) and isinstance(times, int):
            _budget.get().spend(len(value) * max(times, 0))
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > MAX_NUMBER_BITS:
        raise _too_large()


def _check_power(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() * abs(right) > MAX_NUMBER_BITS:
        raise _too_large()


def _too_large() -> TemplateError:
    return TemplateError("a value in it is too large")
