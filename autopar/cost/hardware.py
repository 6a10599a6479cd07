"""What a rank computes with and how ranks are connected, at what a software stack reaches of it. Loads no torch.

device = device_of(options)           the chip
links = Links.of(options, mesh)       those of an axis: named by the options, or the cluster's
links.seconds("tp", "all_reduce", 1e6)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from autopar.chips import CHIPS, Chip
from autopar.cost.cluster import AxisLinks, Cluster
from autopar.cost.efficiency import DEFAULT_STACK, Stack, stack_named
from autopar.cost.topology import NamedLinks, Topologies, Topology
from autopar.ir.mesh import Mesh

if TYPE_CHECKING:
    import torch

    from autopar.options import Options


def _is_float8(dtype: torch.dtype) -> bool:
    return str(dtype).startswith("torch.float8")


@dataclass(frozen=True)
class Device:
    """The chip of one rank. Speeds are those that the stack reaches, per second. kernel: of attention. float8: products
    are in float8."""

    name: str
    chip: Chip
    stack: Stack = field(hash=False)
    kernel: str = ""
    float8: bool = False

    def peak(self, dtype: torch.dtype) -> float:
        """Operations of products in a dtype, on paper: those of float8 in half precision where a chip has no others."""
        if _is_float8(dtype):
            return self.chip.float8 or self.chip.flops
        return float(getattr(self.chip, str(dtype).removeprefix("torch."), self.chip.flops))

    def speed(self, dtype: torch.dtype) -> float:
        """Operations of products in a dtype."""
        share = self.stack.float8 if _is_float8(dtype) and self.chip.float8 else 1.0
        return self.peak(dtype) * self.stack.products * share

    @property
    def products(self) -> float:
        """Operations of products in half precision, or in float8."""
        chip, stack = self.chip, self.stack
        return chip.float8 * stack.products * stack.float8 if self.float8 else chip.flops * stack.products

    def attention_share(self, backward: bool) -> float:
        """The share of the peak that attention reaches."""
        shares = self.stack.attention_backward if backward else self.stack.attention
        return shares[self.kernel or self.stack.kernel]

    @property
    def memory(self) -> float:
        """Bytes read or written."""
        return self.chip.memory * self.stack.memory

    @property
    def launch(self) -> float:
        """Seconds of the host per kernel."""
        return self.stack.launch

    def optimizer_seconds(self, elements: float, offloaded: bool = False) -> float:
        """Of an optimizer's step on so many elements of a rank. offloaded: states come from the host and return."""
        seconds = elements * self.stack.optimizer / self.memory
        return seconds + (2 * elements * self.stack.states / self.host.bandwidth if offloaded else 0.0)

    @property
    def host(self) -> Topology:
        """The link to host memory."""
        return Topology(bandwidth=self.chip.host * self.stack.host)

    @property
    def card(self) -> Topology:
        """The link to other nodes."""
        return Topology(bandwidth=self.chip.links * self.stack.network)


def device_named(name: str, stack: str = DEFAULT_STACK) -> Device:
    """A chip of the table (`autopar.chips`) with a stack."""
    return Device(name, CHIPS[name], stack_named(stack, name))


DEFAULT = device_named("A100")


def device_of(options: Options) -> Device:
    """The chip that times are estimated for."""
    return device_named(options.target_hardware)


@dataclass(frozen=True)
class Links:
    """The links of a mesh's axes. named: those of the options, which come first."""

    mesh: Mesh
    cluster: Cluster = field(default_factory=lambda: Cluster.parse(DEFAULT.name))
    stack: Stack = DEFAULT.stack
    named: Topologies = field(default_factory=Topologies)

    @classmethod
    def of(cls, options: Options, mesh: Mesh) -> Links:
        """Those that the options name, or else those of the target hardware."""
        device = device_of(options)
        named = Topologies.parse(options.topology, device.card)
        return cls(mesh, Cluster.parse(device.name), device.stack, named)

    def axis(self, name: str) -> AxisLinks | NamedLinks:
        """The links of an axis, of one of its levels (cp%4, cp/4), or of axes joined by commas."""
        return self.between(name, self.mesh.size(name), self.mesh.stride(name))

    def between(self, name: str, size: int, stride: int) -> AxisLinks | NamedLinks:
        """The links of ``size`` ranks, ``stride`` apart, under the name of an axis."""
        if (named := self.named.given(name)) is not None:
            return NamedLinks(named, size)
        return self.cluster.links(size, stride).scaled(self.stack.inside, self.stack.network, self.stack.start)

    def seconds(self, axis: str, kind: str, nbytes: float, calls: float = 1.0) -> float:
        """Seconds of ``calls`` collectives of a kind, in which each rank sends ``nbytes`` together."""
        return self.axis(axis).seconds(kind, nbytes, calls) if nbytes else 0.0

    def __str__(self) -> str:
        group = self.cluster.group
        return (
            str(self.named) or f"{group.inside / 1e9:g} GB/s in nodes of {group.per_node}, {group.card / 1e9:g} between"
        )


def host_link(links: Topologies, device: Device) -> Topology:
    """The link to host memory: that of the options, or the device's."""
    return links.axes.get("host", device.host)
