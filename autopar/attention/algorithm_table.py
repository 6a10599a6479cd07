"""The table of attention algorithms; `autopar.passes.attention` fills it. Loads no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autopar.registry import Registry

if TYPE_CHECKING:
    from autopar.attention.algorithm import AttentionAlgorithm

ALGORITHMS: Registry[AttentionAlgorithm] = Registry("attention")
