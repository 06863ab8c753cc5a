"""The program `kvferry`."""

import os
import sys

from rich.console import Console

from kvferry.cli import app
from kvferry.errors import CommandError


def main() -> None:
    _warn_of_variables()
    try:
        app()
    except CommandError as error:
        Console(stderr=True).print(
            f"kvferry: {error}", style="red", markup=False, highlight=False, soft_wrap=True
        )
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


def _warn_of_variables() -> None:
    if any(name.startswith("KVFERRY_") for name in os.environ):  # the import takes a while
        from kvferry.settings import unknown_variables

        for sentence in unknown_variables(os.environ):
            print(f"kvferry: {sentence}", file=sys.stderr)


if __name__ == "__main__":
    main()
