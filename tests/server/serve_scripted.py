"""`paraflash serve` with another engine core: python serve_scripted.py package.module:Core MODEL [flags]."""

import argparse
import asyncio
import logging
import sys

from paraflash.engine.flags import engine_config
from paraflash.server.cli import add_arguments, api_keys
from paraflash.server.serve import serve

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    args = parser.parse_args(sys.argv[2:])
    logging.basicConfig(level="INFO", format="%(levelname)s %(name)s: %(message)s")
    sys.exit(asyncio.run(serve(args, engine_config(args), api_keys(args), factory=sys.argv[1])))
