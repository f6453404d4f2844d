"""Chat templates within bounds: rounds of loops, calls, sizes of texts and numbers.

Jinja's sandbox keeps a template from the file system; it does not keep it from two nested loops
over a hundred thousand numbers each, a macro that calls itself twice, or ``'a' * 10**9``. Here the
template that the library compiles is compiled with counters in it, which no machine's speed
changes: each round, call and filter costs a step, and more where it reads a long text.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache, wraps
from typing import Any

MOST_STEPS = 1_000_000
"""For one rendering. A chat of a thousand turns takes some ten thousand."""

MOST_CHARACTERS = 2**24
"""Of any text that a template makes."""

MOST_ITEMS = 2**20
"""Of any list that it makes."""

_LARGEST = 100_000  # a number that says how long something is to be
_MOST_BITS = 4096  # of a product or power
_CALL_STEPS = 6
_CHARACTERS_A_STEP = 256
_ITEMS_A_STEP = 16
_WIDTH = re.compile(r"\d{6,}")
_INNER_WIDTH = re.compile(r"\{[^}]*\{|%[^a-zA-Z%]*\*")
_SIZING = frozenset({"batch", "center", "indent", "round", "slice", "tojson"})
_SPENT = threading.local()


class TemplateBoundError(Exception):
    """A template that would run for too long, or make something too large; says what."""


@contextmanager
def bounded() -> Iterator[None]:
    """Within it, what this thread renders by the transformers library is held to the bounds."""
    _install()
    _SPENT.left = MOST_STEPS
    try:
        yield
    finally:
        del _SPENT.left


def _install() -> None:
    from transformers.utils import chat_template_utils as library

    plain = library._compile_jinja_template
    if getattr(plain, "is_bounded", False):
        return

    def compiled(text: str) -> Any:
        return _with_bounds(text) if hasattr(_SPENT, "left") else plain(text)

    @lru_cache(maxsize=16)
    def _with_bounds(text: str) -> Any:
        # Compiling folds constants: 'a' * 10**9 would be made then. So the library compiles no
        # text, for its environment, and the text is compiled once that has its bounds.
        environment = plain.__wrapped__("").environment
        _bind(environment)
        return _compiled(environment, text)

    compiled.is_bounded = True  # type: ignore[attr-defined]
    library._compile_jinja_template = compiled


def _compiled(environment: Any, text: str) -> Any:
    from jinja2 import nodes

    tree = environment.parse(text)
    for loop in tree.find_all(nodes.For):
        loop.iter = _filtered(loop.iter, "anygauge_rounds")
    for compared in tree.find_all(nodes.Compare):
        compared.expr = _counted_reading(compared.expr)
        for operand in compared.ops:
            operand.expr = _counted_reading(operand.expr)
    for taken in tree.find_all(nodes.Getitem):
        if isinstance(taken.arg, nodes.Slice):
            taken.node = _counted_reading(taken.node)
    _replace_joins(tree)
    template = environment.template_class.from_code(
        environment, environment.compile(tree), environment.make_globals(None)
    )
    write = template.root_render_func

    def counted(context: Any) -> Iterator[str]:
        length = 0
        for piece in write(context):
            length += len(piece)
            _refuse_long(length)
            yield piece

    template.root_render_func = counted
    return template


def _filtered(node: Any, name: str) -> Any:
    from jinja2 import nodes

    made = nodes.Filter(node, name, [], [], None, None).set_lineno(node.lineno)
    return made.set_environment(node.environment)


def _counted_reading(node: Any) -> Any:
    from jinja2 import nodes

    return node if isinstance(node, nodes.Literal) else _filtered(node, "anygauge_read")


def _replace_joins(node: Any) -> None:
    """Each ``one ~ other`` goes through a filter that counts."""
    from jinja2 import nodes

    for name, value in node.iter_fields():
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, nodes.Node):
                _replace_joins(each)
        if isinstance(value, list):
            setattr(node, name, [_counted_join(each) for each in value])
        else:
            setattr(node, name, _counted_join(value))


def _counted_join(node: Any) -> Any:
    from jinja2 import nodes

    if not isinstance(node, nodes.Concat):
        return node
    parts: Any = nodes.List(node.nodes).set_lineno(node.lineno)
    parts.set_environment(node.environment)
    return _filtered(parts, "anygauge_join")


def _bind(environment: Any) -> None:
    """Counters in every place where a template makes or reads something."""
    from jinja2 import pass_context
    from jinja2.runtime import LoopContext

    # Filters that take the context are never worked out while compiling.
    environment.tests = {name: _bounded_test(each) for name, each in environment.tests.items()}
    environment.filters = {
        **{name: _bounded_filter(name, each) for name, each in environment.filters.items()},
        "anygauge_rounds": pass_context(lambda context, values: _Rounds(values)),
        "anygauge_read": pass_context(lambda context, value: _read(value)),
        "anygauge_join": pass_context(lambda context, parts: _join([str(part) for part in parts])),
    }
    for operator, bound in (("*", _times), ("**", _power), ("+", _plus), ("%", _percent)):
        environment.binop_table[operator] = bound(environment.binop_table[operator])
    environment.intercepted_binops = frozenset(["*", "**", "+", "%"])
    environment.concat = _join
    call = environment.call

    def bounded_call(context: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
        _spend(_CALL_STEPS)
        if isinstance(target, LoopContext) and args:
            args = (_Rounds(args[0]), *args[1:])
        method = getattr(target, "__wrapped__", target)
        owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        if isinstance(owner, (str, bytes, int)):
            _refuse_growth(name, owner, args, kwargs)
        elif name == "generate_lorem_ipsum":
            _refuse_large((*args, *kwargs.values()), 100)
        return _measured(call(context, target, *args, **kwargs))

    environment.call = bounded_call


class _Rounds:
    """What a loop goes through; each round is a step."""

    def __init__(self, values: Iterable[Any]) -> None:
        self._values = values

    def __iter__(self) -> Iterator[Any]:
        for value in self._values:
            _spend(1)
            yield value

    def __len__(self) -> int:
        return len(self._values)  # type: ignore[arg-type]


def _spend(steps: int) -> None:
    left = getattr(_SPENT, "left", None)
    if left is None:  # not rendered by us
        return
    if steps > left:
        raise TemplateBoundError(
            f"it takes more than {MOST_STEPS:,} rounds of loops, calls and filters for one chat"
        )
    _SPENT.left = left - steps


def _read(value: Any) -> Any:
    """The value, once its steps are spent: more for a long one."""
    if isinstance(value, (str, bytes)):
        _spend(len(value) // _CHARACTERS_A_STEP)
    elif isinstance(value, (list, tuple)):
        _spend(len(value) // _ITEMS_A_STEP)
    return value


def _measured(value: Any) -> Any:
    if isinstance(value, (str, bytes)):
        _refuse_long(len(value))
    elif isinstance(value, (list, tuple)):
        _refuse_many(len(value))
    return _read(value)


def _refuse_long(length: int) -> None:
    if length > MOST_CHARACTERS:
        raise TemplateBoundError(f"it makes a text of more than {MOST_CHARACTERS:,} characters")


def _refuse_many(length: int) -> None:
    if length > MOST_ITEMS:
        raise TemplateBoundError(f"it makes a list of more than {MOST_ITEMS:,} items")


def _refuse_large(values: Iterable[Any], most: int = _LARGEST) -> None:
    for value in values:
        if isinstance(value, int) and abs(value) > most:
            shown = value if value.bit_length() < 100 else f"2^{value.bit_length()}"
            raise TemplateBoundError(f"it uses the number {shown} as a size; at most {most:,}")


def _join(parts: Iterable[str]) -> str:
    listed, length = [], 0
    for part in parts:
        length += len(part)
        _refuse_long(length)
        listed.append(part)
    return str(_measured("".join(listed)))


def _refuse_growth(name: str, owner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse a method or filter whose result would be too long, before it is made."""
    _refuse_large((*args, *kwargs.values()))
    if name == "replace" and isinstance(owner, str) and len(args) >= 2:
        _refuse_long(owner.count(str(args[0])) * len(str(args[1])))
    elif name == "join" and args:
        separator = owner if isinstance(owner, str) else ""
        _refuse_joined(separator, args[0])
    elif name == "expandtabs":
        size = next((value for value in (*args, *kwargs.values()) if isinstance(value, int)), 8)
        _refuse_long(len(owner) * max(size, 1))
    elif name in ("format", "format_map"):
        _refuse_widths(owner)
    _read(owner)


