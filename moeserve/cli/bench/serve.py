"""`moeserve bench serve`: puts load on any OpenAI-compatible server and measures the latency and throughput that its
users see.

The options and figures, and their names, are those of `vllm bench serve` (docs/reference/benchmark-figures.md lists the
few differences), so that figures of different servers can be compared.
"""

from __future__ import annotations

import argparse
import datetime
import math
import os
import sys
from typing import Any

import aiohttp
import orjson
import uvloop
from tqdm import tqdm

from moeserve.cli.bench.against_engine import FLAG, EngineRates, measure_engine, server_of, split_flags
from moeserve.cli.bench.client import Client
from moeserve.cli.bench.load import Load, Run
from moeserve.cli.bench.pictures import PictureShape, add_picture_options, picture_urls, pictures_from
from moeserve.cli.bench.prompts import choose_writer
from moeserve.cli.workload.metrics import summarize
from moeserve.cli.workload.options import (
    add_judgement_options,
    add_workload_options,
    objectives_from,
    whole,
    workload_from,
)
from moeserve.cli.workload.plot import write_plot
from moeserve.cli.workload.report import TableRow, details, failures, save, table
from moeserve.cli.workload.trace import Workload
from moeserve.errors import ConfigError, UserError

PATHS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}
CONNECT_TIMEOUT_S = 30.0
DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8000


def main(arguments: list[str]) -> int:
    """Returns exit code 0 if every request succeeded, 1 if one failed, 2 with a message for an error of the user."""
    parser = command_parser()
    args = parser.parse_args(arguments)
    try:
        if args.text_prompts and args.backend == "openai-chat":
            raise ConfigError("--text-prompts has no effect in chat, whose prompts are text; leave it out")
        pictures = pictures_from(args)
        workload = workload_from(args)
        objectives = objectives_from(args)
        rates, result, run = _run(args, workload, pictures)
        result |= summarize(run.outcomes, run.duration, args.metric_percentiles, objectives)
        if rates is not None:
            result |= rates.summary(result)
        result["client_cpu_us_per_token"] = run.cpu / max(result["total_output_tokens"], 1) * 1e6
        result["client_cpu_usage"] = run.cpu / run.duration
        _report(args, result, run, rates)
    except (UserError, OSError) as error:
        parser.error(str(error))
    return 1 if result["failed"] else 0


def command_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="moeserve bench serve",
        usage="%(prog)s [options]",
        description=(
            "Put load on an OpenAI-compatible server and measure what its users see. The API key, if needed, is read "
            "from the environment variable OPENAI_API_KEY."
        ),
        allow_abbrev=False,
    )
    server = parser.add_argument_group("server")
    server.add_argument(
        "--url",
        "--base-url",
        metavar="URL",
        help="URL of the server, with or without /v1 (default: http://127.0.0.1:8000)",
    )
    server.add_argument(
        "--host", type=_not_empty, help=f"host of the server, without --url (default: {DEFAULT_HOST})"
    )
    server.add_argument(
        "--port",
        type=whole(1, 65535),
        metavar="N",
        help=f"port of the server, without --url (default: {DEFAULT_PORT})",
    )
    server.add_argument(
        "--backend",
        choices=PATHS,
        default="openai",
        help=("API to measure. openai: completions; openai-chat: chat completions (default: openai)"),
    )
    server.add_argument(
        FLAG,
        metavar="FLAGS",
        help=(
            "first measure the engine alone with these server flags, then start a server with them for the load, and "
            'compare the times, such as "--model model.gguf --threads 8"; answers have their full length'
        ),
    )
    server.add_argument(
        "--model", metavar="NAME", help="model to ask (default: the first that the server lists)"
    )
    server.add_argument(
        "--ignore-eos",
        action="store_true",
        help="generate every answer to its full length, even if the model ends it (the request field ignore_eos of "
        "vLLM)",
    )
    server.add_argument(
        "--text-prompts",
        action="store_true",
        help=(
            "send prompts as text even if the API takes token ids, as vLLM's benchmark does; TTFT then includes "
            "tokenising"
        ),
    )
    server.add_argument(
        "--extra-body",
        type=_json_object,
        default={},
        metavar="JSON",
        help="JSON object of further fields for every request",
    )
    add_workload_options(parser)
    add_picture_options(parser)
    add_judgement_options(parser)
    parser.add_argument("--disable-tqdm", action="store_true", help="show no progress bar")
    return parser


