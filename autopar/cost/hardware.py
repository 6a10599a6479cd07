"""Speeds of chips, from their data sheets. Loads no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

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


# Peaks without sparsity, float32 and float64 in full precision; links of 100 to 400 Gbit/s per device; PCIe 3, 4 or 5
# to the host, at the rate that copies reach.
# V100, A100, H100, H200 (SXM): NVIDIA's data sheets. B200: NVIDIA's Blackwell architecture brief, of HGX B200. L40S:
# NVIDIA's data sheet; on PCIe 4, without NVLink. MI300X: AMD's data sheet of the Instinct MI300X.
_FAST = Topology(bandwidth=50e9)  # 400 Gbit/s; what PCIe 5 reaches
V100 = Device(
    "V100",
    125e12,
    0.9e12,
    (("float32", 15.7e12), ("float64", 7.8e12)),
    links=Topology(bandwidth=12.5e9),
    host=Topology(bandwidth=12.5e9),
)
A100 = Device("A100", 312e12, 2.0e12, (("float32", 19.5e12), ("float64", 19.5e12)))
H100 = Device("H100", 989e12, 3.35e12, (("float32", 67e12), ("float64", 67e12)), links=_FAST, host=_FAST)
H200 = Device("H200", 989e12, 4.8e12, (("float32", 67e12), ("float64", 67e12)), links=_FAST, host=_FAST)
B200 = Device("B200", 2250e12, 8.0e12, (("float32", 80e12), ("float64", 40e12)), links=_FAST, host=_FAST)
L40S = Device("L40S", 362e12, 0.864e12, (("float32", 91.6e12), ("float64", 1.4e12)))
MI300X = Device("MI300X", 1307e12, 5.3e12, (("float32", 163e12), ("float64", 163e12)), links=_FAST, host=_FAST)
DEFAULT = A100
DEVICES = {device.name: device for device in (A100, H100, H200, B200, L40S, MI300X, V100)}


def device_of(options: Options) -> Device:
    """The chip that times are estimated for."""
    return DEVICES[options.target_hardware]


def host_link(links: Topologies, device: Device) -> Topology:
    """The link to host memory: that of the options, or the device's."""
    return links.axes.get("host", device.host)


def links_of(options: Options) -> Topologies:
    """The links that the options name; for other axes those of the device."""
    return Topologies.parse(options.topology, device_of(options).links)
