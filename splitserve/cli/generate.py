"""``splitserve generate``."""

import sys
from collections import defaultdict
from typing import Any

import click

from splitserve.cli.as_json import as_json
from splitserve.cli.interrupt import cancelled_by_ctrl_c
from splitserve.cli.options import json_option, router_option, sampling_options, sampling_params
from splitserve.client import Client, Generation
from splitserve.core.lifetime import Lifetime


@click.command("generate")
@click.argument("prompt", required=False)
@router_option
@click.option("--chat", is_flag=True, help="PROMPT is a user's message in a chat.")
@click.option("--system", help="System message before it; needs --chat.")
@click.option("--token-ids", metavar="IDS", help='Tokens in place of PROMPT: "1,2,3".')
@sampling_options
@click.option("--timeout", type=float, help="Seconds after which the request ends.")
@click.option("--request-id", default="", help="Name of the request, for abort.")
@json_option
@click.option("--lifetime", "show_lifetime", is_flag=True, help="Draw the request's life.")
def command(
    prompt: str | None,
    router: str,
    chat: bool,
    system: str | None,
    token_ids: str | None,
    timeout: float | None,
    request_id: str,
    as_json: bool,
    show_lifetime: bool,
    **sampling: Any,
) -> None:
    """Streams the answer to PROMPT; "-" reads it from standard input."""
    source = _input(prompt, chat, system, token_ids)
    with Client(router) as client:
        generation = client.generate(
            **source,
            sampling=sampling_params(sampling),
            request_id=request_id,
            timeout=timeout,
        )
        if as_json:
            lifetime = write_json(generation)
        elif (sampling["n"] or 1) > 1:
            lifetime = write_answers(generation)
        else:
            lifetime = stream_text(generation)
    if show_lifetime and lifetime is not None:
        from rich.console import Console

        from splitserve.cli.timeline import draw

        # With JSON on standard output, the picture must not mix with it.
        Console(stderr=as_json).print(draw(lifetime), highlight=False)


def stream_text(generation: Generation) -> Lifetime | None:
    """Writes an answer to standard output as it comes and returns the request's life."""
    lifetime, written = None, False
    try:
        with generation, cancelled_by_ctrl_c(generation):
            for delta in generation:
                click.echo(delta.text, nl=False)
                written = written or bool(delta.text)
                lifetime = delta.lifetime or lifetime
    finally:
        if written:
            click.echo()
    return lifetime


def write_answers(generation: Generation) -> Lifetime | None:
    """Writes several answers, each as it ends, and returns the request's life."""
    lifetime, texts = None, defaultdict[int, str](str)
    with generation, cancelled_by_ctrl_c(generation):
        for delta in generation:
            texts[delta.index] += delta.text
            if delta.finish_reason is not None:
                click.echo(f"[{delta.index}] {texts[delta.index]}")
            lifetime = delta.lifetime or lifetime
    return lifetime


def write_json(generation: Generation) -> Lifetime | None:
    """Writes a JSON object per delta and returns the request's life."""
    lifetime = None
    with generation, cancelled_by_ctrl_c(generation):
        for delta in generation:
            click.echo(as_json(delta))
            lifetime = delta.lifetime or lifetime
    return lifetime


def _input(
    prompt: str | None, chat: bool, system: str | None, token_ids: str | None
) -> dict[str, Any]:
    if (prompt is None) == (token_ids is None):
        raise click.UsageError("give either PROMPT or --token-ids")
    if system is not None and not chat:
        raise click.UsageError("--system needs --chat")
    if token_ids is not None:
        if chat:
            raise click.UsageError("--chat needs PROMPT, not --token-ids")
        return {"token_ids": _parse_ids(token_ids)}
    text = _read_stdin() if prompt == "-" else prompt
    if not chat:
        return {"prompt": text}
    turns = [{"role": "system", "content": system}] if system is not None else []
    return {"chat": [*turns, {"role": "user", "content": text}]}


def _parse_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError as error:
        raise click.BadParameter(
            "integers with commas between", param_hint="--token-ids"
        ) from error


def _read_stdin() -> str:
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise click.UsageError(f"standard input is not UTF-8: {error}") from error
