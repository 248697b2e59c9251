"""`paraflash serve` with another engine core: python serve_scripted.py package.module:Core MODEL [flags]."""

import argparse
import functools
import sys

from paraflash.server import serve
from paraflash.server.cli import add_arguments, run

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    args = parser.parse_args(sys.argv[2:])
    serve.serve = functools.partial(serve.serve, factory=sys.argv[1])  # type: ignore[assignment]
    sys.exit(run(args))
