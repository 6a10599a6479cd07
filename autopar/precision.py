"""In which dtypes a model is stored, computed, and its gradients are summed: policies by name. Loads no torch.

bf16        float32 parameters (what the optimizer steps), cast to bfloat16 where they are used
bf16_pure   bfloat16 parameters; gradients are still summed in float32
fp16        as bf16, in float16: needs a scaled loss (`autopar.GradScaler`)
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from autopar.spelling import did_you_mean
from autopar.values import a_text, dtype_name, refuse, texts

FLOATS = ("bfloat16", "float16", "float32", "float64")


@dataclass(frozen=True, repr=False)
class Precision:
    """Dtypes of parameters and of sums of gradients. All are names; an empty one leaves things as the model has them.

    compute: of parameters where they are used, and of floating inputs. A cut parameter is cast before it is gathered.
    stored: of parameters as they are held, stepped and saved. reduce: of gradients as they are summed over ranks, on
    every axis; over microbatches they are summed in float32 or wider. keep: modules that compute in float32 (or in
    ``stored``, if wider), by path, by the end of their path, or by class; what they take and return is cast.
    keep_inputs: inputs that are not cast.

    Buffers are never cast, nor are parameters of batch norms, nor what a model of transformers asks to be kept in
    float32. Raises ValueError for dtypes that are none.
    """

    compute: str = ""
    stored: str = ""
    reduce: str = ""
    keep: tuple[str, ...] = ()
    keep_inputs: tuple[str, ...] = ("labels",)

    def __post_init__(self) -> None:
        for name in ("compute", "stored", "reduce"):
            value = getattr(self, name)
            if value not in ("", *FLOATS):
                hint = did_you_mean(dtype_name(str(value)), FLOATS)
                raise refuse(f"precision.{name}", f"one of {', '.join(map(repr, FLOATS))}", value, hint)
        for name in ("keep", "keep_inputs"):
            object.__setattr__(self, name, texts(f"precision.{name}", getattr(self, name)))
        if not self.compute and (self.stored or self.reduce or self.keep):
            raise ValueError(
                f"precision: says nothing without a dtype to compute in, found {self}; give compute='bfloat16'"
            )
        if self.stored == "float16":
            raise ValueError(
                "precision: parameters stored in float16 lose the updates of an optimizer, found stored='float16'; "
                "store them in float32"
            )

    def __repr__(self) -> str:
        """The name of a policy that has one."""
        given = (f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if getattr(self, f.name) != f.default)
        name = next((name for name, policy in PRECISIONS.items() if policy == self), None)
        return repr(name) if name is not None else f"Precision({', '.join(given)})"


PRECISIONS = {
    "none": Precision(),
    "bf16": Precision("bfloat16", "float32", "float32"),
    "bf16_pure": Precision("bfloat16", "bfloat16", "float32"),
    "fp16": Precision("float16", "float32", "float32"),
}


def a_precision(name: str, value: Any) -> Precision:
    """A policy, or the one of a name. Raises ValueError."""
    if isinstance(value, Precision):
        return value
    if a_text(name, value) not in PRECISIONS:
        hint = did_you_mean(dtype_name(value), PRECISIONS, {"bfloat16": "bf16", "float16": "fp16"})
        raise refuse(name, f"{', '.join(map(repr, PRECISIONS))}, or an autopar.Precision", value, hint)
    return PRECISIONS[value]
