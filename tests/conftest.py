"""Options of the whole suite."""

import pytest

from kernels import compiled

# More than -O1 takes minutes to compile; with less, gcc does not see what is always set.
SANITIZED = ("-g", "-O1", "-fsanitize=address,undefined", "-Wno-maybe-uninitialized")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full-matrix",
        action="store_true",
        help="every prompt over every pair, wire and chunk size (about an hour on 2 cores)",
    )
    parser.addoption(
        "--sanitize",
        action="store_true",
        help="what is written in C ends the process at the first access to memory that is not its "
        "own (see make test-sanitized)",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--sanitize"):
        compiled.FLAGS = (*compiled.FLAGS, *SANITIZED)
