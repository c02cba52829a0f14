"""``splitserve place``."""

import re
from typing import Any

import click

from splitserve.cli.as_json import as_json as to_json
from splitserve.cli.options import json_option
from splitserve.core.parallel import ParallelConfig
from splitserve.core.placement import HostPlacement, place_aligned

_SIZES = re.compile(r"(\d+)x(\d+)(?::(\d+(?:,\d+)*))?")


class _Sizes(click.ParamType[ParallelConfig]):
    """``TENSORxPIPELINE``, with the layers of each stage if they are not even."""

    name = "TENSORxPIPELINE[:LAYERS,...]"

    def convert(self, value: Any, param: Any, ctx: Any) -> ParallelConfig:
        found = _SIZES.fullmatch(value)
        if found is None:
            self.fail(f"{value!r} is not like 2x3, or 2x3:8,8,16", param, ctx)
        tensor, pipeline, layers = found.groups()
        counts = tuple(int(count) for count in layers.split(",")) if layers else ()
        return ParallelConfig(int(tensor), int(pipeline), counts)


@click.command("place")
@click.option("--prefill", type=_Sizes(), required=True, help="The prefill node's sizes.")
@click.option("--decode", type=_Sizes(), required=True, help="The decode node's sizes.")
@click.option("--layers", type=int, required=True, help="Layers of the model.")
@click.option("--devices-per-host", type=int, required=True, help="Ranks that a host can run.")
@click.option(
    "--aligned-layers",
    is_flag=True,
    required=True,
    help="Every layer's source and target on one host. The only rule so far.",
)
@json_option
def command(
    prefill: ParallelConfig,
    decode: ParallelConfig,
    layers: int,
    devices_per_host: int,
    aligned_layers: bool,
    as_json: bool,
) -> None:
    """Proposes which host takes which ranks of a prefill and a decode node."""
    for number, host in enumerate(place_aligned(prefill, decode, layers, devices_per_host)):
        click.echo(to_json(host) if as_json else _line(number, host))


def _line(number: int, host: HostPlacement) -> str:
    begin, end = host.layers
    ranks = "; ".join(
        f"{kind} ranks {', '.join(map(str, ranks))}"
        for kind, ranks in (("prefill", host.prefill_ranks), ("decode", host.decode_ranks))
    )
    return f"host {number}: layers {begin}..{end - 1}; {ranks}"
