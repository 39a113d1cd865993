"""`kernel-hub serve`: a model behind OpenAI's HTTP interface."""

from __future__ import annotations

import argparse
import ipaddress
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..errors import KernelHubError, MissingPackageError
from .parts import console
from .parts.model import add_model, opened

if TYPE_CHECKING:
    import socket

    from ..engine.server.serve import ServerLimits

NAME = "serve"
HELP = "serve a model over HTTP as OpenAI's clients ask: completions, chats, streams"
EXAMPLE = "kernel-hub serve ./Qwen3-8B --port 8000"
KEY = "KERNEL_HUB_API_KEY"

LIMITS = {  # of engine/server/serve.py, where their defaults are: option, type, what it is
    "body_bytes": ("--max-body-bytes", int, "of a body, beyond which it is refused (413)"),
    "waiting": ("--max-waiting", int, "requests, beyond which others are refused (429)"),
    "read_s": ("--read-timeout", float, "seconds for a client to send a body"),
    "write_s": ("--write-timeout", float, "seconds for a client to take a piece of its answer"),
    "step_s": ("--step-timeout", float, "seconds for a step of the engine"),
    "drain_s": ("--drain-timeout", float, "seconds that what runs still has after SIGTERM"),
}


def arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("--name", help="what clients call the model (default: as its folder)")
    where = parser.add_argument_group("where")
    where.add_argument(
        "--host", default="127.0.0.1",
        help="address to listen on (default 127.0.0.1: this machine alone; 0.0.0.0: any)",
    )  # fmt: skip
    where.add_argument("--port", type=_port, default=8000, help="default 8000; 0: any free one")
    where.add_argument(
        "--api-key", metavar="KEY",
        help=f"bearer token that clients must send (default ${KEY}, which other users cannot see)",
    )  # fmt: skip
    limits = parser.add_argument_group("limits")
    for name, (option, kind, text) in LIMITS.items():
        limits.add_argument(option, dest=name, type=_positive(kind), metavar="N", help=text)


def _positive(kind: type[float]) -> Callable[[str], float]:
    def number(text: str) -> float:
        value = kind(text)
        if not 0 < value < float("inf"):
            raise argparse.ArgumentTypeError(f"{text} is not above 0")
        return value

    number.__name__ = kind.__name__  # argparse says it of what is no number
    return number


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text} is no port: 0 to 65535")
    return int(text)


def run(args: argparse.Namespace) -> int:
    try:
        from ..engine.server import serve
    except ModuleNotFoundError as error:
        raise MissingPackageError(
            f"kernel-hub serve needs {error.name}: pip install 'kernel_hub[serve]'"
        ) from error
    limits = serve.ServerLimits(
        **{name: value for name in LIMITS if (value := getattr(args, name))}
    )
    key = args.api_key or os.environ.get(KEY) or None
    is_first = os.environ.get("RANK", "0") == "0"
    # Before the model, which takes longer to find that the port is another's.
    listener = _bound(args, limits) if is_first else None
    engine = opened(args, **({"name": args.name} if args.name else {}))
    engine.runner.warm_up()
    if listener is None:
        engine.follow()
        return 0
    host, port = listener.getsockname()[:2]

    def ready(server: object) -> None:
        shown = f"[{host}]" if ":" in host else host
        console.note(f"{engine.name} at http://{shown}:{port}/v1, {_reach(host, key)}", wraps=False)
        sys.stdout.flush()  # to whoever waits for it

    try:
        serve.serve(engine, listener, limits, key, ready)
    finally:
        engine.close()
    return 0


def _bound(args: argparse.Namespace, limits: ServerLimits) -> socket.socket:
    from ..engine.server import serve

    try:
        return serve.bound(args.host, args.port, limits)
    except OSError as error:
        where = f"{args.host} port {args.port}"
        raise KernelHubError(f"can not listen on {where}: {error.strerror or error}") from error


def _reach(host: str, key: str | None) -> str:
    """Who can come, said aloud."""
    who = "anybody" if key is None else "whoever has the key"
    if ipaddress.ip_address(host.partition("%")[0]).is_loopback:
        return f"for {who} on this machine"
    return f"for {who} who reaches this machine" + ("" if key else f": set ${KEY}")
