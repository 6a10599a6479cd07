"""What the backward makes again, or gets back from host memory, instead of keeping it: policies by name. Loads no
torch.

A policy is asked of every value of the forward that the backward may take. It says True for one that is made again,
"host" for one that waits in host memory if it is kept, False for one that stays on the device. What leaves its layer,
and a choice that another run might make otherwise, is never made again, whatever it says.

    @autopar.AC_POLICIES.register("norms")
    def norms(value):
        return bool(value.layer) and value.module.endswith("norm")
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from autopar.registry import Registry

AUTO, HOST = "auto", "host"
WORTH_COPYING = 2**16  # bytes


@dataclass(frozen=True)
class ForwardValue:
    """A value of the forward, as a policy sees it.

    target: the operator that makes it ("aten.mm.default"). module: path of the module that calls it; layer: of the
    repeated block around it ("model.layers.3"), "" outside of any. bytes: of its storage. seconds: to make it, by
    estimate. product: of matrices, or a convolution; attention; exchange: it comes from other ranks, and is summed over
    them where ``sums``. asked: the model calls it within `torch.utils.checkpoint`. remakable: the backward can make it
    again.
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
    remakable: bool = True


@dataclass(frozen=True)
class PartCheckpoints:
    """What a part does not keep on the device from its F to its backward, by names of values: ``again``: the backward
    makes it again, and ``host``: it waits in host memory."""

    again: frozenset[str] = frozenset()
    host: frozenset[str] = frozenset()


NOTHING = PartCheckpoints()
Policy = Callable[[ForwardValue], bool | str]
AC_POLICIES: Registry[Policy] = Registry("activation_checkpoint")


@AC_POLICIES.register("none")
def nothing(value: ForwardValue) -> bool:
    """Everything that the backward takes is kept."""
    return False


@AC_POLICIES.register("full")
def within_layers(value: ForwardValue) -> bool:
    """Of a repeated layer what it is given is kept, and sums over ranks (Chen et al. 2016, Training deep nets with
    sublinear memory cost)."""
    return bool(value.layer) and not value.sums


@AC_POLICIES.register("selective")
def all_but_products(value: ForwardValue) -> bool:
    """As full, with products and attention kept: what is left is fast to make (Korthikanti et al. 2022, section 5)."""
    return bool(within_layers(value)) and not value.product and not value.attention


@AC_POLICIES.register("model")
def as_the_model_asks(value: ForwardValue) -> bool:
    """What the model calls within `torch.utils.checkpoint`, as with ``gradient_checkpointing_enable()``."""
    return value.asked and not value.sums


@AC_POLICIES.register("offload")
def layers_on_host(value: ForwardValue) -> bool | str:
    """Nothing is made again; what a repeated layer keeps waits in host memory, but for small values: their copies cost
    more than they free."""
    return HOST if value.layer and value.bytes >= WORTH_COPYING else False


@AC_POLICIES.register(AUTO)
def under_a_limit(value: ForwardValue) -> bool:
    """The least time under ``memory_limit``: `autopar.compile.ac_solver` decides."""
    raise AssertionError("decided for all values together")


# --- what was decided ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayerCheckpoint:
    """What the backward of one layer makes again. part: number of the pipeline's part. layer: its module, or that of
    what stands between. again: values, by their names in the graphs. saved: bytes that F keeps for B on the device.
    seconds: to make them, and that B waits for copies. host: values that wait in host memory, and their bytes there
    (``hosted``)."""

    part: int
    layer: str
    again: tuple[str, ...]
    saved: int
    seconds: float
    reason: str = ""
    host: tuple[str, ...] = ()
    hosted: int = 0


def checkpoint_lines(layers: Iterable[LayerCheckpoint]) -> list[str]:
    """As text; layers that make as much again are one line."""
    alike: dict[tuple[int, int, int, str], list[str]] = {}
    for found in layers:
        alike.setdefault((len(found.again), found.saved, found.hosted, found.reason), []).append(found.layer)
    return [
        f"  checkpoint {', '.join(names):<49} makes {again} values again, keeps {saved} bytes"
        + (f", {hosted} more on the host" if hosted else "")
        + f"; {reason}"
        for (again, saved, hosted, reason), names in alike.items()
    ]
