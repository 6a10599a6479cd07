"""From a model's folder to a server on a mesh: what `python -m autopar serve` runs.

Rank 0 listens; the others follow it. SIGINT or SIGTERM ends all: rank 0 stops listening, gives running requests
`GRACE` seconds, and closes the engine, which ends the other ranks.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
import uvicorn
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from autopar.api import serve
from autopar.integrations.http.app import make_app
from autopar.integrations.http.engine import ServedModel
from autopar.ir.mesh import Mesh
from autopar.models import hf_configs as hf
from autopar.runtime.fault.errors import board
from autopar.runtime.mesh.process_groups import init_mesh
from autopar.runtime.mesh.roles import Roles, init_roles
from autopar.runtime.training.launch import LaunchError, launch

GRACE = 5  # seconds that running requests get when the server ends
_ENDING = (signal.SIGINT, signal.SIGTERM)
# Fields of generation_config.json that requests start from, as in vLLM; do_sample is not read.
_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class Settings:
    """The arguments of the command. ``attention``, ``experts``: meshes in place of ``mesh``, or None. ``cache``: bytes
    of a rank. ``dtype``: None for the config's."""

    folder: Path
    mesh: str
    host: str
    port: int
    name: str | None
    max_length: int
    cache: int | None
    max_running: int
    max_waiting: int
    dtype: str | None
    device: str | None
    attention: str | None = None
    experts: str | None = None
    microbatches: int | None = None
    apart: str | None = None

    @property
    def meshes(self) -> list[Mesh]:
        """Of all ranks, or of those of attention and those of experts."""
        names = [self.attention, self.experts] if self.attention and self.experts else [self.mesh]
        return [Mesh.parse(name).planned() for name in names]

    def start(self) -> Any:
        """The `DeviceMesh`, or the `Roles`. Collective."""
        sizes = [dict(mesh.axes) for mesh in self.meshes]
        if len(sizes) == 1:
            return init_mesh(self.device, **sizes[0])
        return init_roles(self.device, attention=sizes[0], experts=sizes[1])


# Collective: the engine of a rank, from settings, mesh and the model's config.
Load = Callable[[Settings, Any, Any], Any]


def serve_folder(settings: Settings, load: Load | None = None) -> int:
    """Serve until a signal ends it; returns the exit code. ``load``: `load_engine`, or another.

    Raises ValueError for what does not fit, as far as possible before any process starts."""
    world = sum(mesh.world_size for mesh in settings.meshes)
    hf.load_config(settings.folder)
    task = (settings, load or load_engine)
    if world == 1 or "RANK" in os.environ:
        _run_rank(*task)
        return 0
    listening(settings).close()
    with _forwarded_signals() as got:
        try:
            launch(_run_rank, world, task, device=settings.device)
        except LaunchError as error:
            if error.refusal:
                raise
            if not got:
                print(f"autopar: {str(error).partition('traceback of')[0].rstrip()}", file=sys.stderr)
                return 1
    return 0


def listening(settings: Settings) -> socket.socket:
    """A socket at the address. Raises ValueError if it is taken."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    found = socket.socket(family)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((settings.host, settings.port))
    except OSError as error:
        found.close()
        raise ValueError(
            f"serve: cannot listen at {settings.host} port {settings.port}: {error.strerror}; choose another --port"
        ) from error
    return found


@contextlib.contextmanager
def _forwarded_signals() -> Iterator[list[int]]:
    """Pass the first signal on to the ranks, which end by themselves; a second one ends them at once. Gives the list of
    signals so far."""
    got: list[int] = []

    def forward(number: int, _: FrameType | None) -> None:
        got.append(number)
        ranks = multiprocessing.active_children()
        if len(got) > 1 or not ranks:
            raise KeyboardInterrupt
        for rank in ranks:
            rank.terminate()

    before = {number: signal.signal(number, forward) for number in _ENDING}
    try:
        yield got
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _run_rank(settings: Settings, load: Load) -> None:
    """What each rank runs."""
    config = hf.load_config(settings.folder)
    mesh = settings.start()
    leads = (mesh.rank if isinstance(mesh, Roles) else dist.get_rank()) == 0
    address = listening(settings) if leads else None  # before the weights are read, which may take minutes
    engine = load(settings, mesh, config)
    if address is None:
        for number in _ENDING:  # rank 0 tells when it ends
            signal.signal(number, signal.SIG_IGN)
        engine.run()
        return
    tokenizer = AutoTokenizer.from_pretrained(settings.folder)
    name = settings.name or settings.folder.resolve().name
    try:
        defaults = sampling_defaults(settings.folder)
        _listen(ServedModel(name, engine, tokenizer, defaults, lambda: board().verdict), address)
    finally:
        engine.close()


def load_engine(settings: Settings, mesh: Any, config: Any) -> Any:
    """The `Server` of the model in the folder. Each rank reads only its shards of the weights."""
    dtype = hf.dtype_named(settings.dtype) if settings.dtype else config.dtype or torch.float32
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    except ValueError as error:
        raise ValueError(
            f"serve: needs a causal language model, found model_type {config.model_type!r} in {settings.folder}"
        ) from error
    if (settings.folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(settings.folder)  # says which ids end a text
    return serve(
        model,
        mesh,
        weights=settings.folder,
        microbatches=settings.microbatches,
        apart=settings.apart,
        max_length=settings.max_length,
        cache=settings.cache,
        max_running=settings.max_running,
        max_waiting=settings.max_waiting,
    )


def sampling_defaults(folder: Path) -> dict[str, Any]:
    """Fields of `Sampling` that generation_config.json sets."""
    if not (folder / "generation_config.json").is_file():
        return {}
    given = GenerationConfig.from_pretrained(folder).to_diff_dict()
    return {name: given[name] for name in _DEFAULTS if given.get(name) is not None}


def _listen(model: ServedModel, address: socket.socket) -> None:
    """Serve until a signal comes."""
    host, port = address.getsockname()[:2]
    config = uvicorn.Config(
        make_app(model), lifespan="off", log_level="warning", access_log=False, timeout_graceful_shutdown=GRACE
    )
    address.listen(config.backlog)  # the address is said next, and may be used at once
    print(f"autopar: serving {model.name} at http://{host}:{port}/v1", file=sys.stderr, flush=True)
    _Listener(config).run([address])


class _Listener(uvicorn.Server):
    """Ends when a signal comes, without raising it again: the engine is to be closed then."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.should_exit = True
