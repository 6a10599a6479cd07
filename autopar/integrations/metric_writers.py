"""Where the numbers of `autopar.monitor` go: what the user has made with a library of their choice, told by its method.

SummaryWriter of torch or tensorboardX     add_scalar(name, value, step)
mlflow, a comet Experiment                 log_metrics(values, step=)
wandb, a run of it                         log(values, step=)
a prometheus_client CollectorRegistry      a gauge for each number: autopar_tokens_per_second
a path                                     a line of JSON for each step, appended
a function                                 called with (step, values)
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

log = logging.getLogger("autopar.monitor")
Write = Callable[[int, Mapping[str, float]], None]


def writer_for(target: Any) -> Write:
    """What writes numbers by name, of a step, to ``target``. Raises ValueError for a target that takes none."""
    if isinstance(target, (str, Path)):
        return _to_file(_named_file(target))
    if hasattr(target, "register") and hasattr(target, "collect"):
        return _to_registry(target)
    if hasattr(target, "add_scalar"):
        return lambda step, values: _each(target.add_scalar, step, values)
    if hasattr(target, "log_metrics"):
        return lambda step, values: target.log_metrics(dict(values), step=step)
    if hasattr(target, "log"):
        return lambda step, values: target.log(dict(values), step=step)
    if callable(target):
        found: Write = target
        return found
    raise ValueError(
        "monitor: to= needs a writer of TensorBoard, a run of wandb, mlflow, a registry of prometheus_client, a path or"
        f" a function of (step, values), found a {type(target).__name__}"
    )


def kept_from_failing(write: Write, name: str) -> Write:
    """The writer, whose first error is logged and its last call: numbers that are lost must not end a run."""
    failed = False

    def attempt(step: int, values: Mapping[str, float]) -> None:
        nonlocal failed
        if failed:
            return
        try:
            write(step, values)
        except Exception as error:
            failed = True
            log.warning("monitor: writing to %s failed at step %d and is given up: %s", name, step, error)

    return attempt


def _each(add: Callable[[str, float, int], Any], step: int, values: Mapping[str, float]) -> None:
    for name, value in values.items():
        add(name, value, step)


def _named_file(target: str | Path) -> Path:
    path = Path(target)
    if not path.suffix or path.is_dir():  # as "wandb"
        raise ValueError(
            f"monitor: to= needs a path with a suffix, such as metrics.jsonl, found {str(target)!r}; to a library pass "
            "what it has made, such as wandb itself or SummaryWriter(folder)"
        )
    return path


def _to_file(path: Path) -> Write:
    def write(step: int, values: Mapping[str, float]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")

    return write


def _to_registry(registry: Any) -> Write:
    from prometheus_client import Gauge  # the user has it: the registry is of this library

    gauges: dict[str, Gauge] = {}

    def write(step: int, values: Mapping[str, float]) -> None:
        for name, value in {"step": step, **values}.items():
            if name not in gauges:
                gauges[name] = Gauge(f"autopar_{re.sub(r'[^a-zA-Z0-9_]', '_', name)}", name, registry=registry)
            gauges[name].set(value)

    return write