def _refuse_joined(separator: str, values: Any) -> None:
    if isinstance(values, (list, tuple, str)):
        length = sum(len(value) if isinstance(value, str) else 1 for value in values)
        _refuse_long(length + len(separator) * len(values))


def _refuse_widths(text: Any) -> None:
    if isinstance(text, str) and (_WIDTH.search(text) or _INNER_WIDTH.search(text)):
        raise TemplateBoundError(f"it writes with a width that may be too large: {text!r:.60}")


def _bounded_filter(name: str, made: Callable[..., Any]) -> Callable[..., Any]:
    takes = 1 if hasattr(made, "jinja_pass_arg") else 0

    @wraps(made)
    def bounded_filter(*args: Any, **kwargs: Any) -> Any:
        _spend(_CALL_STEPS)
        value, others = args[takes] if len(args) > takes else None, args[takes + 1 :]
        _read(value)
        if isinstance(value, list):
            _spend(len(value))
        if name in _SIZING:
            _refuse_large((*others, *kwargs.values()))
        if name == "indent" and isinstance(value, str):
            width = others[0] if others else kwargs.get("width", 4)
            length = len(width) if isinstance(width, str) else int(width)
            _refuse_long(len(value) + value.count("\n") * length)
        elif name == "replace" and len(others) >= 2:
            _refuse_growth(name, str(value), others, {})
        elif name == "join":
            if not isinstance(value, (list, tuple, str)) and value is not None:
                value = list(_Rounds(value))
                args = (*args[:takes], value, *others)
            _refuse_joined(str(others[0] if others else kwargs.get("d", "")), value)
        elif name == "format":
            _refuse_widths(value)
        return _measured(made(*args, **kwargs))

    return bounded_filter


