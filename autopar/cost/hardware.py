"""What a rank computes with, for estimates. Loads no torch."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from autopar.chips import CHIPS, Chip
from autopar.cost.topology import Topologies, Topology

if TYPE_CHECKING:
    import torch

    from autopar.options import Options


@dataclass(frozen=True)
class Device:
    """The chip of one rank. Times are in seconds, sizes in bytes.

    flops: operations per second of products in half precision; ``others``: (dtype or its name, operations per second)
    for other dtypes. memory: bytes per second. efficiency: the share of ``flops`` that real products reach. launch:
    least time of a node (0: graphs may be fused). links: between ranks, unless the options name others. host: to host
    memory.
    """

    name: str
    flops: float
    memory: float
    others: tuple[tuple[str | torch.dtype, float], ...] = ()
    efficiency: float = 0.5
    launch: float = 0.0
    links: Topology = field(default_factory=Topology)
    host: Topology = field(default_factory=Topology)

    def speed(self, dtype: torch.dtype) -> float:
        """Operations per second that products in a dtype reach in practice."""
        speeds = {str(name).removeprefix("torch."): flops for name, flops in self.others}
        return self.efficiency * speeds.get(str(dtype).removeprefix("torch."), self.flops)


def device_named(name: str) -> Device:
    """A chip of the table (`autopar.chips`) as estimates take it."""
    return _device(name, CHIPS[name])


@functools.cache
def _device(name: str, chip: Chip) -> Device:
    others = (("float32", chip.float32), ("float64", chip.float64))
    links, host = (Topology(bandwidth=speed) for speed in (chip.links, chip.host))
    return Device(name, chip.flops, chip.memory, others, links=links, host=host)


DEFAULT = device_named("A100")


def device_of(options: Options) -> Device:
    """The chip that times are estimated for."""
    return device_named(options.target_hardware)


def host_link(links: Topologies, device: Device) -> Topology:
    """The link to host memory: that of the options, or the device's."""
    return links.axes.get("host", device.host)


def links_of(options: Options) -> Topologies:
    """The links that the options name; for other axes those of the device."""
    return Topologies.parse(options.topology, device_of(options).links)
