"""What the backward makes again instead of keeping it: policies by name. Loads no torch.

A policy is asked of every value of the forward that may be made again: inside of its layer, and no choice that another
run might make otherwise. It says whether it is.

    @autopar.CHECKPOINTS.register("norms")
    def norms(value):
        return value.layer and value.module.endswith("norm")
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from autopar.registry import Registry

AUTO = "auto"


@dataclass(frozen=True)
class ForwardValue:
    """A value of the forward, as a policy sees it.

    target: the operator that makes it ("aten.mm.default"). module: path of the module that calls it; layer: of the
    repeated block around it ("model.layers.3"), "" outside of any. bytes: of its storage. seconds: to make it, by
    estimate. product: of matrices, or a convolution; attention; exchange: it comes from other ranks, and is summed over
    them where ``sums``. asked: the model calls it within `torch.utils.checkpoint`.
    """

    target: str
    module: str
    layer: str
    bytes: int
    seconds: float
    product: bool = False
    attention: bool = False
    exchange: bool = False
    sums: bool = False
    asked: bool = False


Policy = Callable[[ForwardValue], bool]
CHECKPOINTS: Registry[Policy] = Registry("checkpoint")


@CHECKPOINTS.register("none")
def nothing(value: ForwardValue) -> bool:
    """Everything that the backward takes is kept."""
    return False


@CHECKPOINTS.register("full")
def within_layers(value: ForwardValue) -> bool:
    """Of a repeated layer what it is given is kept, and sums over ranks (Chen et al. 2016, Training deep nets with
    sublinear memory cost)."""
    return bool(value.layer) and not value.sums


@CHECKPOINTS.register("selective")
def all_but_products(value: ForwardValue) -> bool:
    """As full, with products and attention kept: what is left is fast to make (Korthikanti et al. 2022, section 5)."""
    return within_layers(value) and not value.product and not value.attention


@CHECKPOINTS.register("model")
def as_the_model_asks(value: ForwardValue) -> bool:
    """What the model calls within `torch.utils.checkpoint`, as with ``gradient_checkpointing_enable()``."""
    return value.asked and not value.sums


@CHECKPOINTS.register(AUTO)
def under_a_limit(value: ForwardValue) -> bool:
    """The least time under ``memory_limit``: `autopar.compile.fit_memory` decides."""
    raise AssertionError("decided for all values together")


# --- what was decided ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayerCheckpoint:
    """What the backward of one layer makes again. part: number of the pipeline's part. layer: its module, or that of
    what stands between. again: values, by their names in the graphs. saved: bytes that F keeps for B. seconds: to make
    them."""

    part: int
    layer: str
    again: tuple[str, ...]
    saved: int
    seconds: float
    reason: str = ""


def checkpoint_lines(layers: Iterable[LayerCheckpoint]) -> list[str]:
    """As text; layers that make as much again are one line."""
    alike: dict[tuple[int, int, str], list[str]] = {}
    for found in layers:
        alike.setdefault((len(found.again), found.saved, found.reason), []).append(found.layer)
    return [
        f"  checkpoint {', '.join(names):<49} makes {again} values again, keeps {saved} bytes; {reason}"
        for (again, saved, reason), names in alike.items()
    ]
