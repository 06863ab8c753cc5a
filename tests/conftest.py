"""Options of the whole suite."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full-matrix",
        action="store_true",
        help="every prompt over every pair, wire and chunk size (about an hour on 2 cores)",
    )
