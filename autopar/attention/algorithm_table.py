"""The table of attention algorithms; `autopar.passes.attention` fills it. Loads no torch."""

from __future__ import annotations

from autopar.attention.algorithm import AttentionAlgorithm
from autopar.registry import Registry

ALGORITHMS: Registry[AttentionAlgorithm] = Registry("attention")
