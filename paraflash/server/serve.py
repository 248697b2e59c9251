"""The server process: starts the engine, prints what it has, serves HTTP, and ends in order.

SIGTERM or SIGINT: no new connections, open requests get --shutdown-timeout seconds, the rest end with an error event,
exit 0. A second signal ends them at once. If the engine dies: every stream ends with an error event, exit 1.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import signal
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn

from paraflash.config.engine import EngineConfig, Refused
from paraflash.config.model import load_config
from paraflash.engine.client import CORE, AsyncEngine, StartFailed
from paraflash.server.app import build_app
from paraflash.server.chat_codec import ChatCodec
from paraflash.server.metrics import Metrics
from paraflash.server.sampling import Limits, generation_defaults
from paraflash.server.startup_table import print_table
from paraflash.server.state import ServerOptions, ServerState
from paraflash.server.tokens import TextTokenizer

logger = logging.getLogger("paraflash.server")

_GRACE_S = 2.0  # for answers to leave after their requests have been ended
_STATS_EVERY = 10  # ticks of a second


class _Server(uvicorn.Server):
    """uvicorn without its own signal handlers; `serve` below has them."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(args: argparse.Namespace, config: EngineConfig, api_keys: tuple[str, ...], factory: str = CORE) -> int:
    """Runs until a signal (0) or the end of the engine (1). Raises `Refused` and `ConfigError` before that."""
    model = load_config(config.model, config.hf_overrides)
    tokenizer = TextTokenizer(config.tokenizer or config.model, model.bos_token_id)
    defaults = generation_defaults(config.model, args.generation_config, args.override_generation_config)
    kwargs = args.default_chat_template_kwargs
    thinking = kwargs.get("thinking", kwargs.get("enable_thinking", True))
    if not isinstance(thinking, bool) or set(kwargs) - {"thinking", "enable_thinking"}:
        raise Refused(f'default_chat_template_kwargs is {kwargs!r}; {{"thinking": true}} or false is needed')
    chat = ChatCodec(tokenizer, thinking)
    if chat.missing:
        logger.warning(
            "the tokenizer has no %s: /v1/chat/completions is refused, completions work", ", ".join(chat.missing)
        )
    _check_certificate(args.ssl_certfile, args.ssl_keyfile)
    listener = _bind(args.host, args.port)  # a port in use is told before a model is loaded

    loop, stop = asyncio.get_running_loop(), _StopSignal()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set, number)
    engine = await _start_engine(config, factory, args.log_level.upper(), stop)
    if engine is None:
        listener.close()
        return 0
    try:
        limits = Limits(
            max_model_len=int(engine.info["max_model_len"]),
            vocab_size=model.vocab_size,
            max_logprobs=config.max_logprobs,
            defaults=defaults,
        )
        names = tuple(args.served_model_name or [config.model])
        options = ServerOptions(
            served_names=names,
            api_keys=api_keys,
            max_body_bytes=args.max_body_bytes,
            prompt_tokens_details=args.enable_prompt_tokens_details,
            force_include_usage=args.enable_force_include_usage,
            log_requests=args.enable_log_requests,
        )
        metrics = Metrics(args.metrics_prefix, names[0], lambda: engine.stats, cache_labels(config, engine.info))
        engine.on_step = metrics.step_done
        state = ServerState(engine, tokenizer, chat, limits, metrics, options, time.time())
        print_table(names, engine.info)
        return await _run_http(args, state, listener, stop)
    finally:
        await engine.stop()


def cache_labels(config: EngineConfig, info: dict[str, Any]) -> dict[str, str]:
    """Labels of the cache_config_info metric."""
    return {
        "block_size": str(config.block_size),
        "cache_dtype": str(info.get("kv_cache_dtype", config.kv_cache_dtype)),
        "num_gpu_blocks": str(info.get("num_blocks", "")),
        "enable_prefix_caching": str(config.enable_prefix_caching),
        "gpu_memory_utilization": str(config.gpu_memory_utilization),
    }


def _check_certificate(certfile: str | None, keyfile: str | None) -> None:
    """Raises `Refused` if TLS is asked for with files that cannot serve it."""
    if certfile is None and keyfile is None:
        return
    if certfile is None:
        raise Refused("--ssl-keyfile is given without --ssl-certfile; both are needed for TLS")
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(certfile, keyfile)
    except OSError as error:  # SSLError is one
        raise Refused(
            f"--ssl-certfile {certfile} and --ssl-keyfile {keyfile} cannot be used: {error.strerror or error}"
        ) from None