def _bounded_test(made: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(made)
    def bounded_test(*args: Any, **kwargs: Any) -> Any:
        for value in args:
            _read(value)
        return made(*args, **kwargs)

    return bounded_test


Operator = Callable[[Any, Any], Any]


def _times(plain: Operator) -> Operator:
    def times(left: Any, right: Any) -> Any:
        for one, other in ((left, right), (right, left)):
            if isinstance(one, (str, bytes, list, tuple)) and isinstance(other, int):
                is_text = isinstance(one, (str, bytes))
                (_refuse_long if is_text else _refuse_many)(len(one) * max(other, 0))
        if isinstance(left, int) and isinstance(right, int):
            _refuse_bits(left.bit_length() + right.bit_length())
        return _measured(plain(left, right))

    return times


def _power(plain: Operator) -> Operator:
    def power(left: Any, right: Any) -> Any:
        if isinstance(left, int) and isinstance(right, int):
            _refuse_bits(left.bit_length() * max(right, 0))
        return plain(left, right)

    return power


def _refuse_bits(bits: int) -> None:
    if bits > _MOST_BITS:
        raise TemplateBoundError(f"it computes a number of more than {_MOST_BITS} bits")


def _plus(plain: Operator) -> Operator:
    def plus(left: Any, right: Any) -> Any:
        if isinstance(left, (str, bytes)) and isinstance(right, (str, bytes)):
            _refuse_long(len(left) + len(right))
        elif isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
            _refuse_many(len(left) + len(right))
        return _measured(plain(left, right))

    return plus


def _percent(plain: Operator) -> Operator:
    def percent(left: Any, right: Any) -> Any:
        _refuse_widths(left)
        return _measured(plain(left, right))

    return percent
