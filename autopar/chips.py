"""The table of chips (option ``target_hardware``): speeds as their data sheets have them. Loads no torch.

`autopar.cost.hardware` makes of a row what estimates ask. Peaks are without sparsity, float32 and float64 in full
precision; links of 100 to 400 Gbit/s per device; PCIe 3, 4 or 5 to the host, at what copies reach.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.registry import Registry

PCIE_3, PCIE_4, PCIE_5 = 12.5e9, 25e9, 50e9  # also 100, 200 and 400 Gbit/s


@dataclass(frozen=True)
class Chip:
    """A row of the table; every speed is per second.

    flops: operations of products in half precision; float32, float64: of products in these. memory: bytes read or
    written. links: bytes to other ranks in each direction, where the topology says nothing else; host: bytes to host
    memory; capacity: bytes of memory; inside: bytes to other ranks of its node.
    """

    flops: float
    float32: float
    float64: float
    memory: float
    links: float = PCIE_4
    host: float = PCIE_4
    capacity: float = 80e9
    inside: float = PCIE_4


CHIPS: Registry[Chip] = Registry("target_hardware")

# A100, H100, H200 (SXM), H20, V100: NVIDIA's data sheets. B200: NVIDIA's Blackwell architecture brief, of HGX B200.
# L40S: NVIDIA's data sheet; on PCIe 4, without NVLink. MI300X: AMD's data sheet of the Instinct MI300X. Links within a
# node are half of what the sheets give, which is both directions.
CHIPS.add("A100", Chip(312e12, 19.5e12, 19.5e12, 2.0e12, inside=300e9))
CHIPS.add("H100", Chip(989e12, 67e12, 67e12, 3.35e12, PCIE_5, PCIE_5, inside=450e9))
CHIPS.add("H200", Chip(989e12, 67e12, 67e12, 4.8e12, PCIE_5, PCIE_5, 141e9, 450e9))
CHIPS.add("H20", Chip(148e12, 44e12, 1e12, 4.0e12, PCIE_5, PCIE_5, 96e9, 450e9))
CHIPS.add("B200", Chip(2250e12, 80e12, 40e12, 8.0e12, PCIE_5, PCIE_5, 180e9, 900e9))
CHIPS.add("L40S", Chip(362e12, 91.6e12, 1.4e12, 0.864e12, capacity=48e9))
CHIPS.add("MI300X", Chip(1307e12, 163e12, 163e12, 5.3e12, PCIE_5, PCIE_5, 192e9, 448e9))
CHIPS.add("V100", Chip(125e12, 15.7e12, 7.8e12, 0.9e12, PCIE_3, PCIE_3, 32e9, 150e9))
