"""Steps as CUDA graphs: a step is recorded once and then replayed with a single launch.

    steps 1, 2       run normally: kernels are compiled and loaded, groups connected
    step 3           is recorded, on static inputs, then replayed
    later steps      copy inputs into the static ones, launch once, copy results out

The host launches thousands of kernels per step, one by one; if a launch takes longer than the kernel, the GPU waits for
the host. A recorded step is one launch, including NCCL collectives.

A graph contains addresses. Parameters, buffers and constants are read in place, and the step is recorded again if one
has moved; the batch and the seeds are copied. Gradients, losses and outputs are copies, which no replay overwrites.
Other memory of recorded steps is kept between steps, in one pool for all steps of a process, since they do not run at
the same time.

A step that cannot be recorded runs normally, and a warning gives the reason: it reads a value on the host (`nonzero`,
experts in a loop), or has operators that CUDA cannot record.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx import GraphModule

from autopar.adapters.foreach import copy_all
from autopar.adapters.operators import OpOverload, name_of
from autopar.ir.traffic import Ledger, Traffic, ledger_between
from autopar.ops.traits import COPIES
from autopar.ops.value_checks import ValueNote, put_notes, take_notes
from autopar.runtime.fault.aborts import started
from autopar.runtime.fault.errors import CollectiveError


@dataclass
class Result:
    """Outputs of a step (flat, in signature order), gradients by placeholder name of the local graph, and the losses.

    In pipeline training the outputs contain only losses and new buffers; others are None.
    """

    outputs: list[Any]
    gradients: dict[str, Tensor]
    losses: list[Tensor] = field(default_factory=list)


def copied(result: Result) -> Result:
    """A copy with separate storages."""
    values = [*result.outputs, *result.gradients.values(), *result.losses]
    tensors = {i: x for i, x in enumerate(values) if isinstance(x, Tensor)}
    fresh: list[Any] = [torch.empty_like(tensors[i]) if i in tensors else x for i, x in enumerate(values)]
    copy_all([fresh[i] for i in tensors], list(tensors.values()))
    count = len(result.outputs)
    gradients = dict(zip(result.gradients, fresh[count:], strict=False))
    return Result(fresh[:count], gradients, fresh[count + len(gradients) :])


WARM_UP = 2  # steps that run normally
MOVES = 8  # times that a step is recorded again because tensors have moved

# Operators that read a value on the host, or whose output size depends on values.
UNRECORDABLE = {
    torch.Tag.data_dependent_output: "reads a value on the host",
    torch.Tag.dynamic_output_shape: "gives a result whose size depends on values",
    torch.Tag.cudagraph_unsafe: "says that CUDA graphs cannot hold it",
}

T = TypeVar("T")


class CudaGraph:
    """Wraps `torch.cuda.CUDAGraph`; tests replace it."""

    def __init__(self) -> None:
        self._graph = torch.cuda.CUDAGraph()

    def record(self, run: Callable[[], T]) -> T:
        """Record ``run`` and return its result, whose values are valid after `replay`. Raises errors of ``run``, and
        RuntimeError for calls that CUDA cannot record. Other threads may query events meanwhile, as torch's watchdog
        does."""
        with torch.cuda.graph(self._graph, pool=_pool(), capture_error_mode="thread_local"):
            return run()

    def replay(self) -> None:
        self._graph.replay()


@functools.cache
def _pool() -> Any:
    return torch.cuda.graph_pool_handle()


def why_not(graphs: Iterable[GraphModule], device: torch.device) -> str:
    """Why a step cannot be recorded, as far as its graphs show; "" if there is no reason."""
    if device.type != "cuda":
        return f"the device is {device.type}, which has no CUDA graphs"
    for node in (node for gm in graphs for node in gm.graph.nodes if isinstance(node.target, OpOverload)):
        if node.target in COPIES:
            return f"{name_of(node.target)} (node {node.name}) uses buffers in host memory that change"
        if words := next((words for tag, words in UNRECORDABLE.items() if tag in node.target.tags), None):
            return f"{name_of(node.target)} (node {node.name}) {words}"
    return ""


class RecordedStep:
    """``run(values)`` as a recorded function. reason: why it is not recorded, if it is not.

    fixed: names of the values that are read in place. given: names of those that are copied. traffic: returns what
    ``run`` has sent so far. world: whether other ranks take part; then each step that may be a replay ends with an
    all_reduce of one number, to which the timeout of the mesh applies: recorded collectives have no watchdog.
    """

    def __init__(
        self,
        run: Callable[[Mapping[str, Tensor]], Result],
        fixed: Sequence[str],
        given: Sequence[str],
        traffic: Callable[[], Ledger],
        *,
        reason: str = "",
        world: bool = False,
        make: Callable[[], CudaGraph] = CudaGraph,
    ) -> None:
        self._run, self._traffic_of_run, self._make, self._world = run, traffic, make, world
        self._fixed, self._given = fixed, given
        self._calls = self._records = self._replays = 0
        self._graph: CudaGraph | None = None
        self._places: list[int] = []
        self._inputs: list[Tensor] = []
        self._result = Result([], {})
        self._notes: list[ValueNote] = []
        self._sent: dict[tuple[str, str], Traffic] = {}  # per run
        self._token: list[Any] = []
        self.reason = ""
        self._give_up(reason)

    @property
    def traffic(self) -> Ledger:
        """What replays have sent so far, in addition to what ``run`` counts."""
        times = self._replays - self._records  # a recording was counted as if it had run
        return {key: Traffic(times * x.calls, times * x.bytes) for key, x in self._sent.items()}

    def __call__(self, values: Mapping[str, Tensor]) -> Result:
        """Run or replay a step. Raises CollectiveError as ``run`` does."""
        self._calls += 1
        if self._calls <= WARM_UP:
            return self._run(values)
        if not self.reason and not self._fits(values):
            self._record(values)
        result = self._run(values) if self.reason else self._replayed(values)
        self._ask_others()
        return result

    def _fits(self, values: Mapping[str, Tensor]) -> bool:
        return self._graph is not None and self._places == [values[name].data_ptr() for name in self._fixed]

    def _record(self, values: Mapping[str, Tensor]) -> None:
        if self._records > MOVES:
            self._give_up(f"parameters or buffers have moved {MOVES} times; write into them instead")
            return
        inputs = [values[name].clone() for name in self._given]
        own, before = dict(values) | dict(zip(self._given, inputs, strict=True)), self._traffic_of_run()
        self._graph, self._result = None, Result([], {})  # frees the memory of the last recording
        graph, ahead = self._make(), take_notes()
        try:
            self._result = graph.record(lambda: self._run(own))
        except CollectiveError:
            raise
        except Exception as error:
            take_notes()  # discard: their values were never computed
            self._give_up(f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}")
            return
        finally:
            notes = take_notes()
            put_notes(ahead)
        self._sent = ledger_between(before, self._traffic_of_run())
        self._graph, self._inputs, self._notes = graph, inputs, notes
        self._places = [values[name].data_ptr() for name in self._fixed]
        self._records += 1

    def _replayed(self, values: Mapping[str, Tensor]) -> Result:
        assert self._graph is not None
        copy_all(self._inputs, [values[name] for name in self._given])
        started(str, "a recorded step")
        self._graph.replay()
        self._replays += 1
        put_notes(self._notes)
        return copied(self._result)

    def _ask_others(self) -> None:
        """Queue a collective after the step on the GPU: a missing rank is named after the timeout of the mesh."""
        if self._world:
            started(str, "a recorded step")
            token = torch.zeros(1, device="cuda")
            self._token = [dist.all_reduce(token, async_op=True), token]

    def _give_up(self, reason: str) -> None:
        if reason:
            self.reason, self._graph, self._result, self._inputs = reason, None, Result([], {}), []
            warnings.warn(f'backend: "cudagraphs" cannot record this step, which runs normally: {reason}', stacklevel=2)
