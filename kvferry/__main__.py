"""The program `kvferry`."""

import sys

from rich.console import Console

from kvferry.cli import app
from kvferry.errors import CommandError


def main() -> None:
    try:
        app()
    except CommandError as error:
        Console(stderr=True).print(
            f"kvferry: {error}", style="red", markup=False, highlight=False, soft_wrap=True
        )
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
