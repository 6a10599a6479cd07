"""Mixed precision: policies by name. This module does not import torch.

bf16        float32 parameters (what the optimizer steps), cast to bfloat16 where they are used
bf16_pure   bfloat16 parameters; gradients are still summed in float32
fp16        as bf16, in float16: needs a scaled loss (`autopar.GradScaler`)
fp8         as bf16, with the products of linear layers in float8: one scale per operand
fp8_delayed the same with scales of earlier steps
fp8_row     the same with one scale per row and per column
mxfp8       the same with one scale, a power of two, per 32 numbers
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from autopar.spelling import did_you_mean
from autopar.values import a_text, dtype_name, refuse, texts, whole_number, yes_or_no

FLOATS = ("bfloat16", "float16", "float32", "float64")
PRODUCTS = ("", "float8")
SCALINGS = ("tensor", "delayed", "row", "block")
AMAX = ("max", "most_recent")


@dataclass(frozen=True, repr=False)
class Precision:
    """Dtypes of parameters and gradients, by name. An empty name leaves the dtypes of the model.

    compute: dtype of parameters in use, and of floating inputs. A sharded parameter is cast before it is gathered.
    stored: dtype in which parameters are kept, stepped and saved. reduce: dtype in which gradients are reduced over
    ranks, on every axis; over microbatches they are accumulated in float32 or wider. keep: modules that compute in
    float32 (or in ``stored``, if wider), by path, by the end of their path, or by class; their inputs and outputs are
    cast. keep_inputs: inputs that are not cast.

    product: "float8" for the products of linear layers, forward and backward, whose operands are scaled and rounded;
    what they compute is in ``compute``. scaling: one scale per operand, "tensor", per row and column, "row", or per 32
    numbers of what is contracted, "block", from the operand itself; or one per operand from earlier steps, "delayed":
    by the greatest magnitude of ``history`` steps (``amax`` "max") or the last one ("most_recent"), times 2^``margin``.
    wide_weight_gradient: the gradients of weights are products in ``compute``. wide: modules whose products stay in
    ``compute``, named as in ``keep``, besides those that always do (docs/few_bits.md). gather: "float8" gathers in
    eight bits what is only gathered to be an operand of such products with one scale per operand: parameters under
    zero=3, activations under sequence parallelism.

    Buffers, parameters of batch norms, and what a transformers model keeps in float32 are never cast. Raises ValueError
    for an unknown dtype.
    """

    compute: str = ""
    stored: str = ""
    reduce: str = ""
    keep: tuple[str, ...] = ()
    keep_inputs: tuple[str, ...] = ("labels",)
    product: str = ""
    scaling: str = "tensor"
    wide_weight_gradient: bool = False
    wide: tuple[str, ...] = ()
    gather: str = ""
    history: int = 1024
    amax: str = "max"
    margin: int = 0

    def __post_init__(self) -> None:
        for name in ("compute", "stored", "reduce"):
            value = getattr(self, name)
            if value not in ("", *FLOATS):
                hint = did_you_mean(dtype_name(str(value)), FLOATS)
                raise refuse(f"precision.{name}", f"one of {', '.join(map(repr, FLOATS))}", value, hint)
        for name, known in (
            ("product", PRODUCTS),
            ("scaling", SCALINGS),
            ("gather", PRODUCTS),
            ("amax", AMAX),
        ):
            if getattr(self, name) not in known:
                raise refuse(f"precision.{name}", f"one of {', '.join(map(repr, known))}", getattr(self, name))
        whole_number("precision.history", self.history, 1)
        whole_number("precision.margin", self.margin, 0, 16)
        if self.scaling != "delayed" and (self.history, self.amax, self.margin) != (1024, "max", 0):
            raise ValueError(
                f"precision: history, amax and margin are those of delayed scales, found {self}; add scaling='delayed'"
            )
        yes_or_no("precision.wide_weight_gradient", self.wide_weight_gradient)
        for name in ("keep", "keep_inputs", "wide"):
            object.__setattr__(self, name, texts(f"precision.{name}", getattr(self, name)))
        if not self.compute and (self.stored or self.reduce or self.keep or self.product):
            raise ValueError(f"precision: needs a dtype to compute in, found {self}; add compute='bfloat16'")
        of_product = self.scaling != "tensor" or self.wide_weight_gradient or self.wide or self.gather
        if not self.product and of_product:
            raise ValueError(
                f"precision: scaling, wide_weight_gradient, wide and gather are those of a product, found {self}; add "
                "product='float8'"
            )
        if self.gather and self.scaling not in ("tensor", "delayed"):
            raise ValueError(
                f"precision: gather rounds shards by the scale of the whole, which needs one scale, found {self}; use "
                "scaling='tensor' or 'delayed', or leave gather out"
            )
        if self.product and self.compute == "float16":
            raise ValueError(
                "precision: products in float8 need a dtype with the range of float32 around them, found "
                "compute='float16'; use compute='bfloat16'"
            )
        if self.stored == "float16":
            raise ValueError(
                "precision: parameters stored in float16 lose small optimizer updates, found stored='float16'; "
                "use stored='float32'"
            )

    @property
    def scales_by_token(self) -> bool:
        """Whether no scale depends on other tokens than the one that it is of: microbatches, token slices and padding
        change nothing."""
        return not self.product or (self.scaling in ("row", "block") and self.wide_weight_gradient)

    def without_products(self) -> Precision:
        """The policy with all products in ``compute``."""
        scaling = {"scaling": "tensor", "history": 1024, "amax": "max", "margin": 0}
        return replace(self, product="", wide_weight_gradient=False, wide=(), gather="", **scaling)  # type: ignore[arg-type]

    @property
    def name(self) -> str:
        """Of a predefined policy; "" of others."""
        return next((name for name, policy in PRECISIONS.items() if policy == self), "")

    def __repr__(self) -> str:
        """The name of a predefined policy, else its fields."""
        given = (f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if getattr(self, f.name) != f.default)
        return repr(self.name) if self.name else f"Precision({', '.join(given)})"


PRECISIONS = {
    "none": Precision(),
    "bf16": Precision("bfloat16", "float32", "float32"),
    "bf16_pure": Precision("bfloat16", "bfloat16", "float32"),
    "fp16": Precision("float16", "float32", "float32"),
    "fp8": Precision("bfloat16", "float32", "float32", product="float8"),
    "fp8_delayed": Precision("bfloat16", "float32", "float32", product="float8", scaling="delayed"),
    "fp8_row": Precision("bfloat16", "float32", "float32", product="float8", scaling="row"),
    "mxfp8": Precision("bfloat16", "float32", "float32", product="float8", scaling="block"),
}


def a_precision(name: str, value: Any) -> Precision:
    """Check a policy, or look one up by name. Raises ValueError."""
    if isinstance(value, Precision):
        return value
    if a_text(name, value) not in PRECISIONS:
        hint = did_you_mean(dtype_name(value), PRECISIONS, {"bfloat16": "bf16", "float16": "fp16"})
        raise refuse(name, f"{', '.join(map(repr, PRECISIONS))}, or an autopar.Precision", value, hint)
    return PRECISIONS[value]
