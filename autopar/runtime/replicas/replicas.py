"""`autopar.Replicas`: a training step of several worlds, of which some may leave and return.

    join      the first step: compile it, ask to join, wait until the members take this replica in
    connect   whenever the members have changed: groups over replicas; state to members that lack it
    compute   totals, then forward and backward, of this replica's shards of the batch
    add up    totals, gradients and loss over replicas
    agree     vote that the step is done, or find out who is lost and repeat it

The first rank of each replica speaks for it: it votes, waits for the record to change, and tells the other ranks. After
each exchange with other replicas the ranks of one agree whether it has ended well on all of them.
"""

from __future__ import annotations

import atexit
import functools
import os
import time
import uuid
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from autopar.runtime.consistency.rank_checks import agree_on_arguments
from autopar.runtime.fault.error_propagation import CollectiveError
from autopar.runtime.fault.errors import error_context, explained
from autopar.runtime.fault.heartbeat import BEAT, SILENT
from autopar.runtime.mesh.process_groups import PATIENCE, Groups
from autopar.runtime.module.parallel_module import ParallelModule
from autopar.runtime.params.parameters import local_tensor
from autopar.runtime.replicas.lookout import Lookout
from autopar.runtime.replicas.membership import Claim, MembershipStore, Record, store_lost
from autopar.runtime.replicas.replica_group import MemberLost, ReplicaGroup
from autopar.runtime.replicas.state_transfer import give_state, receive_state, take_state
from autopar.runtime.training.save import several
from autopar.values import a_text, one_of, whole_number

T = TypeVar("T")
BatchOf = Callable[[int, int], Mapping[str, Any]]
ON_LOSS = ("repeat", "scale")
ATTEMPTS = 3  # at a step whose exchanges fail while all members are alive
ASKED = 0.5  # seconds of waiting after which a replica looks for others that have started anew


