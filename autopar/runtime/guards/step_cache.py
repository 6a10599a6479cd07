"""The compiled steps of a model: one for each kind of step, shape of the batch, global state and state of the modules.

runner = cache.runner(Kind(train=True, outputs=()), batch, surroundings)      compiles if no step matches
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from autopar.ir.batch import facts_of
from autopar.ir.traffic import Ledger, add_ledgers
from autopar.plan import Plan
from autopar.runtime.consistency.batch_checks import BatchContents, check_unclear, claim_shapes, shapes_of
from autopar.runtime.consistency.rank_checks import (
    RankCheck,
    agree_on,
    all_alike,
    as_expected,
    compare_on_ranks,
    everywhere,
)
from autopar.runtime.exec.delayed_scales import delayed_scales
from autopar.runtime.exec.executor import Executor
from autopar.runtime.exec.expert_stats import ExpertLoad
from autopar.runtime.exec.finite_check import FiniteCheck
from autopar.runtime.exec.replay_check import ReplayCheck
from autopar.runtime.exec.step_fingerprint import step_digests
from autopar.runtime.guards.global_state import GlobalTorchState
from autopar.runtime.guards.module_guards import ModuleGuards
from autopar.runtime.health.health_watch import HealthWatch
from autopar.runtime.inputs.loss_fn import with_cotangents
from autopar.runtime.mesh.process_groups import Groups
from autopar.runtime.params.sharded_modules import ShardedModules
from autopar.steps.graphs import Compiled

STATES = 8  # states of the modules, per kind of step and batch, whose compiled steps are kept

Compiler = Callable[..., Compiled]
BackgroundCompile = Callable[
    [nn.Module, dict[str, Any], dict[str, Any]], None
]  # (structure, a rank's batch, how to compile)


class Kind(NamedTuple):
    """``train``: with gradients, modules in their own modes; otherwise all in eval mode. ``outputs``: names of the
    outputs to keep beside losses (None: all). ``tangents``: outputs beside losses that are differentiated.
    ``grad_mode``: the one that the forward sees, if it reads it. ``own_modes``: without gradients, but modules in
    their own modes. ``cotangents``: places of the outputs whose gradients are inputs, in place of the losses."""

    train: bool
    outputs: tuple[str, ...] | None
    tangents: tuple[str, ...] = ()
    grad_mode: str = "grad"
    own_modes: bool = False
    cotangents: tuple[int, ...] = ()

    @property
    def in_own_modes(self) -> bool:
        return self.train or self.own_modes

    def __str__(self) -> str:
        call = "train_step" if self.outputs is not None else "model(**batch)"
        return f"{call if self.in_own_modes else 'eval_step'}{f' for {self.tangents}' if self.tangents else ''}"


@dataclass(frozen=True)
class _CachedStep:
    """A lowered step and everything that it was compiled from."""

    runner: Executor
    watch: ModuleGuards
    structure: nn.Module
    batch: dict[str, Any]
    how: dict[str, Any]


class StepCache:
    """``plan``: the one that has placed the parameters; every step keeps their placements."""

    def __init__(
        self,
        compiler: Compiler,
        tree: ShardedModules,
        plan: Plan,
        groups: Groups,
        backend: str,
        microbatches: int,
        check_replica_inputs: bool,
        finite: FiniteCheck | None = None,
        replay: ReplayCheck | None = None,
    ) -> None:
        self._compiler, self._tree, self._groups, self.backend = compiler, tree, groups, backend
        self.plan, self.microbatches, self._check_replica_inputs = plan, microbatches, check_replica_inputs
        self._batches, self.load, self.health = BatchContents(groups), ExpertLoad(groups), HealthWatch(groups)
        self._finite, self._replay, self.scales = finite, replay, delayed_scales(plan, groups)
        self._bound = 0  # steps so far, the same number on all ranks
        self._steps: dict[tuple[Any, ...], _CachedStep] = {}
        self._past = add_ledgers()  # traffic of steps that are no longer kept
        self.last: Executor | None = None  # the last one returned by `runner`
        self._alone = groups.mesh.world_size == 1
        self._number = 0  # of training steps so far
        self._last_facts: tuple[Any, ...] | None = None  # of the last call
        self.keep_unsharded = False  # within `ParallelModule.keep_unsharded`
        self.ahead: BackgroundCompile | None = None  # called for each training step that is compiled
        self._captured: ModuleGuards | None = ModuleGuards(tree.root)  # until the first step is compiled

    def traffic(self) -> Ledger:
        """Traffic of all steps so far, by (axis, kind)."""
        return add_ledgers(self._past, *(runner.traffic for runner in self.runners))

    @property
    def runners(self) -> list[Executor]:
        """Oldest first."""
        return [step.runner for step in self._steps.values()]

    def kinds(self) -> list[Kind]:
        """The kinds of the compiled steps."""
        return [key[0] for key in self._steps]

    def changed_since(self, runner: Executor) -> str:
        """Names what the forward of a step reads and has changed since it was compiled, "" if nothing has."""
        watch = next((step.watch for step in self._steps.values() if step.runner is runner), None)
        return "" if watch is None or watch.holds() else watch.changed()

    def owed(self) -> list[RankCheck]:
        """Checks that the last step has deferred: the next call compares them, on every rank."""
        return self._batches.owed()

    def runner(
        self,
        kind: Kind,
        batch: dict[str, Any],
        surroundings: GlobalTorchState,
        number: int | None = None,
        refused: str = "",
    ) -> Executor:
        """The step for this rank's shard of a batch. ``number``: the number of this training step. ``refused``: why
        this rank refuses to run it, which ranks without a shard of the weight in question cannot know.

        Raises ValueError, on all ranks, if they would run different steps, or one of them refuses.
        """
        facts = kind, facts_of(batch), surroundings
        with self._batches.agreeing():
            return self._agreed(facts, batch, number, refused)

    def _agreed(self, facts: tuple[Any, ...], batch: dict[str, Any], number: int | None, refused: str) -> Executor:
        key = self._key(facts)
        known = self._steps.get(key)
        call = (key, None if number is None else number - self._number, self.keep_unsharded, refused)
        expected = self._alone or as_expected(self._groups, call)  # on all ranks, whatever each has cached
        if known is not None and expected and not refused:
            if not self._alone:
                compare_on_ranks(self._groups, self._contents(batch, known.runner.compiled), "the batch")
        else:
            # otherwise a rank with another batch would hang
            claims = [self._claim(facts, key, batch, number, self.keep_unsharded, refused)]
            contents = self._contents(batch, known.runner.compiled) if known is not None else []
            agree_on(self._groups, claims + contents, "the batch", lambda: self._expected(number))
            if refused:
                raise ValueError(refused)
            if known is None:
                self._make_room(key)
                self._steps[key] = self._checked(self._compiled(facts[0], batch, facts[2]), key)
            self._groups.order.agreed(call)
        self._number = self._number if number is None else number
        if self._last_facts is None or self._last_facts[1] != key or self._last_facts[3] != self.keep_unsharded:
            self._last_facts = facts, key, shapes_of(batch), self.keep_unsharded
        self.last = self._steps[key].runner
        self.last.unsharded.keep(self.keep_unsharded)
        if self.keep_unsharded:
            self.last.unsharded.check(self._tree.own, self._tree.pieces())
        return self.last

    def _checked(self, step: _CachedStep, key: tuple[Any, ...]) -> _CachedStep:
        """Raises ValueError where torch would use a value that an earlier forward has stored, and this step would
        recompute it from changed inputs."""
        memos = dict(step.runner.compiled.signature.memos)
        others = (s for k, s in self._steps.items() if k[1:3] == key[1:3]) if memos else ()
        for other in others:
            for where, text in other.runner.compiled.signature.memos:
                if memos.get(where, text) != text:
                    raise ValueError(
                        f"the forward caches {where}, and torch would go on with the value of an earlier forward, "
                        "found that a new step would compute another value from what has changed since; compute it in "
                        "every forward, or change its inputs before the first step"
                    )
        return step

    def keep_weights(self, on: bool) -> None:
        """Whether steps keep gathered parameters, from now on."""
        self.keep_unsharded = on
        if not on:
            for runner in self.runners:
                runner.unsharded.keep(False)

    def _claim(
        self,
        facts: tuple[Any, ...],
        key: tuple[Any, ...],
        batch: Mapping[str, Any],
        number: int | None,
        unchanged: bool,
        refused: str = "",
    ) -> RankCheck:
        """The facts of a call that must be equal on all ranks."""
        kind, described, surroundings = facts
        told = {"what forbids the call": refused or "nothing", "the call": kind}
        told |= {"the number of the step": number, **surroundings._asdict(), "the batch": described}
        told["being inside keep_unsharded()"] = unchanged
        return claim_shapes(self._groups, batch, told | {"the state that the modules are in": key[-1]})

    def _expected(self, number: int | None) -> RankCheck | None:
        """The check of a rank that would run its last step once more."""
        if self._last_facts is None:
            return None
        facts, key, shapes, unchanged = self._last_facts
        return self._claim(facts, key, shapes, None if number is None else self._number + 1, unchanged)

    def _key(self, facts: tuple[Any, ...]) -> tuple[Any, ...]:
        """The facts, and a number for the state of the modules: equal on ranks with the same history of states."""
        numbers = [k[-1] for k in self._steps if k[:-1] == facts]
        steps = {n: self._steps[*facts, n] for n in reversed(numbers)}
        held = (n for n, step in steps.items() if step.watch.holds())
        return (*facts, next(held, max(numbers, default=-1) + 1))

    def _make_room(self, key: tuple[Any, ...]) -> None:
        """Drop the step of the oldest state of the modules; warn of a value that changes at every step."""
        states = [k for k in self._steps if k[:-1] == key[:-1]]
        if key[-1] == STATES:
            warnings.warn(
                f"train_step: compiled for the {STATES + 1}th time for the same batch, now because of a change of "
                f"{self._steps[states[-1]].watch.changed()}; move what changes at every step into a buffer or an "
                "input, or out of the model",
                stacklevel=2,
            )
        if len(states) >= STATES:
            self._past = add_ledgers(self._past, self._steps.pop(states[0]).runner.traffic)

    def _compiled(self, kind: Kind, batch: dict[str, Any], surroundings: GlobalTorchState) -> _CachedStep:
        self._tree.refresh()
        captured, self._captured = self._captured, None
        unchanged = kind.train and not kind.cotangents and captured is not None and captured.holds()
        modes = kind.in_own_modes
        watch = captured if captured is not None and unchanged else ModuleGuards(self._tree.root, modes=modes)
        structure = self._tree.structure()
        if not modes:
            structure.eval()
        if kind.cotangents:
            structure = with_cotangents(structure, kind.cotangents)
        fixed = self.plan.of_parameters({spec.name for spec in self._tree.specs})
        how = {**kind._asdict(), "fixed": fixed, "autocast": surroundings.autocast}
        del how["cotangents"]
        with torch.inference_mode(False), torch.enable_grad():  # a backward may request this step
            compiled = self._compiler(structure, batch, unchanged=unchanged, **how)
        same = RankCheck(
            everywhere(self._groups),
            step_digests(compiled),
            "agree: the compiled step must be the same on all ranks",
            "give every rank the same model, mesh, options and batch shapes",
        )
        agree_on(self._groups, [same, *self._contents(batch, compiled, at_once=True)], "the compiled step")
        check_unclear(self._groups, batch, self.plan, self._check_replica_inputs)
        runner = Executor(compiled, self._groups, self.backend)
        runner.load, runner.finite, runner.replay = self.load, self._finite, self._replay
        runner.scales = self.scales
        self._bound += 1
        if self.backend == "eager":  # other code waits where nobody sees it
            runner.times = self.health.times, str(self._bound)
        all_alike(self._groups, "the lowered step")  # wait for slow lowering (inductor) here, not in a collective
        if not watch.holds():  # tracing has changed the modules itself, and the user was warned
            watch = ModuleGuards(self._tree.root, modes=modes)
        watch.note_values(compiled.signature.values)
        if kind.train and not kind.cotangents and self.ahead is not None:
            self.ahead(structure, shapes_of(batch), how)
        return _CachedStep(runner, watch, structure, shapes_of(batch), how)

    def _contents(self, batch: dict[str, Any], compiled: Compiled, at_once: bool = False) -> list[RankCheck]:
        """Checks of the parts of a batch that must be equal on several ranks."""
        return self._batches.claims(batch, compiled.plan.inputs, at_once) if self._check_replica_inputs else []

    def dump(self, folder: str | Path, runner: Executor | None = None, **how: Any) -> None:
        """Compile a step (default: the last one) once more and write its levels to a folder."""
        step = next(s for s in reversed(list(self._steps.values())) if runner in (None, s.runner))
        self._compiler(step.structure, step.batch, dump=folder, **step.how, **how)
