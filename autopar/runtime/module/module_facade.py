"""The module interface of a ParallelModule: it looks like the user's model to torch and to the model's library.

Its submodules, attributes and methods are those of the model, with this rank's shards as parameters. Methods of a
library's models that need unsharded weights (resizing the vocabulary) raise an error that says what to do instead;
those that generate are served on the mesh.
"""

from __future__ import annotations

import functools
import math
from typing import Any, Self

import torch
from torch import Tensor, nn

from autopar.ir.signature import ParameterSpec
from autopar.ir.traffic import Ledger
from autopar.runtime.health.slow_ranks import Health
from autopar.runtime.module.module_repr import module_text
from autopar.runtime.module.state_dict import Stateful
from autopar.steps.graphs import Compiled

_IN_ONE_PROCESS = "call save_pretrained(folder) and load the folder with from_pretrained in one process"
# methods of a library's models that need unsharded weights -> why, and what to do instead
_INSTEAD = {
    "resize_token_embeddings": "needs unsharded parameters; call it on the model before parallelize",
    "push_to_hub": "would upload shards; call save_pretrained(folder) and upload the folder",
    "merge_and_unload": f"needs unsharded weights; {_IN_ONE_PROCESS}",
    "merge_adapter": f"needs unsharded weights; {_IN_ONE_PROCESS}",
}
_GENERATING = ("generate", "generate_batch")  # methods of a library's models that are served instead
# attributes that the parallel model shares with the outermost module: its state, and hooks on it
SHARED = (
    "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_state_dict_hooks", "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
)  # fmt: skip
# what DistributedDataParallel reads first from a module
_WRAPPED = "_ddp_params_and_buffers_to_ignore"


def _refuse(name: str, *_: Any, **__: Any) -> Any:
    raise ValueError(f"parallelize: {name} of a parallel model {_INSTEAD[name]}")


def outermost(model: ModuleFacade) -> nn.Module:
    """The user's outermost module on the mesh, which the parallel model stands for."""
    root: nn.Module = model._tree.root
    return root


