"""How fast KV blocks travel over every wire, beside the wire's own limit and other engines.

`make bench-transfer` runs it; ARGS are those of `kvferry bench transfer`.
"""

import sys

from kvferry.cli import app

if __name__ == "__main__":
    app(["bench", "transfer", *sys.argv[1:]])