class Replicas:
    """Trains one model on several replicas: worlds of their own, each with a mesh, started and restarted by themselves.

        mesh = autopar.init_mesh(tp=2)  # of this replica
        model = autopar.parallelize(model, mesh, replicas=4)
        optimizer = torch.optim.AdamW(model.parameters())
        replicas = autopar.Replicas(model, optimizer)
        while replicas.step < 1000:
            loss = replicas.train_step(lambda step, shard: batches[step][shard])
            optimizer.step()

    When a replica dies, the others repeat the step without it; one that returns is given the state by one that lives.
    A batch has as many shards as there are replicas, the absent ones included.

    Args:
        model: from ``parallelize(..., replicas=n)``, the same on all replicas, with the same mesh.
        optimizer, scheduler: one or several; their states are given to a replica that returns.
        extra: other objects with ``state_dict`` and ``load_state_dict`` that it is given, by name.
        index: which replica this is, from 0; default $AUTOPAR_REPLICA.
        store: "host:port" of the store in which replicas meet (``python -m autopar replica-store``); default
            $AUTOPAR_REPLICA_STORE. It must outlive them.
        name: of the run, if the store serves several.
        step: the number of steps that are done in the state that this replica has loaded.
        on_loss: what becomes of the shard of an absent replica. "repeat": the others compute it, so that losses and
            weights are those of an undisturbed run. "scale": it is left out, and means are over the rest.
        min_replicas: with fewer of them no step is made: they wait for others to return, for the mesh's timeout.

    Collective within the replica. Raises ValueError for a model, an option or an address that does not fit, and
    CollectiveError if the store does not answer. A replica whose options are not those of most is refused by its first
    step; the others wait for it, for the mesh's timeout, or go on.
    """

    def __init__(
        self,
        model: ParallelModule,
        optimizer: Optimizer | Sequence[Optimizer] = (),
        *,
        scheduler: Any = (),
        extra: Mapping[str, Any] | None = None,
        index: int | None = None,
        store: str | None = None,
        name: str = "run",
        step: int = 0,
        on_loss: str = "repeat",
        min_replicas: int = 1,
    ) -> None:
        if not isinstance(model, ParallelModule) or model.replicas == 1:
            raise ValueError(
                "replicas: needs a model that is compiled for several, found "
                f"{'one for 1' if isinstance(model, ParallelModule) else type(model).__name__}; pass "
                "parallelize(model, mesh, replicas=4)"
            )
        self._model, self._optimizers = model, several("optimizer", optimizer)
        self._schedulers, self._extra = several("scheduler", scheduler), dict(extra or {})
        self._repeats = one_of("on_loss", on_loss, known=ON_LOSS) == "repeat"
        self.count, self.index = model.replicas, _index(index, model.replicas)
        self._least = whole_number("min_replicas", min_replicas, 1, self.count)
        self._options = f"on_loss={on_loss!r}, min_replicas={min_replicas}"
        where = _address(store)
        held = model.held()
        self._groups: Groups = held.groups
        held.line.shared = True
        self._step, self._attempts = whole_number("step", step), 0
        self._record: Record | None = None
        with error_context("replicas"):
            told = {"index": self.index, "store": where, "name": a_text("name", name), "step": step}
            agree_on_arguments(self._groups, "Replicas", told | {"options": self._options})
            several_ranks = self._groups.mesh.world_size > 1
            self._control = self._groups.control(PATIENCE) if several_ranks else None
            host, _, port = where.rpartition(":")
            connected = _connected(host, int(port), self._groups.timeout, name)
            self._store = MembershipStore(connected, f"the store at {where}", self.count)
            self._group = ReplicaGroup(
                self._store.store, int(port), self.index, self._groups.rank, self._groups.timeout
            )
            self._start()
        _open.add(self)

    def _start(self) -> None:
        """A name for this start of the replica, under which it is seen to live."""
        self._name = self._of_first(lambda: f"{self.index}-{uuid.uuid4().hex[:12]}")
        rank, store = self._groups.rank, self._store
        self._lookout = Lookout(store.store, store.where, self._name, rank, self._group.trouble)

    @property
    def step(self) -> int:
        """The number of steps that are done: of the run, once this replica has joined it."""
        return self._step

    @property
    def members(self) -> list[int]:
        """The indices of the replicas that compute the next step; none before the first one."""
        return self._record.order if self._record is not None else []

    @property
    def is_first(self) -> bool:
        """Whether this is the first of the replicas that have done the last step: it writes logs and checkpoints."""
        return self._record is not None and self._record.donor == self.index

    # --- a step -------------------------------------------------------------------------------------------

    def train_step(self, batch_of: BatchOf) -> Tensor | tuple[Tensor, ...]:
        """Compute a step on all present replicas: forward, backward, and the sum of gradients. Returns the loss of the
        whole batch; ``.grad`` of the parameters has its gradients, and what it had before is dropped.

        ``batch_of(step, shard)``: the arguments of the model's forward for one shard of a step's batch, from 0; of
        these examples a rank passes those of its place on the data-parallel axes of its mesh. Shards have the same
        shapes. It may be called several times with the same arguments, and must return the same values.

        A step is done on all replicas that are left, or on none: call ``optimizer.step()`` after it.
        """
        with error_context("train_step of replicas"):
            try:
                if self._record is None:
                    self._join(batch_of)
                while True:
                    assert self._record is not None
                    before, loss = self._record.step, None
                    if len(self._record.members) < self._least:
                        self._record = self._with_others(self._record)
                    else:
                        loss = self._attempt(self._record, batch_of)
                        self._record = self._following(self._record, loss is not None)
                    if self._name not in self._record.members.values():
                        self._return(batch_of)
                    elif loss is not None and self._record.step > before:
                        self._step, self._attempts = self._record.step, 0
                        self._model.training_steps += 1
                        self._model.store_new_buffers()
                        return loss[0] if len(loss) == 1 else loss
            except BaseException as error:
                self._leave(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"[:300])
                raise

    def _attempt(self, record: Record, batch_of: BatchOf) -> tuple[Tensor, ...] | None:
        """The losses of the whole batch, with gradients in place; None if an exchange over replicas has failed. The
        model's number of training steps stays."""
        model, add_up = self._model, functools.partial(self._group.add_up, bucket_bytes=self._bucket_bytes)
        self._drop_gradients()
        if self._group.epoch != record.epoch and not self._connect(record):
            return None
        step, number = record.step, model.training_steps
        shards = record.shards(self.index, self.count, self._repeats)
        model.shards_present = self.count if self._repeats else len(record.members)
        totals: list[Tensor] = []
        for shard in shards:
            found = model.own_totals(**batch_of(step, shard))
            totals = [a + b for a, b in zip(totals, found, strict=True)] if totals else [x.clone() for x in found]
        if not self._ended_well(lambda: add_up(totals)):
            return None
        losses: tuple[Tensor, ...] = ()
        for shard in shards:
            with model.shard_of_batch(shard, totals):
                made = model.train_step(**batch_of(step, shard))
            model.training_steps = number
            found = made if isinstance(made, tuple) else (made,)
            losses = tuple(a + b for a, b in zip(losses, found, strict=True)) if losses else found
        losses = tuple(loss.clone() for loss in losses)
        if not self._ended_well(lambda: add_up([*losses, *self._gradients()])):
            return None
        return losses

    @property
    def _bucket_bytes(self) -> int:
        return self._model.plan.options.bucket_bytes

    def _gradients(self) -> list[Tensor]:
        return [local_tensor(p.grad) for p in self._model.parameters() if p.grad is not None]

    def _drop_gradients(self) -> None:
        for p in self._model.parameters():
            p.grad = None

    def _connect(self, record: Record) -> bool:
        """Connect to the other members, and give the state to those without it."""
        state = (self._model, self._optimizers, self._schedulers, self._extra)
        received: list[Any] = []

        def connect() -> None:
            self._group.connect(record, self._lookout)
            giver = record.donor
            assert giver is not None, "somebody has the state"
            if self.index == giver and record.fresh:
                give_state(self._group, record.fresh, *state)
            elif self.index in record.fresh:
                received.append(receive_state(self._group, giver))

        if not self._ended_well(connect):
            self._group.end()
            return False
        if received:
            take_state(received[0], *state)
            self._step = record.step
        return True

    # --- agreeing -----------------------------------------------------------------------------------------

    def _following(self, record: Record, done: bool) -> Record:
        """The record that follows, once there is one: the same on all ranks of this replica. ``done``: this replica has
        computed the step. If not, its group is ended, so that the others do not wait for it."""
        if not done:
            self._group.end()
        found = Record.of(self._of_first(lambda: str(self._awaited(record, done))))
        assert found is not None, "there is a record"
        return found

    def _awaited(self, record: Record, done: bool) -> Record:
        if done and self._store.vote(record) == len(record.members):
            following = self._proposed(record, True, set())
            self._store.forget_votes(record)
            return following
        start, pause = time.monotonic(), 0.0002
        while True:
            found = self._store.record()
            if found is None:
                raise store_lost(f"{self._store.where} has lost its contents")
            if str(found) != str(record):
                return found
            waited = time.monotonic() - start
            lost = {index for index, name in record.members.items() if name in self._lookout.lost}
            if not done or waited > ASKED:
                lost |= self._started_anew(record)
            if self.index in lost:
                return record.next(False, {self.index}, {}, record.claims)  # for the others, who go on without it
            if lost:
                return self._proposed(record, False, lost)
            if self._lookout.cut_off:
                raise store_lost(self._lookout.cut_off)
            if not done and waited > SILENT + 3 * BEAT:
                return self._again(record)
            time.sleep(pause)
            pause = min(1.2 * pause, 0.05)

    def _with_others(self, record: Record) -> Record:
        """The record that follows one with too few members: others have come in, or another one is lost."""
        self._group.end()
        self._lookout.watch(record, record.members.values())
        found = Record.of(self._of_first(lambda: str(self._returned(record))))
        assert found is not None, "there is a record"
        return found

    def _returned(self, record: Record) -> Record:
        end = time.monotonic() + self._groups.timeout.total_seconds()
        while time.monotonic() < end:
            found = self._store.record()
            if found is None:
                raise store_lost(f"{self._store.where} has lost its contents")
            if str(found) != str(record):
                return found
            lost = {index for index, name in record.members.items() if name in self._lookout.lost}
            lost |= self._started_anew(record)
            if self.index in lost:
                return record.next(False, {self.index}, {}, record.claims)
            if lost or self._store.number_of_claims() != record.claims:
                return self._proposed(record, False, lost)
            if self._lookout.cut_off:
                raise store_lost(self._lookout.cut_off)
            time.sleep(0.05)
        raise CollectiveError(
            f"replicas: step {record.step} needs min_replicas={self._least} replicas, found {_listed(record.order)} "
            f"for {self._groups.timeout.total_seconds():.0f} s; start others, or lower min_replicas, and start all "
            "again from a checkpoint"
        )

    def _started_anew(self, record: Record) -> set[int]:
        """Members that ask to join under another name: they were lost."""
        if self._store.number_of_claims() == record.claims:
            return set()
        claims = self._store.claims()
        return {index for index, name in record.members.items() if index in claims and claims[index].name != name}

    def _again(self, record: Record) -> Record:
        """The same members once more: an exchange has failed, and all are alive."""
        self._attempts += 1
        if self._attempts > ATTEMPTS:
            raise CollectiveError(
                f"replicas: exchanges at step {record.step} have failed {ATTEMPTS} times while all replicas were "
                "alive; look at the network between them"
            )
        return self._proposed(record, False, set())

    def _proposed(self, record: Record, done: bool, lost: set[int]) -> Record:
        """The record that takes the place of this one: ours, or that of another member that was earlier."""
        claims, joining = self._store.number_of_claims(), {}
        if claims != record.claims:
            found = self._store.claims()
            joining = {
                index: claim.name
                for index, claim in found.items()
                if record.members.get(index) != claim.name
                and claim.options == self._options  # others end by themselves
            }
        new = record.next(done, lost, joining, claims)
        if new.donor is None:
            raise CollectiveError(
                f"replicas: every replica that had the state of step {record.step} is lost; start all again from a "
                "checkpoint"
            )
        return self._store.change(record, new)

    # --- joining ------------------------------------------------------------------------------------------

    def _join(self, batch_of: BatchOf) -> None:
        """Wait until this replica is a member. Its step is compiled before, so that nobody waits for that."""
        self._compile(batch_of)
        self._record = Record.of(self._of_first(lambda: str(self._membership())))

    def _return(self, batch_of: BatchOf) -> None:
        """Join anew: the others have gone on without this replica, which was stopped or cut off for a while."""
        claim = self._store.claims().get(self.index)
        if claim is not None and claim.name != self._name:
            raise CollectiveError(
                f"replicas: another process has joined as replica {self.index} while this one did not respond"
            )
        self._leave("it was left behind, and joins anew")
        self._start()
        self._join(batch_of)

    def _compile(self, batch_of: BatchOf) -> None:
        model, number = self._model, self._model.training_steps
        batch = batch_of(self._step, self.index)
        totals = model.own_totals(**batch)
        with model.shard_of_batch(self.index, totals):
            model.train_step(**batch)
        self._drop_gradients()
        model.training_steps = number
        if unsaved := [name for name in model.written_buffers() if name not in model.held().buffers]:
            raise ValueError(
                f"replicas: a step writes buffer {unsaved[0]}, which is not part of the model's state, so a replica "
                "that returns would not be given it; register it with persistent=True"
            )

    def _membership(self) -> Record:
        """Ask to join; returns the record with this replica in it. Replicas that find no living member start together,
        from the state of the one that has done most steps."""
        self._store.claim(self.index, Claim(self._name, self._step, self._options))
        end, claims = time.monotonic() + self._groups.timeout.total_seconds(), dict[int, Claim]()
        while time.monotonic() < end:
            record, number, claims = self._store.record(), self._store.number_of_claims(), self._store.claims()
            members = record.members if record is not None else {}
            if self._name in members.values():
                assert record is not None
                return record
            self._lookout.watch(None, [*members.values(), *(claim.name for claim in claims.values())])
            alive = [index for index, claim in claims.items() if self._lookout.is_alive(claim.name)]
            training = {index: claims[index].options for index in alive if claims[index].name == members.get(index)}
            self._check_options(training)
            if len(alive) == self.count and all(name in self._lookout.lost for name in members.values()):
                options = {index: claims[index].options for index in alive}
                self._check_options(options)
                if len({*options.values()}) > 1:
                    continue  # the others end, and may come again
                giver = max(alive, key=lambda index: (claims[index].step, -index))
                fresh = tuple(index for index in alive if index != giver)
                epoch = record.epoch + 1 if record is not None else 0
                names = {index: claims[index].name for index in alive}
                self._store.change(record, Record(epoch, claims[giver].step, names, fresh, number))
            if self._lookout.cut_off:
                raise store_lost(self._lookout.cut_off)
            time.sleep(0.05)
        absent = sorted({*range(self.count)} - claims.keys())
        raise CollectiveError(
            f"replicas: replica {self.index} has waited {self._groups.timeout.total_seconds():.0f} s for others; no "
            f"replica of this run is training, and to start all {self.count} must be there"
            + (f" (replica {_listed(absent)} has not come)" if absent else "")
        )

    def _check_options(self, given: Mapping[int, str]) -> None:
        """Raises ValueError if this replica has not the options that most of these replicas have; of as many, those of
        the first."""
        counts = Counter(text for _, text in sorted(given.items()))
        usual = max(counts, key=lambda text: counts[text], default=self._options)
        if usual != self._options:
            who = [index for index, text in sorted(given.items()) if text == usual]
            raise ValueError(
                f"replicas: needs the same options on all replicas, found {self._options} on replica {self.index} and "
                f"{usual} on replica {_listed(who)}; start it with the same"
            )

    # --- leaving ------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Leave the run: the other replicas do not wait for this one. At the end of the program it leaves by itself."""
        self._leave("it has finished")
        _open.discard(self)

    def _leave(self, why: str) -> None:
        self._lookout.close(why)
        self._group.close()

    # --- within the replica -------------------------------------------------------------------------------

    def _ended_well(self, exchange: Callable[[], None]) -> bool:
        """Whether an exchange with other replicas has ended on all ranks of this one."""
        well = torch.ones(1)
        try:
            exchange()
        except MemberLost:
            well.zero_()
        if self._control is not None:
            with explained("agreeing on an exchange with other replicas", range(self._groups.mesh.world_size)):
                dist.all_reduce(well, dist.ReduceOp.MIN, group=self._control)
        return bool(well)

    def _of_first(self, text: Callable[[], str]) -> str:
        """What ``text()`` returns on the first rank of this replica."""
        if self._control is None:
            return text()
        found = [text() if self._groups.rank == 0 else ""]
        with explained("what the first rank has agreed on with other replicas", range(self._groups.mesh.world_size)):
            dist.broadcast_object_list(found, group=self._control, group_src=0)
        return found[0]


_open: weakref.WeakSet[Replicas] = weakref.WeakSet()


@atexit.register
def _leave_all() -> None:
    for replicas in list(_open):
        replicas.close()


def _listed(indices: Sequence[int]) -> str:
    return ", ".join(map(str, indices))


def _index(given: int | None, count: int) -> int:
    found = os.environ.get("AUTOPAR_REPLICA") if given is None else given
    if found is None:
        raise ValueError("replicas: needs to know which one this is; pass index=0, or set AUTOPAR_REPLICA")
    index = whole_number("index", int(found) if isinstance(found, str) and found.isdecimal() else found)
    if index >= count:
        raise ValueError(
            f"replicas: index is one of 0 to {count - 1}, found {index}; number the {count} replicas from 0"
        )
    return index


def _address(given: str | None) -> str:
    found = os.environ.get("AUTOPAR_REPLICA_STORE", "") if given is None else a_text("store", given)
    host, _, port = found.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(
            f"replicas: needs the store in which they meet, found {found!r}; run python -m autopar replica-store, and "
            'pass store="HOST:29600" or set AUTOPAR_REPLICA_STORE'
        )
    return found


def _connected(host: str, port: int, timeout: Any, name: str) -> dist.Store:
    try:
        store = dist.TCPStore(host, port, is_master=False, timeout=timeout)
    except (dist.DistError, RuntimeError, ValueError) as error:
        raise store_lost(f"the store at {host}:{port} cannot be reached") from error
    return dist.PrefixStore(f"autopar/replicas/{name}", store)
