"""The table of chips (option ``target_hardware``), read from ``cost/chips.json``. Loads no torch.

`autopar.cost.hardware` makes of a row what estimates ask, `autopar.cost.cluster` makes nodes of chips. A new chip is
one entry of the file.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from autopar.registry import Registry

FILE = Path(__file__).with_name("cost") / "chips.json"


@dataclass(frozen=True)
class Chip:
    """A row of the table; every speed is per second.

    flops: operations of products in half precision; float32, float64, float8: of products in these (float8 0: none).
    memory: bytes read or written. links: bytes of its network card, to other nodes, in each direction; host: bytes to
    host memory; capacity: bytes of memory; inside: bytes to other ranks of its node. node: chips of a node. source:
    where the numbers are from.
    """

    flops: float
    float32: float
    float64: float
    memory: float
    links: float = 25e9
    host: float = 25e9
    capacity: float = 80e9
    inside: float = 25e9
    node: int = 8
    float8: float = 0.0
    source: str = ""


DEFAULT = "H100"  # where no chip is named
CHIPS: Registry[Chip] = Registry("target_hardware")
for _name, _row in json.loads(FILE.read_text(encoding="utf-8"))["chips"].items():
    CHIPS.add(_name, Chip(**_row))
