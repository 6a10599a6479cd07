"""Prices many layouts of a file: one JSON object per line, one answer per line.

    {"config": "config.json", "mesh": "dp=8,tp=8", "seq": 8192, "batch": 512, "options": {"zero": 1, "microbatches": 8}}
    {"seconds": 4.59, "mfu": 0.41, "memory": [51.2e9], "limit": 80e9, "fits": true, "causes": {...}, ...}

config: a path, or the values of one. mesh: text, or sizes by axis. options: of `autopar.options.Options`. cluster,
stack: as on the command line. attention: kernel. compute: "fp8". measured: seconds, which the answer compares.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from autopar.auto.costed_model import CostedModel
from autopar.chips import DEFAULT
from autopar.cost.cluster import Cluster
from autopar.cost.efficiency import DEFAULT_STACK, KERNELS, stack_named
from autopar.cost.layout import OUTER_TO_INNER, Layout
from autopar.cost.layout_price import Price
from autopar.ir.mesh import Mesh
from autopar.options import DECLARED, Options
from autopar.values import number, parse, whole_number

FIELDS = (
    "config", "mesh", "seq", "batch", "options", "cluster", "stack", "attention", "compute", "measured", "dtype",
)  # fmt: skip
NEEDED = ("config", "mesh", "seq", "batch")


class LayoutPricer:
    """Prices rows; models with equal config, sequence and dtype are built once."""

    def __init__(self, cluster: str = DEFAULT, stack: str = DEFAULT_STACK) -> None:
        self.cluster, self.stack = cluster, stack
        self._models: dict[str, CostedModel] = {}

    def answer(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to one row; ``refused`` says why there is no price."""
        try:
            price, stack = self._price(row)
        except ValueError as error:
            return {"refused": " ".join(str(error).split())}
        if price.refused:
            return {"refused": price.refused}
        found = {
            "seconds": price.seconds,
            "mfu": price.mfu,
            "memory": list(price.memory),
            "limit": price.limit,
            "fits": price.fits,
            "causes": [
                {"name": c.name, "axis": c.axis, "seconds": c.seconds, "exposed": c.exposed} for c in price.causes
            ],
            "stack": stack,
            "guesses": list(price.guesses),
        }
        if (measured := row.get("measured")) is not None:
            found |= {"measured": measured, "error": price.seconds / number("measured", measured) - 1}
        return found

    def _price(self, row: Mapping[str, Any]) -> tuple[Price, str]:
        checked(row)
        cluster = Cluster.parse(row.get("cluster", self.cluster))
        stack = stack_named(row.get("stack", self.stack), cluster.chip_name)
        layout = layout_of(row)
        what_if = {"kernel": row.get("attention", ""), "compute": row.get("compute", "")}
        return self.model(row).price(layout, cluster, stack, **what_if), stack.name

    def model(self, row: Mapping[str, Any]) -> CostedModel:
        """The model of a row, built once."""
        documents = Options(**row.get("options", {})).documents
        key = json.dumps([row["config"], row["seq"], row.get("dtype", "bfloat16"), documents], sort_keys=True)
        if key not in self._models:
            seq = whole_number("seq", row["seq"], least=1)
            self._models[key] = CostedModel.from_config(row["config"], seq, row.get("dtype", "bfloat16"), documents)
        return self._models[key]


def checked(row: Any) -> None:
    """Raises ValueError for missing, unknown and wrong fields of a row."""
    if not isinstance(row, Mapping):
        raise ValueError(f"layouts: a line needs a JSON object, found {type(row).__name__}")
    missing = [name for name in NEEDED if name not in row]
    unknown = sorted(set(row) - {*FIELDS})
    if missing or unknown:
        found = f"{', '.join(missing)} missing" if missing else f"unknown {', '.join(unknown)}"
        raise ValueError(f"layouts: a line has {', '.join(FIELDS)}; found {found}")
    if not isinstance(row.get("options", {}), Mapping):
        raise ValueError(f"layouts: options need an object of names and values, found {row['options']!r}")
    if row.get("attention", "") not in ("", *KERNELS):
        raise ValueError(f"layouts: attention is one of {', '.join(KERNELS)}, found {row['attention']!r}")
    if row.get("measured") is not None and not number("measured", row["measured"]) > 0:
        raise ValueError(f"layouts: measured needs seconds above 0, found {row['measured']!r}")


def layout_of(row: Mapping[str, Any]) -> Layout:
    """The layout of a row. Raises ValueError."""
    given, mesh = dict(row.get("options", {})), row["mesh"]
    if isinstance(mesh, Mapping):
        mesh = ",".join(f"{axis}={size}" for axis, size in mesh.items())
    if not isinstance(mesh, str):
        raise ValueError(f"layouts: mesh needs text such as dp=8,tp=8, or sizes by axis, found {mesh!r}")
    sizes = Mesh.parse(mesh).planned().sizes
    if unknown := sorted(given.keys() - DECLARED.keys()):
        raise ValueError(f"layouts: no option is called {', '.join(unknown)}")
    options = Options(**given)
    return Layout.of(
        {axis: sizes.get(axis, 1) for axis in OUTER_TO_INNER}, options, whole_number("batch", row["batch"], least=1)
    )


def answers(lines: Iterable[str], pricer: LayoutPricer) -> Iterator[dict[str, Any]]:
    """An answer for each line that is not empty."""
    for line in lines:
        if not line.strip():
            continue
        try:
            row = parse(line)
        except ValueError as error:
            yield {"refused": f"layouts: a line is not JSON: {error}"}
            continue
        yield pricer.answer(row)


def lines_of(file: str | Path) -> list[str]:
    """The lines of a file. Raises ValueError."""
    try:
        return Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"layouts: {str(file)!r} cannot be read: {error}; give a file with one JSON object per line"
        ) from error
