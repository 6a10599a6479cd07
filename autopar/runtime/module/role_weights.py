"""(in the making)"""
from __future__ import annotations
from typing import Any
from torch import Tensor, nn
from autopar.adapters.copying.fake import skeleton_of
from autopar.runtime.params.parameters import local_piece
class RoleWeights:
    lift_to_float64 = False
    def __init__(self, roles, groups, model, folder, precision):
        self.groups, self._model = groups, model
        self._values: dict[str, Tensor] = {}
    def structure(self): return skeleton_of(self._model).eval().requires_grad_(False)
    @property
    def buffers(self): return {n: b for n, b in self._model.named_buffers(remove_duplicate=False)}
    def hold(self, specs):
        whole = dict(self._model.named_parameters(remove_duplicate=False))
        self._values = {s.name: local_piece(whole[s.name], s, self.groups) for s in specs} | {n: b.clone() for n, b in self.buffers.items()}
    def values(self): return self._values
    def versions(self): return [len(self._values)]
