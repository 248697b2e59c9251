"""`paraflash serve MODEL`: the server's own flags, vLLM's names for things that are always so here, and the start.

Engine flags are added by `paraflash.engine.flags`.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
from typing import Any

from paraflash.arguments import json_object
from paraflash.config.engine import Refused
from paraflash.engine.flags import add_engine_flags, engine_config
from paraflash.engine.options import ForeignOption, anything, only

logger = logging.getLogger("paraflash.server")


_PARSER = "deepseek-recipe parses this model's answers, always on; leave it out or name deepseek_v41"
_PARSERS = only("deepseek_v41", "deepseek_v4", "deepseek_v4_1", "auto", "")

# Flags of vLLM's server whose one meaning here is fixed: accepted with a log line if it is that, else refused.
FIXED: dict[str, ForeignOption] = {
    "tool_call_parser": ForeignOption(str, _PARSERS, _PARSER),
    "reasoning_parser": ForeignOption(str, _PARSERS, _PARSER),
    "enable_auto_tool_choice": ForeignOption(bool, only(True), "tool_choice auto is always possible; leave it out"),
    "enable_reasoning": ForeignOption(
        bool, only(True), "reasoning is always parsed; send reasoning_effort none to turn it off"
    ),
    "chat_template": ForeignOption(
        str, only(""), "the chat format of this model is built by deepseek-recipe, not by a template; leave it out"
    ),
    "chat_template_content_format": ForeignOption(str, anything, "text parts and strings are both accepted"),
    "response_role": ForeignOption(str, only("assistant"), "answers have the role assistant; leave it out"),
    "api_server_count": ForeignOption(int, only(1), "one HTTP process serves the engine; use 1"),
    "stream_interval": ForeignOption(int, only(1), "every token is streamed when it is there; use 1"),
    "enable_request_id_headers": ForeignOption(bool, only(True), "x-request-id is always echoed; leave it out"),
    "enable_server_load_tracking": ForeignOption(bool, only(True), "/load always works; leave it out"),
    "disable_uvicorn_access_log": ForeignOption(bool, only(True), "there is no access log; leave it out"),
    "disable_log_requests": ForeignOption(bool, only(True), "requests are only logged with --enable-log-requests"),
    "disable_frontend_multiprocessing": ForeignOption(
        bool, only(False), "the engine always runs in its own process; leave it out"
    ),
}


def _port(text: str) -> int:
    if not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port; 0 to 65535 are allowed")
    return int(text)


def _at_least(low: float, kind: type) -> Any:
    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not low <= value < 2**53:
            raise argparse.ArgumentTypeError(f"{text!r} is not allowed; a number of at least {low:g} is needed")
        return value

    return parse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine_flags(parser)
    server = parser.add_argument_group("server")
    server.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1: this machine only)"
    )
    server.add_argument("--port", type=_port, default=8000, help="port to listen on; 0 takes a free one (default 8000)")
    server.add_argument(
        "--served-model-name", nargs="+", metavar="NAME", help="names of the model in the API (default: MODEL)"
    )
    server.add_argument(
        "--api-key",
        nargs="+",
        metavar="KEY",
        help="keys of which clients must send one (default: $PARAFLASH_API_KEY or $VLLM_API_KEY)",
    )
    server.add_argument(
        "--max-body-bytes", type=_at_least(1, int), default=32 * 2**20, help="largest request body (default 32 MiB)"
    )
    server.add_argument(
        "--shutdown-timeout",
        type=_at_least(0, float),
        default=0.0,
        help="seconds that open requests have to finish after SIGTERM (default 0: they end at once)",
    )
    server.add_argument("--ssl-keyfile", help="key of the TLS certificate")
    server.add_argument("--ssl-certfile", help="TLS certificate")
    answers = parser.add_argument_group("answers")
    answers.add_argument(
        "--generation-config",
        default="auto",
        help="auto: defaults of sampling from the checkpoint's generation_config.json; vllm: none; or a folder",
    )
    answers.add_argument(
        "--override-generation-config", type=json_object, default={}, metavar="JSON", help="defaults of sampling"
    )
    answers.add_argument(
        "--default-chat-template-kwargs",
        type=json_object,
        default={},
        metavar="JSON",
        help='{"thinking": false}: chat without thinking',
    )
    answers.add_argument(
        "--enable-prompt-tokens-details", action="store_true", help="report cached prompt tokens in usage"
    )
    answers.add_argument("--enable-force-include-usage", action="store_true", help="end every stream with usage")
    watching = parser.add_argument_group("logs and metrics")
    watching.add_argument("--enable-log-requests", action="store_true", help="one JSON line per request in the log")
    watching.add_argument("--disable-log-stats", action="store_true", help="no line of throughput every 10 s")
    watching.add_argument(
        "--metrics-prefix", default="paraflash", choices=("paraflash", "vllm"), help="prefix of metric names"
    )
    watching.add_argument(
        "--log-level",
        default="info",
        choices=("debug", "info", "warning", "error"),
        help="what is logged (default info)",
    )
    watching.add_argument(
        "--uvicorn-log-level", dest="log_level", choices=("debug", "info", "warning", "error"), help="as --log-level"
    )
    fixed = parser.add_argument_group("flags of vLLM's server that are refused or have no effect here")
    for name, option in FIXED.items():
        flag = "--" + name.replace("_", "-")
        if option.kind is bool:
            fixed.add_argument(
                flag, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=option.reason
            )
        else:
            fixed.add_argument(flag, type=option.kind, default=argparse.SUPPRESS, help=option.reason)
    parser.set_defaults(log_level="info")


def check_fixed(given: dict[str, Any]) -> None:
    """Raises `Refused` for a flag that asks for what is not there; logs the others."""
    for name, value in given.items():
        flag = "--" + name.replace("_", "-")
        if not FIXED[name].accepts(value):
            raise Refused(f"{flag} {value!r}: {FIXED[name].reason}")
        logger.info("%s: %s", flag, FIXED[name].reason)


def api_keys(args: argparse.Namespace) -> tuple[str, ...]:
    """The keys of the flag, else of the environment. Raises `Refused` for an empty one."""
    keys = args.api_key
    if keys is None:
        keys = [key for name in ("PARAFLASH_API_KEY", "VLLM_API_KEY") if (key := os.environ.get(name))][:1]
    if any(not key for key in keys):
        raise Refused("--api-key is empty; a key of at least one character is needed")
    return tuple(keys)


def run(args: argparse.Namespace) -> int:
    """Serves until SIGTERM (status 0), or until the engine ends (1). A refused setting gives 2."""
    logging.basicConfig(
        level=args.log_level.upper(), format="%(levelname)s %(asctime)s %(name)s: %(message)s", datefmt="%m-%d %H:%M:%S"
    )
    from paraflash.config.model import ConfigError
    from paraflash.engine.sampling_params import BadField
    from paraflash.engine.tokenizer import TokenizerError
    from paraflash.server.serve import serve

    try:
        check_fixed({name: value for name, value in vars(args).items() if name in FIXED})
        return asyncio.run(serve(args, engine_config(args), api_keys(args)))
    except (Refused, ConfigError, BadField, TokenizerError) as error:
        print(f"paraflash serve: {error}", file=sys.stderr)
        return 2
