"""The Jinja dialect that chat templates are written in, in a sandbox.

Templates come with the model's files: they may compute on the messages and nothing else. The
dialect is the one Hugging Face renders them with: trimmed blocks, `break` and `continue`, a
`tojson` that keeps Unicode, `raise_exception`, `strftime_now`, and `generation` blocks (which mark
the assistant's words for training and mean nothing here).
"""

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_PRODUCT = 1 << 20  # of a repeated text, or of the digits of a power


class RaisedByTemplate(TemplateError):
    """The template itself refused the messages."""


class GenerationBlock(Extension):
    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Also refuses the two operators that make huge values of small ones."""

    intercepted_binops = frozenset(["*", "**"])

    def __init__(self, now: Callable[[], datetime]) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[GenerationBlock, "jinja2.ext.loopcontrols"],
        )
        self.filters["tojson"] = _tojson
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda form: now().strftime(form)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" or not all(isinstance(side, int | float) for side in (left, right)):
            sizes = [side if isinstance(side, int | float) else len(side) for side in (left, right)]
            if abs(sizes[0] * sizes[1]) > MAX_PRODUCT:
                raise SecurityError(f"{operator} makes a value larger than {MAX_PRODUCT}")
        return super().call_binop(context, operator, left, right)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: object) -> NoReturn:
    raise RaisedByTemplate(str(message))
