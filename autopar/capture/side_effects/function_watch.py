"""Watches every torch function that a traced forward calls, for effects that a graph would silently drop.

a real tensor with a gradient, or one of the model's own   refused: reached through a global variable, a list or a
                                                           class instead of the traced copy; it would get no gradient
h.register_hook(f), h.retain_grad(), x.backward()          refused: they act on another backward than that of a step
w.data                                                     read as w.detach(): the same value, in the graph
w.data = x                                                 a write to w, see `replaced_data`
if t: raise ...                                            resolved, see `data_dependent_branches`
lengths.tolist(), x[mask]                                  folded if they depend on no input, see `known_values`
loss(y[mask], x[mask])                                     keeps all rows and masks them, see `mask_indexing`
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from autopar.adapters.copying.fake import MARKS, Owned
from autopar.adapters.copying.fake_deepcopy import path_of
from autopar.adapters.grad_fn_paths import UNKNOWN, GradFnPaths, start_of
from autopar.adapters.grad_mode import seen_inference
from autopar.adapters.tensors.tags import ReplacedTensors
from autopar.capture.branches.buffer_values import BufferValues
from autopar.capture.branches.data_dependent_branches import answered
from autopar.capture.branches.known_values import REAL, KnownValues, is_real
from autopar.capture.branches.mask_indexing import MaskIndexing
from autopar.capture.branches.state_numbers import IntCalls, StateNumbers
from autopar.capture.reads.code_owners import TORCH, is_ours, is_torchs
from autopar.capture.side_effects.external_calls import ExternalCalls
from autopar.capture.side_effects.replaced_data import ReplacedData

# Files whose frames are between a line and the torch function that it calls.
_DELEGATES = {
    str(Path(TORCH, name))
    for name in ("_tensor.py", "overrides.py", "autograd/__init__.py", "autograd/graph.py", "nn/utils/rnn.py")
} | {__file__}


class Refused(ValueError):
    """A forward cannot be captured. ``place``: the line; if empty, the line in which this was raised."""

    place = ""


class FunctionWatch(TorchFunctionMode):
    """Context manager that watches the forward of ``replica``, a structure copy of a model that owns ``owned``.

    ``instead`` maps functions to their replacements; ``noted`` is called with all results, ``before_call`` with
    each call. Raises Refused in the line
    at fault; ``refused`` keeps the first error, in case the forward catches it. ``running``: whether the forward is
    running (the export calls functions before and after it). ``said``: warnings. ``known``: constant values.
    ``gradients``: for each output leaf, the parameters that its backward reaches, or None if unknown.
    ``asks_grad_mode``: whether the forward has read the grad mode. ``outside``: its external calls. ``int_calls``: gets
    the code that calls ``int`` on a buffer.
    """

    def __init__(
        self,
        replica: nn.Module,
        owned: Owned,
        instead: Mapping[Callable[..., Any], Callable[..., Any]],
        noted: Callable[[Any], None] = lambda _: None,
        before_call: Callable[..., None] = lambda *_: None,
        int_calls: IntCalls | None = None,
        buffers: BufferValues | None = None,
    ) -> None:
        super().__init__()
        self._instead, self._noted, self._before_call = instead, noted, before_call
        self._replica, self._owned = replica, owned
        self._places, self._tags = dict(_places(replica)), ReplacedTensors(replica)
        self._trained: dict[str, bool] = {}  # parameter -> requires_grad before the forward
        self.outside = ExternalCalls(self.refuse)
        self._buffers = buffers or BufferValues(replica)
        self.known = KnownValues(self._buffers)
        self.rows = MaskIndexing(self.refuse)
        self.replaced = ReplacedData(replica, self.refuse)
        self.numbers, self._int_calls = StateNumbers(replica, self.refuse), int_calls
        self.refused: Refused | None = None
        self.said: dict[str, None] = {}
        self.running = False
        self.asks_grad_mode = False
        self.gradients: list[frozenset[str] | None] = []
        number = id(self)  # hooks must not refer to self: it would count as state of the module
        _WATCHES[number] = self
        replica.register_forward_pre_hook(lambda *_: _WATCHES[number]._begins(), prepend=True)
        replica.register_forward_hook(lambda *_: _WATCHES[number]._ends(), always_call=True)
        replica.register_forward_hook(lambda module, given, made: _WATCHES[number]._finished(made))

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self.running:
            return func(*args, **kwargs)
        self.outside.rest()
        try:
            return self._called(func, args, kwargs)
        finally:
            self.outside.look()

    def __exit__(self, *error: Any) -> None:
        self._ends()  # the hook is not called for every exception
        super().__exit__(*error)

    def _called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        reads = getattr(func, "__name__", "") == "__get__"  # an attribute, such as its shape
        if not reads and any(isinstance(x, DTensor) for x in (*args, *kwargs.values())):
            self.refuse(_ON_A_MESH)
        args, kwargs = tuple(self._seen(x) for x in args), {name: self._seen(x) for name, x in kwargs.items()}
        if func in _REFUSED and (frame := caller()) is not None and is_outside(frame):
            self.refuse(_REFUSED[func])
        if func in _TELLS_GRAD_MODE and (frame := caller()) is not None and is_outside(frame):
            self.asked_grad_mode()
        if func is Tensor.is_inference and (frame := caller()) is not None and is_outside(frame):
            self.asked_inference()
        if func == _SET_DATA and type(args[0]) not in REAL:
            return self.replaced.replace(*args)
        self.replaced.check(func, (args, kwargs))
        if func == _DATA and type(args[0]) not in REAL:
            made = args[0].detach()
            self.replaced.note(args, made)
            return made
        if known := self.known.answer(func, args, kwargs):
            return known[0]
        if func is Tensor.__int__ and self._int_calls is not None and self.numbers.of(args[0]) is not None:
            self._int_calls.add(caller())
        if number := self.numbers.called(func, args):
            return number[0]
        args = self.numbers.with_indices(func, args)
        is_item = func is Tensor.item and args[0].dtype == torch.bool
        truth = (func in _TRUTH or is_item) and not any(type(x) in REAL for x in args)
        if truth and (frame := caller()) is not None:
            if (some := self.rows.truth(func, args[0], frame)) is not None:
                return some
            answer = answered(frame, is_item)
            if answer is not None:
                self.said |= {answer[1]: None} if answer[1] else {}
                return answer[0]
        if (turns := self.rows.turns(func, args, kwargs, caller(), self._known_number)) is not None:
            return turns
        func, args, kwargs = self.known.with_places(func, args, kwargs, numbers=self.rows.in_turn)
        if rows := self.rows.called(func, args, kwargs):
            return rows[0]
        args, kwargs = self.rows.handed_on(func, (args, kwargs))
        self._before_call(func, args, kwargs)
        written = self.known.before_write(func, args, kwargs)
        made = self._instead.get(func, func)(*args, **kwargs)
        self.replaced.note((args, kwargs), made)
        if not any(made is x for x in args):
            self._noted(made)
        self.known.note(func, args, kwargs, made, written)
        self.rows.note(func, args, kwargs, made)
        return made

    def _known_number(self, value: Any) -> Tensor:
        made: Tensor = self._called(torch.tensor, (value,), {})
        return made

    def _begins(self) -> None:
        self._tags.tag()
        self._trained = {name: x.requires_grad for name, x in self._replica.named_parameters()}
        self._buffers.begin(self._replica)
        self.running = True
        self.outside.begin()

    def _ends(self) -> None:
        if self.running:
            self.outside.end()
        self.running = False

    def _finished(self, made: Any) -> Any:
        """After the forward: check its result, and leave out what has no static shape beside a loss or other values."""
        self.rows.check_conditional("the result of the forward", made)
        if self.rows.are_in(made):
            others = [x for x in pytree.tree_leaves(made) if isinstance(x, Tensor) and not self.rows.are_in(x)]
            named = isinstance(made, Mapping) and others
            if not named and not any(not x.dim() and x.requires_grad for x in others):
                self.refuse(
                    "the forward returns rows selected by a mask, x[mask], whose number depends on the data; return "
                    "all rows, and the mask"
                )
            made = pytree.tree_map_with_path(self._static, made)
        self.gradients = self._gradients(made)
        leak = self.rows.leak()
        if leak is not None:
            self.refuse(
                f"{leak.name} uses rows selected by a mask, x[mask], in code that calls no torch function, where "
                "capture cannot mask them; keep all rows and multiply by the mask"
            )
        return made

    def _static(self, path: pytree.KeyPath, x: Any) -> Any:
        """A part of the result, or None for rows that a mask selects."""
        if not self.rows.are_in(x):
            return x
        self.said |= {
            f"capture: output{pytree.keystr(path)} holds rows selected by a mask, x[mask], whose number depends on the "
            "data; it is None in compiled steps": None
        }
        return None

    def _gradients(self, made: Any) -> list[frozenset[str] | None]:
        """The value of ``gradients``."""
        named = dict(self._replica.named_parameters())
        new = [name for name in named if name not in self._trained]
        if new:
            self._refuse_later(
                f"the forward creates parameter {new[0]}, which would not be trained; create it in __init__, or call "
                "the model once before parallelize"
            )
        switched = [name for name, x in named.items() if self._trained.get(name, x.requires_grad) != x.requires_grad]
        if switched:
            self._refuse_later(
                f"the forward changes requires_grad of {switched[0]}, which is fixed during a step; change it "
                "between steps"
            )
        trained = [(name, x) for name, x in named.items() if x.requires_grad]
        paths = GradFnPaths({start_of(x): 2 << i for i, (_, x) in enumerate(trained)})
        reached = [paths.reached(x) if isinstance(x, Tensor) else 0 for x in pytree.tree_leaves(made)]
        if found := paths.out_of_sight():
            self._refuse_later(found)
        names = [name for name, _ in trained]
        return [
            None if bits & UNKNOWN else frozenset(name for i, name in enumerate(names) if bits & 2 << i)
            for bits in reached
        ]

    def _refuse_later(self, text: str) -> None:
        """Record an error that belongs to no line of the forward."""
        self.refused = self.refused or Refused(text)

    def _seen(self, x: Any) -> Any:
        """An argument, with tensors that closures hold replaced by those that the export put into the module."""
        if type(x) in (list, tuple):
            return type(x)(self._seen(y) for y in x)
        if not isinstance(x, Tensor):
            return x
        if id(x) in self._places:
            entries, name = self._places[id(x)]
            return entries[name]
        if is_real(x):
            self._look_at(x)
        return x

    def _look_at(self, x: Tensor) -> None:
        """Check a real tensor, which becomes a constant of the graph."""
        name = self._owned.name_of(x)
        if name is not None:
            self.refuse(
                f"the forward uses {name} of the model through a global variable or a class, where it would get no "
                "gradient; use it through self, a closure, or an argument of a hook"
            )
        mark = MARKS.get(x)
        if mark is None and not (x.requires_grad and torch.is_grad_enabled()):
            return
        path = path_of(self._replica, x)
        kept = f"the tensor kept as {path}" if path else f"a tensor {tuple(x.shape)} from outside of the model"
        if mark is not None:
            self.refuse(f"the forward uses {kept}, which {mark} and would be a constant; compute it in the forward")
        self.refuse(
            f"the forward uses {kept}, which requires grad but is not a parameter and would get no gradient; register "
            "it with a module (an nn.Parameter as attribute, nn.ParameterList), or pass it in detached"
        )

    def asked_grad_mode(self) -> None:
        """Called when the forward reads the grad mode."""
        self.asks_grad_mode = True

    def asked_inference(self) -> None:
        """Called when the forward reads ``is_inference`` of a tensor."""
        self.asked_grad_mode()
        if seen_inference():
            self.refuse(
                "x.is_inference() cannot be captured under inference_mode; use torch.is_inference_mode_enabled(), or "
                "call the model under torch.no_grad()"
            )

    def refuse(self, text: str, place: str = "") -> None:
        """Raises Refused, for the current line or for ``place``."""
        if self.refused is None:
            self.refused = Refused(text)
            self.refused.place = place
        raise self.refused


_WATCHES: weakref.WeakValueDictionary[int, FunctionWatch] = weakref.WeakValueDictionary()


def _places(replica: nn.Module) -> Iterator[tuple[int, tuple[dict[str, Any], str]]]:
    """(id of a tensor, (entries of its module, name))."""
    for module in replica.modules():
        for entries in (module._parameters, module._buffers):
            yield from ((id(tensor), (entries, name)) for name, tensor in entries.items() if tensor is not None)


def caller() -> FrameType | None:
    """The frame that called a torch function."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (
        frame.f_code.co_filename in _DELEGATES or "__torch_function__" in frame.f_code.co_name
    ):
        frame = frame.f_back
    return frame


