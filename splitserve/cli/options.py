"""Options that several commands share, and the sampling options."""

from collections.abc import Callable
from typing import Any

import click

from splitserve.core.sampling import DEFAULT_MAX_TOKENS, SamplingParams

DEFAULT_ROUTER = "127.0.0.1:50050"

router_option = click.option(
    "--router",
    envvar="SPLITSERVE_ROUTER",
    default=DEFAULT_ROUTER,
    show_default=True,
    show_envvar=True,
    metavar="HOST:PORT",
    help="Router to ask.",
)

json_option = click.option("--json", "as_json", is_flag=True, help="Write JSON.")

_SAMPLING = (
    click.option("--max-tokens", type=int, help=f"Most tokens to generate. [{DEFAULT_MAX_TOKENS}]"),
    click.option("--temperature", type=float, help="0 is greedy. [1.0]"),
    click.option("--top-p", type=float, help="Keep the smallest set of this probability. [1.0]"),
    click.option("--top-k", type=int, help="Keep the k most likely tokens; 0 keeps all. [0]"),
    click.option("--min-p", type=float, help="Drop tokens below this share of the best. [0.0]"),
    click.option("--seed", type=int, help="Equal seeds give equal tokens."),
    click.option("--stop", multiple=True, help="Text that ends the answer; repeatable."),
    click.option(
        "--stop-token-ids", multiple=True, type=int, help="Token that ends it; repeatable."
    ),
    click.option("--ignore-eos", is_flag=True, help="Go on past the end of the sequence."),
    click.option("--presence-penalty", type=float, help="Per token that occurred. [0.0]"),
    click.option("--frequency-penalty", type=float, help="Per occurrence of a token. [0.0]"),
    click.option("--repetition-penalty", type=float, help="Divides logits of known tokens. [1.0]"),
    click.option("--logprobs", type=int, help="Report this many likely tokens each."),
    click.option("-n", "--n", "n", type=int, help="Answers. [1]"),
)


def sampling_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds an option per field of `SamplingParams`, by the field's name."""
    for option in reversed(_SAMPLING):
        command = option(command)
    return command


def sampling_params(options: dict[str, Any]) -> SamplingParams:
    """The sampler's parameters from `sampling_options`; what was not given keeps its default.

    Raises:
        InvalidArgumentError: A value is outside what is allowed.
    """
    return SamplingParams(
        **{name: value for name, value in options.items() if value not in (None, ())}
    )
