"""Masks written as text, for the command line: ``parse_mask("causal & window(256, 0)")``.

    expression   causal   window(256, 0)   ~a   a & b   a | b   (a)
    arguments    ints, strings, None, lists of ints; lists can be joined and repeated: [0] * 500 + [1] * 524

The text is read with ``ast`` and nothing in it is executed but the masks' own constructors.
"""

from __future__ import annotations

import ast
import inspect
from typing import Any

from . import masks
from .masks import Mask

NAMES = {
    fn.__name__: fn
    for fn in (
        masks.causal, masks.window, masks.key_lengths, masks.query_lengths, masks.documents, masks.prefix_lm,
    )
}  # fmt: skip
_LONGEST_LIST = 2**22  # a repeated list is made before anyone looks at it


def parse_mask(text: str) -> Mask:
    """The mask that an expression describes; a bare name is a call without arguments. ValueError says what is wrong."""
    try:
        return _mask(ast.parse(text.strip(), mode="eval").body)
    except SyntaxError as e:
        raise ValueError(f"mask {text!r} is not an expression: {e.msg} at column {e.offset}") from None
    except RecursionError:
        raise ValueError("the mask is nested too deeply") from None


def _mask(node: ast.expr) -> Mask:
    match node:
        case ast.Name(id=name):
            return _call(name, [], {}, node)
        case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords):
            named = {_keyword(k): _literal(k.value) for k in keywords}
            return _call(name, [_literal(a) for a in args], named, node)
        case ast.UnaryOp(op=ast.Invert(), operand=term):
            return ~_mask(term)
        case ast.BinOp(left=a, op=ast.BitAnd(), right=b):
            return _mask(a) & _mask(b)
        case ast.BinOp(left=a, op=ast.BitOr(), right=b):
            return _mask(a) | _mask(b)
        case ast.BoolOp() | ast.UnaryOp(op=ast.Not()):
            raise ValueError(f"{_source(node)}: combine masks with & | ~, not with and/or/not")
    raise ValueError(f"{_source(node)} is not a mask; there are {', '.join(NAMES)}, combined with & | ~")


def _keyword(k: ast.keyword) -> str:
    if k.arg is None:
        raise ValueError(f"**{_source(k.value)}: write the arguments out")
    return k.arg


def _call(name: str, args: list[Any], named: dict[str, Any], node: ast.expr) -> Mask:
    if name not in NAMES:
        raise ValueError(f"unknown mask {name!r}; there are {', '.join(NAMES)}")
    signature = inspect.signature(NAMES[name])
    try:
        signature.bind(*args, **named)
        return NAMES[name](*args, **named)
    except (TypeError, ValueError, RuntimeError) as e:  # RuntimeError: of torch.as_tensor
        parameters = ", ".join(str(p.replace(annotation=p.empty)) for p in signature.parameters.values())
        raise ValueError(f"{_source(node)}: {e}; the arguments are {name}({parameters})") from None


def _literal(node: ast.expr) -> Any:
    """None, a string, an int or a list of ints."""
    match node:
        case ast.Constant(value=None | str()):
            return node.value
        case ast.List() | ast.Tuple() | ast.BinOp():
            return _list(node)
    return _int(node)


def _int(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(n)) if not isinstance(n, bool):
            return n
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int(n))) if not isinstance(n, bool):
            return -n
    raise ValueError(f"{_source(node)} is not an argument of a mask: those are ints, strings, None and lists of ints")


def _list(node: ast.expr) -> list[Any]:
    """A list of ints, or of lists of ints; ``a + b`` and ``a * n`` as in Python."""
    match node:
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_list(x) if isinstance(x, ast.List | ast.Tuple | ast.BinOp) else _int(x) for x in items]
        case ast.BinOp(left=a, op=ast.Add(), right=b):
            return _list(a) + _list(b)
        case ast.BinOp(left=a, op=ast.Mult(), right=b):
            items, times = _list(a), _int(b)
            size = times * sum(len(x) if isinstance(x, list) else 1 for x in items)
            if size > _LONGEST_LIST:
                raise ValueError(f"{_source(node)}: a list of {size} entries is too long")
            return items * times
    raise ValueError(f"{_source(node)} is not a list of ints")


def _source(node: ast.expr) -> str:
    text = ast.unparse(node)
    return text if len(text) <= 60 else text[:57] + "..."