class ModuleFacade(Stateful):
    """The user's model, as an nn.Module."""

    _sizes: tuple[int, int]  # how many entries the object has, and its class

    @property
    def mesh(self) -> Any:
        """The torch DeviceMesh."""
        return self._groups.device_mesh

    @property
    def parameter_specs(self) -> tuple[ParameterSpec, ...]:
        return self._tree.specs

    def __repr__(self) -> str:
        """The user's modules, and how their parameters lie on the mesh."""
        specs, here = self.parameter_specs, self._tree.here
        return module_text(self._tree.root, specs, self._groups.mesh, here)

    def compiled(self) -> list[Compiled]:
        """Everything compiled so far, oldest first."""
        return [e.compiled for e in self._cache.runners]

    @property
    def device(self) -> torch.device:
        """The device of this rank's shards."""
        return self._groups.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the first floating-point parameter."""
        specs = self.parameter_specs
        return next((s.dtype for s in specs if s.dtype.is_floating_point), torch.get_default_dtype())

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """Number of parameters of the whole model, the same on every rank; a tied one counts once."""
        own = self._tree.own
        tables = {f"{path}.weight" for path, m in self._tree.root.named_modules() if isinstance(m, nn.Embedding)}
        return sum(
            math.prod(s.shape)
            for s in self.parameter_specs
            if (own.get(s.name, s).requires_grad or not only_trainable)
            and not (exclude_embeddings and tables & {s.name, *s.aliases})
        )

    def traffic(self) -> Ledger:
        """Calls and bytes sent by this rank so far, by (axis, kind)."""
        return self._cache.traffic()

    def expert_load(self, reset: bool = False) -> dict[str, Tensor]:
        """Per layer, how many tokens chose each expert in training steps since the start or the last ``reset``: [E]
        int64 on the CPU, summed over all ranks. Collective. Raises ValueError for ``backend="cudagraphs"``."""
        if self._cache.backend == "cudagraphs":
            raise ValueError(
                "expert_load: counts tokens while a step runs, found backend='cudagraphs', which replays steps; use "
                "backend='eager'"
            )
        found = self._cache.load.summed()
        if reset:
            self._cache.load.clear()
        return found

    def health(self) -> Health:
        """How every rank has spent the last minute: computing, waiting for others by axis, outside of steps; and which
        ranks are slow (`Health.slow`). Ranks publish it every 5 seconds: not collective. Raises ValueError for a
        backend whose code waits where it is not seen, which is any but "eager"."""
        if self._cache.backend != "eager":
            raise ValueError(
                f"health: waiting is seen between operators, found backend={self._cache.backend!r}, which runs them in "
                "one; use backend='eager'"
            )
        return self._cache.health.read()

    def peak_memory(self) -> dict[int, int]:
        """Most bytes that each rank has allocated on its GPU, or that its process has held on a CPU, since the start.
        Ranks publish it every 5 seconds: not collective."""
        return {one.rank: one.peak_memory for one in self._cache.health.read().ranks}

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            tree = self.__dict__.get("_tree")
            if tree is not None and name == _WRAPPED:
                raise ValueError(
                    "parallelize: already sums gradients over dp, found DistributedDataParallel around the parallel "
                    "model, which would sum them twice; call train_step of the parallel model directly"
                ) from None
            if tree is None or name.startswith("__"):
                raise
            if hasattr(tree.root, name) and hasattr(tree.root, "save_pretrained"):
                if name in _INSTEAD:
                    return functools.partial(_refuse, name)
                if name in _GENERATING:
                    return getattr(self.__dict__["_generation"], name)
            return getattr(tree.root, name)  # config, main_input_name, methods of the model, ...

    def __setattr__(self, name: str, value: Any) -> None:
        tree = self.__dict__.get("_tree")
        if tree is None or name in self.__dict__ or isinstance(getattr(type(self), name, None), property):
            super().__setattr__(name, value)
        elif hasattr(type(self), name):
            raise ValueError(
                f"parallelize: {name} of the parallel model belongs to autopar and cannot be set; "
                "set it on the model before parallelize"
            )
        else:
            setattr(tree.root, name, value)

    def _take_entries(self) -> None:
        """Move entries that user code has put into ``vars(model)`` to the outermost module. Raises ValueError for
        attributes that were set on the class."""
        entries, kind = self.__dict__, type(self)
        if len(entries) != self._sizes[0]:
            for name in [name for name in entries if not name.startswith("_")]:
                self._tree.root.__dict__[name] = entries.pop(name)
            self._sizes = len(entries), self._sizes[1]
        if len(vars(kind)) != self._sizes[1]:
            raise ValueError(
                f"parallelize: {list(vars(kind))[-1]} was set on the class of the parallel model; set it on "
                f"{type(self._tree.root).__qualname__}, the class of the model"
            )

    def __delattr__(self, name: str) -> None:
        delattr(self._tree.root, name)

    @property
    def training(self) -> bool:
        """The mode of the model itself; each submodule has its own."""
        tree = self.__dict__.get("_tree")
        return tree is None or tree.root.training

    @training.setter
    def training(self, mode: bool) -> None:
        tree = self.__dict__.get("_tree")
        if tree is not None:
            tree.root.training = mode

    def train(self, mode: bool = True) -> Self:
        """Calls the model's own `train`, which may keep some modules in eval mode."""
        self._tree.root.train(mode)
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        self._tree.root._apply(fn, recurse)
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raises ValueError: `copy.copy` and `pickle` call this."""
        raise ValueError(
            "parallelize: a parallel model cannot be pickled, nor copied by copy.copy, since it is bound to process "
            "groups; use copy.deepcopy(model) for another one on this mesh, and full_state_dict() or "
            "autopar.save for files"
        )

    def register_full_backward_hook(self, *args: Any, **kwargs: Any) -> Any:
        """Raises ValueError: a step has its own backward."""
        raise ValueError(
            "hooks: a parallel model has its own backward, which calls hooks of parameters only, found a full backward "
            "hook; register hooks on parameters"
        )

    register_full_backward_pre_hook = register_backward_hook = register_full_backward_hook