def _not_empty(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("must not be empty")
    return text


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("must be a JSON object")
    return value


def _run(
    args: argparse.Namespace, workload: Workload, pictures: PictureShape | None
) -> tuple[EngineRates | None, dict[str, Any], Run]:
    """Returns the engine's rates (None if not asked for) and the result of `_measure`. Raises UserError."""
    if args.against_engine is None:
        args.url = _url_of(args)
        return None, *uvloop.run(_measure(args, workload, pictures))
    if any(option is not None for option in (args.url, args.host, args.port)):
        raise ConfigError(f"{FLAG} starts a server of its own: leave --url, --host and --port out")
    flags = split_flags(args.against_engine)
    args.ignore_eos = True
    rates = measure_engine(flags, workload, args.max_concurrency)
    with server_of(flags) as args.url:
        return rates, *uvloop.run(_measure(args, workload, pictures))


def _url_of(args: argparse.Namespace) -> str:
    """Returns the server's URL, from --url or from --host and --port. Raises ConfigError if both were given."""
    if args.url is None:
        host = DEFAULT_HOST if args.host is None else args.host
        port = DEFAULT_PORT if args.port is None else args.port
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"
    if args.host is not None or args.port is not None:
        raise ConfigError("--url has the host and the port: leave --host and --port out")
    return str(args.url)


async def _measure(
    args: argparse.Namespace, workload: Workload, pictures: PictureShape | None
) -> tuple[dict[str, Any], Run]:
    """Runs the workload. Returns the options under vLLM's names, and the run. Raises UserError."""
    base = args.url.rstrip("/").removesuffix("/v1")
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),  # unlimited here: --max-concurrency sets the limit
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
        headers=request_headers(),
        auto_decompress=False,
    ) as session:
        model = args.model or await _first_model(session, base)
        common = {"model": model, **({"ignore_eos": True} if args.ignore_eos else {}), **args.extra_body}
        client = Client(session, base + PATHS[args.backend], common)
        chat = args.backend == "openai-chat"
        urls = picture_urls(pictures, workload)
        writer, form = await choose_writer(client, workload, chat=chat, text=args.text_prompts, pictures=urls)
        with tqdm(total=workload.num_requests, unit="req", disable=args.disable_tqdm or None) as bar:
            run = await Load(client, workload, writer, args.max_concurrency, bar.update).run()
    rate = math.inf if args.request_rate is None else args.request_rate
    asked: dict[str, Any] = {
        "date": datetime.datetime.now().strftime("%Y%m%d-%H%M%S"),
        "backend": args.backend,
        "model_id": model,
        "prompt_format": form if pictures is None else f"{form}, {pictures}",
        "num_prompts": workload.num_requests,
        "request_rate": "trace" if args.trace is not None else "inf" if math.isinf(rate) else rate,
        "burstiness": args.burstiness or 1.0,
        "max_concurrency": args.max_concurrency,
    }
    return asked, run


def request_headers() -> dict[str, str]:
    headers = {"content-type": "application/json", "accept-encoding": "identity"}
    key = os.environ.get("OPENAI_API_KEY")
    return headers | {"authorization": f"Bearer {key}"} if key else headers


async def _first_model(session: aiohttp.ClientSession, base: str) -> str:
    url = f"{base}/v1/models"
    try:
        async with session.get(url) as response:
            text = await response.text()
            if response.status != 200:
                raise ConfigError(f"{url}: HTTP {response.status}: {text[:500]}")
            return str(orjson.loads(text)["data"][0]["id"])
    except (aiohttp.ClientConnectorError, TimeoutError):
        raise ConfigError(f"--url: no server answers at {base}: start it, or name another") from None
    except aiohttp.ClientError as error:
        raise ConfigError(f"{url}: {error}") from None
    except (orjson.JSONDecodeError, KeyError, IndexError, TypeError):
        raise ConfigError(f"{url} lists no model; name one with --model") from None


def _report(args: argparse.Namespace, result: dict[str, Any], run: Run, rates: EngineRates | None) -> None:
    rows: list[TableRow] = [
        ("Prompts as:", result["prompt_format"]),
        ("CPU per output token (us):", result["client_cpu_us_per_token"]),
        ("Share of one core:", result["client_cpu_usage"]),
    ]
    more = {"This Client": rows} | ({} if rates is None else {"The Engine Alone": rates.rows(result)})
    print(table(result, "Serving Benchmark Result", args.metric_percentiles, more))
    print(failures(run.outcomes), file=sys.stderr, end="")
    if args.save_result is not None:
        save(args.save_result, result | (details(run.outcomes) if args.save_detailed else {}))
    if args.plot is not None:
        write_plot(args.plot, f"{result['model_id']} at {args.url}", run.outcomes)