def is_outside(frame: FrameType) -> bool:
    """Whether a frame is in neither torch nor autopar."""
    return _is_outside(frame.f_code.co_filename)


@functools.cache
def _is_outside(file: str) -> bool:
    return not (is_torchs(file) or is_ours(file))


_ATTRIBUTES: Any = Tensor  # whose attributes are descriptors
_DATA: Callable[..., Any] = _ATTRIBUTES.data.__get__
_SET_DATA: Callable[..., Any] = _ATTRIBUTES.data.__set__
_TELLS_GRAD_MODE = {_ATTRIBUTES.requires_grad.__get__, _ATTRIBUTES.grad_fn.__get__, _ATTRIBUTES.is_leaf.__get__}
_TRUTH = (Tensor.__bool__, torch.equal, Tensor.equal, torch.allclose, Tensor.allclose)
_ON_A_MESH = (
    "the forward uses a parameter of a parallel model through a global variable or a class, where it would get no "
    "gradient; use it through self, a closure, or an argument of a hook"
)
_GRADIENT = "a step has its own backward; use an autograd.Function, or hooks on the parameters of the result"
_REFUSED: dict[Any, str] = {
    Tensor.register_hook: f"a hook on the gradient of an intermediate value would not be called: {_GRADIENT}",
    Tensor.register_post_accumulate_grad_hook: f"a gradient hook in the forward would not be called: {_GRADIENT}",
    Tensor.retain_grad: f"the gradient of an intermediate value would not be kept: {_GRADIENT}",
    _ATTRIBUTES.grad.__get__: "the forward reads a gradient, which would be a constant; pass it in as an input",
    Tensor.backward: "a backward within the forward cannot be captured; return the loss",
    torch._VF._pack_padded_sequence: (
        "pack_padded_sequence makes data-dependent sizes from lengths; run the RNN on the padded sequences, and gather "
        "its outputs at the lengths, or multiply them by a mask"
    ),
    torch.autograd.backward: "a backward within the forward cannot be captured; return the loss",
}