def _bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises `Refused` if the address cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise Refused(f"cannot listen on {host}:{port} ({error.strerror}); choose another --host or --port") from None
    listener.set_inheritable(True)
    return listener


class _StopSignal:
    """Counts the signals that ask the server to end."""

    def __init__(self) -> None:
        self.count = 0
        self.first, self.second = asyncio.Event(), asyncio.Event()

    def set(self, number: int) -> None:
        self.count += 1
        logger.info("%s: ending%s", signal.Signals(number).name, "" if self.count == 1 else " at once")
        (self.first if self.count == 1 else self.second).set()


async def _start_engine(config: EngineConfig, factory: str, log_level: str, stop: _StopSignal) -> AsyncEngine | None:
    """The engine; None if a signal came first. Raises `Refused` if it did not start because of a setting."""
    starting = asyncio.create_task(AsyncEngine.start(config, factory, log_level))
    stopped = asyncio.create_task(stop.first.wait())
    try:
        await asyncio.wait({starting, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await starting
            return None
        return starting.result()
    except StartFailed as error:
        if error.refused:
            raise Refused(str(error)) from None
        raise SystemExit(f"paraflash serve: the engine did not start: {error}") from None
    finally:
        stopped.cancel()


async def _run_http(args: argparse.Namespace, state: ServerState, listener: socket.socket, stop: _StopSignal) -> int:
    # uvicorn ends what is still open this long after it was told to exit; our own timers come first.
    timeout = args.shutdown_timeout + 2 * _GRACE_S
    uvicorn_config = uvicorn.Config(
        build_app(state),
        log_level="warning",
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        timeout_graceful_shutdown=timeout,  # type: ignore[arg-type]
        ssl_keyfile=args.ssl_keyfile,
        ssl_certfile=args.ssl_certfile,
    )
    server = _Server(uvicorn_config)
    http = asyncio.create_task(server.serve(sockets=[listener]))
    helpers = [
        asyncio.create_task(_tick(state, not args.disable_log_stats)),
        asyncio.create_task(_end_on_signal(state, server, stop, args.shutdown_timeout)),
        asyncio.create_task(_end_on_death(state, server)),
        asyncio.create_task(_announce(server, args, listener)),
    ]
    await http
    for task in helpers:
        task.cancel()
    return 1 if state.engine.dead is not None else 0


async def _announce(server: uvicorn.Server, args: argparse.Namespace, listener: socket.socket) -> None:
    while not server.started:
        await asyncio.sleep(0.01)
    scheme = "https" if args.ssl_certfile else "http"
    host = f"[{args.host}]" if ":" in args.host else args.host
    logger.info("listening on %s://%s:%d", scheme, host, listener.getsockname()[1])


async def _end_on_signal(state: ServerState, server: uvicorn.Server, stop: _StopSignal, timeout: float) -> None:
    await stop.first.wait()
    state.draining = True
    server.should_exit = True  # closes the listening socket and idle connections, then waits for open ones
    with contextlib.suppress(asyncio.TimeoutError, TimeoutError):
        await asyncio.wait_for(_until(lambda: state.engine.num_open == 0 or stop.second.is_set()), timeout)
    ended = state.engine.fail_open_streams("the server is shutting down")
    if ended:
        logger.info("ended %d open requests", ended)


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.02)


async def _end_on_death(state: ServerState, server: uvicorn.Server) -> None:
    await state.engine.ended.wait()
    server.config.timeout_graceful_shutdown = _GRACE_S  # type: ignore[assignment]
    await asyncio.sleep(0.2)  # the error events leave first; /health answers 503
    server.should_exit = True


async def _tick(state: ServerState, log_stats: bool) -> None:
    for second in range(2**62):
        state.metrics.tick()
        if log_stats and second % _STATS_EVERY == 0:
            _log_stats(state)
        await asyncio.sleep(1.0)


def _log_stats(state: ServerState) -> None:
    prompt_rate, output_rate = state.metrics.throughput()
    stats = state.engine.stats
    if not (prompt_rate or output_rate or state.engine.num_open):
        return
    asked = stats.get("prefix_queries", 0)
    logger.info(
        "prompt %.1f tokens/s, output %.1f tokens/s, running %d, waiting %d, KV %.1f %%, prefix hits %.1f %%",
        prompt_rate,
        output_rate,
        stats.get("running", 0),
        stats.get("waiting", 0),
        100 * stats.get("kv_usage", 0),
        100 * stats.get("prefix_hits", 0) / asked if asked else 0,
    )
