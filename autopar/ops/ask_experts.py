"""`autopar::ask_experts`: what a layer's experts make of tokens, where they are held by other ranks, the experts' role.

`autopar.runtime.exec.lowering` starts it where its node stands, and waits for the answer right before its first user
(`autopar.ir.waits`). It has no backward.
"""

from __future__ import annotations

from torch import Tensor

from autopar.ops.declare import operator


@operator(
    "(Tensor x, Tensor? expert, Tensor? weights, int layer) -> Tensor",
    lambda x, expert, weights, layer: x.new_empty(x.shape),
)
def ask_experts(x: Tensor, expert: Tensor | None, weights: Tensor | None, layer: int) -> Tensor:
    """x [T, H], expert [T, K] int, weights [T, K] -> [T, H]: each token's weighted sum over its experts.

    expert            numbers that are not those of experts choose none (some models have experts that do nothing)
    expert, weights   None: every token goes to every node of the experts' role, whose results are added
    layer             which of the layers that were cut, counted from 0
    """
    raise ValueError(
        f"ask_experts: layer {layer} is computed by the ranks that hold experts, found a call outside of a server; run "
        "it by autopar.serve(model, roles)"
    )
