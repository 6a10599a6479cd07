"""The state of optimizers by parameter name: collecting it for a save, and restoring it into another optimizer.

States are created from the description in the checkpoint. No optimizer step is made to create them, which would count
as a step and decay weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from autopar.adapters.dtensor import local_of
from autopar.runtime.checkpoint.json_tree import decoded, encoded, names_with_values
from autopar.runtime.optim.cpu_offload import OffloadedStates
from autopar.runtime.optim.step_trials import steps_whole
from autopar.runtime.params.dtensor_layout import is_apart, laid_out
from autopar.runtime.params.parameters import is_alike
from autopar.runtime.params.sharded_tensor import ShardedTensor

OWN = {"foreach", "fused", "capturable", "differentiable"}  # options that change how an optimizer computes, not what
Put = Callable[[str, Tensor, str, bool], Any]  # (key, tensor, name of its parameter, whether laid out like it) -> note


def class_of(optimizer: Optimizer) -> str:
    """The name of its class."""
    return type(optimizer).__name__


def names_by_group(optimizer: Optimizer, own: Mapping[str, nn.Parameter]) -> list[list[str]]:
    """Original names of the parameters of each group. Raises ValueError for a parameter that is not in the model."""
    names = {id(p): name for name, p in own.items()}
    found = []
    for i, group in enumerate(optimizer.param_groups):
        foreign = next((p for p in group["params"] if id(p) not in names), None)
        if foreign is not None:
            raise ValueError(
                f"save: group {i} of {class_of(optimizer)} has a parameter of shape {tuple(foreign.shape)} that is not "
                "in the model; create the optimizer from model.parameters(), and another one for other parameters"
            )
        found.append([names[id(p)] for p in group["params"]])
    return found


def options_of(optimizer: Optimizer, put: Callable[[str, Tensor], Any], at: str) -> list[Any]:
    """The options of each group as a tree: learning rate, weight decay, options that a scheduler adds."""
    return [
        encoded({k: v for k, v in group.items() if k != "params"}, put, f"{at}.group.{i}")
        for i, group in enumerate(optimizer.param_groups)
    ]


def states_of(optimizer: Optimizer, own: Mapping[str, nn.Parameter], put: Put, at: str) -> dict[str, Any]:
    """Name of each parameter that has a state -> its state as a tree. Raises ValueError if it cannot be saved."""
    whole, found = steps_whole(optimizer), {}
    for name, p in own.items():
        if state := optimizer.state.get(p):

            def note(key: str, x: Tensor, name: str = name, p: nn.Parameter = p) -> Any:
                kind, laid = _layout(x, p, whole, key)
                return {"kind": kind, "note": put(key, laid, name, kind in ("piece", "local"))}

            found[name] = encoded(state, note, f"{at}.state.{name}")
    return found


def _layout(x: Tensor, p: nn.Parameter, whole: bool, key: str) -> tuple[str, Tensor]:
    """The layout of a state: sharded like its parameter ("piece"; "local" if the optimizer holds the plain local
    tensor), or replicated on all ranks that have the parameter ("plain"; "mesh" as a DTensor)."""
    if isinstance(x, DTensor):
        if is_alike(x, p):
            return "piece", x
        if not is_apart(x):
            return "mesh", local_of(x)
        raise ValueError(
            f"save: {key} has other placements than its parameter, which no other mesh could read; keep states "
            "sharded like the parameter (torch.zeros_like(p)) or replicated"
        )
    if not whole and isinstance(p, DTensor) and x.dim() > 0 and x.shape == local_of(p).shape:
        return "local", laid_out(p, x)
    return "plain", x


class Restored:
    """The states of one optimizer, created from the description in a checkpoint; then filled, then put in place.

    ``where``: own name -> the name in the checkpoint. ``dtypes``: those of parameters in the checkpoint. Raises
    ValueError, and changes nothing, for an optimizer of another class, or whose groups have other parameters.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        told: Mapping[str, Any],
        own: Mapping[str, nn.Parameter],
        where: Mapping[str, str],
        saved: Any,
        device: torch.device,
    ) -> None:
        self._optimizer, self._told, self._saved, self._device = optimizer, told, saved, device
        self.targets: list[tuple[str, Tensor]] = []
        self._hosts = OffloadedStates.of(optimizer, [p for p in own.values() if isinstance(p, DTensor)])
        self._check(names_by_group(optimizer, own), own, where)
        groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        self._states = {}
        for name, p in own.items():
            tree = told["states"].get(where[name])
            if tree is not None and id(p) in groups:
                group, dtype = groups[id(p)], saved.dtypes[f"model.{where[name]}"]
                self._states[name] = p, names_with_values(decoded(tree, self._maker(p, group, dtype, where[name])))

    def _check(self, names: Sequence[Sequence[str]], own: Iterable[str], where: Mapping[str, str]) -> None:
        kind, told = class_of(self._optimizer), self._told
        if told["kind"] != kind:
            raise ValueError(
                f"load: the checkpoint has the state of {told['kind']}, found {kind}; create the same optimizer, or "
                "load without one"
            )
        groups = told["names"]
        if len(groups) != len(names):
            raise ValueError(
                f"load: {kind} had {len(groups)} parameter groups, found {len(names)}; use the same groups"
            )
        place = {name: i for i, group in enumerate(groups) for name in group}
        for i, group in enumerate(names):
            for name in group:
                if (was := place.get(where[name])) != i:
                    what = "in none" if was is None else f"in group {was}"
                    raise ValueError(f"load: {name} is in group {i} of {kind}, was {what}; use the same groups")
        here = {where[name] for group in names for name in group}
        left_out = [name for name in own if where[name] in place and where[name] not in here]
        if left_out:
            raise ValueError(f"load: {kind} had {left_out[0]} in a group, found it in none; use the same groups")

    def _maker(
        self, p: nn.Parameter, group: Mapping[str, Any], dtype: torch.dtype, name: str
    ) -> Callable[[Any], Tensor]:
        """Returns a function that creates a tensor of a parameter's state, to be filled."""

        def make(told: Any) -> Tensor:
            kind, key = told["kind"], told["note"]
            if f".state.{name}." not in key:
                raise ValueError(f"the state of {name} is {key}")
            of_saved = self._saved.dtypes[key]
            chosen = p.dtype if of_saved == dtype else of_saved
            if kind in ("piece", "local"):
                if self._saved.shapes[key] != tuple(p.shape):
                    raise ValueError(f"load: {key} has shape {self._saved.shapes[key]}, needs {tuple(p.shape)}")
                if self._hosts is not None and p.dim():
                    laid = self._hosts.empty_like(p, chosen)
                    local = local_of(laid) if isinstance(laid, DTensor) else laid
                else:
                    local = torch.empty_like(local_of(p) if isinstance(p, DTensor) else p, dtype=chosen).detach()
                    laid = laid_out(p, local) if isinstance(p, DTensor) else local
                self.targets.append((key, laid))
                return laid if kind == "piece" else local
            is_step = key.endswith(".step") and not (group.get("capturable") or group.get("fused"))
            made = torch.empty(self._saved.shapes[key], dtype=of_saved, device="cpu" if is_step else self._device)
            self.targets.append((key, made))
            if kind == "mesh" and isinstance(p, DTensor):
                return ShardedTensor.make(made, p.device_mesh, (), made.shape)
            return made

        return make

    def read_options(self) -> None:
        """Read the options of the groups, including tensors. Raises ValueError for options of other groups."""
        self._options = [names_with_values(decoded(tree, self._saved.tensor)) for tree in self._told["options"]]
        groups = self._optimizer.param_groups
        for group, options in zip(groups, self._options, strict=True):
            for name, value in options.items():
                _check_option(name, group.get(name), value)

    @torch.no_grad()
    def put(self) -> None:
        """Replace the states of the optimizer, and the options of its groups."""
        optimizer = self._optimizer
        for group in optimizer.param_groups:
            for p in group["params"]:
                optimizer.state.pop(p, None)
        for p, state in self._states.values():
            optimizer.state[p] = state
        for group, options in zip(optimizer.param_groups, self._options, strict=True):
            for name, value in options.items():
                if name in OWN and name in group:
                    continue
                now = group.get(name)
                if isinstance(now, Tensor):
                    now.copy_(torch.as_tensor(value))
                else:
                    group[name] = value


def _check_option(name: str, now: Any, value: Any) -> None:
    """Raises ValueError for a value that cannot replace an option."""
    if name == "params":
        raise ValueError("options of a group must not contain parameters")
    is_number = isinstance(now, (int, float)) and not isinstance(now, bool)
    if isinstance(now, Tensor) or is_number:
        given = value if isinstance(value, Tensor) else torch.as_tensor(value)
        if given.numel() != 1 if is_number else given.shape != now.shape:
            raise ValueError(f"the option {name} has shape {tuple(given.shape)}")
