"""A compiled step, or a plan, as sections: "main" has what every rank needs, "graph 0" ... one graph each.

    sections = step_sections(compiled)          {"main": ..., "graph 0": ..., "graph 1": ...}
    step_of_sections(sections)                  decodes graphs when they are used

Reading a step decodes no graph: a rank of a pipeline decodes only those that it runs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from torch import Tensor
from torch.fx import GraphModule

from autopar.adapters.copying.fake import new_mode
from autopar.adapters.fx.lazy import lazy_code
from autopar.cache.graph_codec import GraphDecoder, GraphEncoder
from autopar.cache.value_codec import Damaged, Decoder, Encoder, Json, Unstorable
from autopar.capture.trace.gc_pause import paused_collector
from autopar.ir.signature import ParameterSpec
from autopar.plan import Plan
from autopar.runtime.exec.step_fingerprint import known_digests
from autopar.steps.graphs import Compiled, CopiedStepGraph, LazyGraph, Prologue, StepDigests, StepGraph

Sections = Mapping[str, bytes]
_MAIN = "main"
_GRAPH = "graph {}"


class _StepEncoder(Encoder):
    """Encodes a step, with each graph in a section of its own."""

    def __init__(self) -> None:
        super().__init__()
        self._places: dict[int, int] = {}
        self.graphs: list[GraphModule] = []
        for cls in (StepGraph, CopiedStepGraph, StoredStepGraph):
            self.kinds[cls] = lambda x: ["G", self._place(x.graph), self.encode(x.inputs), self.encode(x.outputs)]
        for kind in (Prologue, StoredPrologue):
            self.kinds[kind] = lambda x: ["Q", self._place(x.graph), self.encode(x.inputs), self.encode(x.totals)]

    def _place(self, gm: GraphModule) -> int:
        if id(gm) not in self._places:
            self._places[id(gm)] = len(self.graphs)
            self.graphs.append(gm)
        return self._places[id(gm)]

    def step(self, compiled: Compiled) -> Json:
        """All fields except for timings, and the index of the local graph."""
        kept = {f.name: getattr(compiled, f.name) for f in fields(Compiled) if f.name not in _APART}
        known = compiled.known or known_digests(compiled)
        return [self.encode(kept), self._place(compiled.local), [*compiled.constants], self.encode(known)]


_APART = ("local", "timings", "known")


def step_sections(compiled: Compiled) -> dict[str, bytes]:
    """Raises Unstorable."""
    encoder = _StepEncoder()
    main = _json(encoder.step(compiled))
    graphs = [_json(GraphEncoder(left_out=("constants",)).graph(gm)) for gm in encoder.graphs]
    return {_MAIN: main, **{_GRAPH.format(i): text for i, text in enumerate(graphs)}}


def plan_sections(made: tuple[Plan, tuple[ParameterSpec, ...]]) -> dict[str, bytes]:
    """Raises Unstorable."""
    return {_MAIN: _json(Encoder().encode(made))}


def _json(tree: Json) -> bytes:
    try:
        return json.dumps(tree, separators=(",", ":"), allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise Unstorable(str(error)) from error


# --- reading ----------------------------------------------------------------------------------------------


class StoredStepGraph(LazyGraph, StepGraph):
    """A step graph from the cache, decoded at first use."""


class StoredPrologue(LazyGraph, Prologue):
    """A prologue from the cache, decoded at first use."""


class StoredStep(Compiled):
    """A compiled step from the cache. Its local graph, which reports use, is decoded at first use."""

    _make: Callable[[], GraphModule]
    _constants: dict[str, Any]

    def __getattr__(self, name: str) -> Any:
        if name != "local" or "_make" not in self.__dict__:
            raise AttributeError(name)
        made = self.__dict__["local"] = self._make()
        return made

    @property
    def constants(self) -> dict[str, Any]:
        return self._constants


class _StepDecoder(Decoder):
    def __init__(self, sections: Sections) -> None:
        super().__init__()
        self._sections = sections
        self._mode: Any = None
        self._made: dict[int, GraphModule] = {}
        self.kinds["G"] = lambda x: self._later(StoredStepGraph, StepGraph, x)
        self.kinds["Q"] = lambda x: self._later(StoredPrologue, Prologue, x)

    def _later(self, cls: Any, base: Any, x: list[Json]) -> Any:
        names = [f.name for f in fields(base) if f.name != "graph"]
        made = object.__new__(cls)
        made._make = self.maker(x[1])
        for name, value in zip(names, x[2:], strict=True):
            setattr(made, name, self.decode(value))
        return made

    def maker(self, place: Any) -> Callable[[], GraphModule]:
        """A function that decodes a graph once."""
        if _GRAPH.format(place) not in self._sections:
            raise Damaged(f"no graph {place}")

        def make() -> GraphModule:
            if place not in self._made:
                self._mode = self._mode or new_mode()
                with lazy_code(), paused_collector():
                    self._made[place] = GraphDecoder(self._mode).graph(_tree(self._sections, _GRAPH.format(place)))
            return self._made[place]

        return make

    def step(self, constants: Mapping[str, Tensor]) -> StoredStep:
        main, place, names, known = _tree(self._sections, _MAIN)
        kept, made = self.decode(main), object.__new__(StoredStep)
        wanted = {f.name for f in fields(Compiled)} - {*_APART}
        if not isinstance(kept, dict) or kept.keys() != wanted:
            raise Damaged("a step with other fields")
        made.__dict__.update(kept)
        made._make, made._constants, made.timings = self.maker(place), {name: constants[name] for name in names}, {}
        made.known = self.decode(known)
        if not isinstance(made.known, StepDigests) or not isinstance(made.plan, Plan):
            raise Damaged("a step without a plan or known facts")
        return made


def step_of_sections(sections: Sections, constants: Mapping[str, Tensor]) -> StoredStep:
    """The inverse of `step_sections`, with constants from the capture. Raises Damaged."""
    try:
        return _StepDecoder(sections).step(constants)
    except (LookupError, TypeError, ValueError) as error:
        raise error if isinstance(error, Damaged) else Damaged(f"no step: {error}") from error


def plan_of_sections(sections: Sections) -> tuple[Plan, tuple[ParameterSpec, ...]]:
    """The inverse of `plan_sections`. Raises Damaged."""
    found = Decoder().decode(_tree(sections, _MAIN))
    if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], Plan)):
        raise Damaged("no plan")
    if not isinstance(found[1], tuple) or not all(isinstance(spec, ParameterSpec) for spec in found[1]):
        raise Damaged("no parameters")
    return found


def _tree(sections: Sections, name: str) -> Json:
    try:
        return json.loads(sections[name])
    except (KeyError, ValueError, RecursionError) as error:
        raise Damaged(f"no section {name}") from error
