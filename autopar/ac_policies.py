"""Policies of activation checkpointing by name: which activations the backward recomputes, or reloads from host memory.
This module does not import torch.

A policy is called for every activation that the backward may need. It returns True to recompute it, "host" to offload
it if it is kept, and False to keep it on the device. Outputs of a layer, and choices that a second run might make
differently, are never recomputed, whatever the policy returns.

    @autopar.AC_POLICIES.register("norms")
    def norms(value):
        return bool(value.layer) and value.module.endswith("norm")
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from autopar.registry import Registry

AUTO, FUSED, MODEL, HOST = "auto", "fused", "model", "host"
WORTH_COPYING = 2**16  # bytes


@dataclass(frozen=True)
class ForwardValue:
    """An activation, as a policy sees it.

    target: the operator that computes it ("aten.mm.default"). module: path of the module that calls the operator;
    layer: path of the repeated block around it ("model.layers.3"), "" outside of any. bytes: size of its storage.
    seconds: estimated time to compute it. product: whether it is a matrix product or a convolution; attention: whether
    it is attention. exchange: whether it is the result of a collective; sums: of one that reduces. checkpointed:
    whether the model computes it within `torch.utils.checkpoint`. recomputable: whether the backward can recompute it.
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
    checkpointed: bool = False
    recomputable: bool = True


@dataclass(frozen=True)
class StageCheckpoints:
    """Names of the activations that a stage does not keep on the device from its forward to its backward. again: those
    that the backward recomputes; host: those that are offloaded."""

    again: frozenset[str] = frozenset()
    host: frozenset[str] = frozenset()


NOTHING = StageCheckpoints()
Policy = Callable[[ForwardValue], bool | str]
AC_POLICIES: Registry[Policy] = Registry("activation_checkpoint")


@AC_POLICIES.register("none")
def nothing(value: ForwardValue) -> bool:
    """Keep every activation that the backward needs."""
    return False


@AC_POLICIES.register("full")
def within_layers(value: ForwardValue) -> bool:
    """Recompute whole layers: keep the inputs of a repeated layer, and results of reductions over ranks (Chen et al.
    2016, Training deep nets with sublinear memory cost)."""
    return bool(value.layer) and not value.sums


@AC_POLICIES.register("selective")
def all_but_products(value: ForwardValue) -> bool:
    """As full, but keep matrix products and attention: the others are cheap (Korthikanti et al. 2022, section 5)."""
    return bool(within_layers(value)) and not value.product and not value.attention


@AC_POLICIES.register(MODEL)
def as_the_model_asks(value: ForwardValue) -> bool:
    """Recompute what the model runs within `torch.utils.checkpoint`, as with ``gradient_checkpointing_enable()``."""
    return value.checkpointed and not value.sums


@AC_POLICIES.register(FUSED)
def least_bytes_of_kernels(value: ForwardValue) -> bool:
    """Recompute element-wise values and norms, which a compiled backward computes within kernels that read their
    operands anyway, so that the fewest bytes are kept; as "model" where the model checkpoints activations itself."""
    raise AssertionError("all values are chosen together")


@AC_POLICIES.register("offload")
def layers_on_host(value: ForwardValue) -> bool | str:
    """Recompute nothing; offload what repeated layers keep, except for small values, whose copies cost more than they
    free."""
    return HOST if value.layer and value.bytes >= WORTH_COPYING else False


@AC_POLICIES.register(AUTO)
def under_a_limit(value: ForwardValue) -> bool:
    """Least time under ``memory_limit``, as `autopar.compile.ac_solver` decides."""
    raise AssertionError("the solver decides for all values together")


# --- what was decided ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayerCheckpoint:
    """What the backward of one layer recomputes. part: index of the pipeline stage. layer: path of its module, or of
    the modules between two layers. again: recomputed values, by their names in the graphs. saved: bytes that F keeps
    for B on the device. seconds: time that B spends recomputing and waiting for copies. host: offloaded values;
    hosted: their bytes."""

    part: int
    layer: str
    again: tuple[str, ...]
    saved: int
    seconds: float
    reason: str = ""
    host: tuple[str, ...] = ()
    hosted: int = 0


def checkpoint_lines(layers: Iterable[LayerCheckpoint]) -> list[str]:
    """As text, with one line for all layers that recompute and keep the same."""
    alike: dict[tuple[int, int, int, str], list[str]] = {}
    for found in layers:
        alike.setdefault((len(found.again), found.saved, found.hosted, found.reason), []).append(found.layer)
    return [
        f"  checkpoint {', '.join(names):<49} recomputes {again} values, keeps {saved} bytes"
        + (f", offloads {hosted} more" if hosted else "")
        + f"; {reason}"
        for (again, saved, hosted, reason), names in alike.items()
    ]
