"""Which tests run together; shared fixtures: real ranks, one thread; and the warnings that are errors."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tests.support.clean_environment  # isort: skip  (before torch and autopar read it)
import tests.support.no_device_threads  # noqa: F401
from autopar.capture.trace.frame_stack import with_large_stack
from tests.support.capture_cache import FOLDER, folder_of_run, share_captures
from tests.support.cpu_slots import LONG, set_turn
from tests.support.derived_once import share_derivatives
from tests.support.launched import serve_workers
from tests.support.no_stacks import note_no_stacks
from tests.support.ranks import run_ranks

sys.dont_write_bytecode = False  # the same for workers
torch.set_num_threads(1)
note_no_stacks()
share_captures()
share_derivatives(FOLDER)

# Files that take longest, in this order: what is started last must not be long.
DEAR = (
    "tests/compat/test_habits.py",
    "tests/module/test_random_modules.py",
    "tests/docs/test_pages.py",
    "tests/docs/test_examples.py",
    "tests/zero/test_offload.py",
    "tests/autodiff/test_aux_losses.py",
    "tests/attention/test_context_models.py",
    "tests/zero/test_zero.py",
    "tests/planner/test_memory_limits.py",
    "tests/capture/test_loss_fn.py",
    "tests/autodiff/test_activation_checkpoint.py",
    "tests/capture/test_capture.py",
    "tests/faults/test_campaign.py",
    "tests/consistency/test_steady_steps.py",
    "tests/attention/test_ops.py",
    "tests/rules/test_rules.py",
    "tests/runtime/test_optimizers.py",
    "tests/malformed/test_batches.py",
    "tests/rules/test_derived_rules.py",
    "tests/cli/test_cli.py",
    "tests/cache/test_stored_steps.py",
    "tests/attention/test_fused_attention.py",
    "tests/cost/test_measured_memory.py",
    "tests/pipeline/test_stage_dedup.py",
    "tests/module/test_module.py",
    "tests/integrations/test_trainer.py",
    "tests/cost/test_workspace.py",
    "tests/module/test_padding.py",
    "tests/module/test_verify.py",
    "tests/hf/test_own_experts.py",
    "tests/zero/test_keep_unsharded.py",
    "tests/passes/test_attention_algorithms.py",
    "tests/capture/test_decompose.py",
    "tests/zero/test_precision.py",
    "tests/consistency/test_hangs.py",
    "tests/consistency/test_failures.py",
    "tests/docs/test_docs.py",
    "tests/cost/test_scale.py",
    "tests/docs/test_demo.py",
)


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        set_turn(LONG)
    if FOLDER not in os.environ:  # of workers it is that of who starts them
        stack = contextlib.ExitStack()
        stack.enter_context(folder_of_run())
        if getattr(config.option, "numprocesses", None):
            serve_workers()
        config.add_cleanup(stack.close)
    config.addinivalue_line("markers", "full: a whole product of cases; runs only with -m full")
    # An op without a backward gives a silently wrong gradient: never only a warning.
    config.addinivalue_line("filterwarnings", "error:.*an autograd kernel was not registered.*:UserWarning")
    # torch 2.13 renamed the *_tensor collectives; the old names are the ones older torch knows too.
    config.addinivalue_line("filterwarnings", "ignore:.*(all_gather_into_tensor|reduce_scatter_tensor).*:FutureWarning")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    from tests.support.forked_workers import fork_workers

    fork_workers(config, specs)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "full" not in (config.getoption("markexpr") or ""):
        full = {item for item in items if item.get_closest_marker("full")}
        config.hook.pytest_deselected(items=[*full])
        items[:] = [item for item in items if item not in full]
    files = [item.nodeid.partition("::")[0] for item in items]
    order = {file: i for i, file in enumerate(dict.fromkeys([*DEAR, *files]))}
    items.sort(key=lambda item: order[item.nodeid.partition("::")[0]])


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[Any]:
    """Imports make objects by the million, and keep them: nobody looks for garbage among them."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        gc.set_threshold(10_000, 20, 50)  # graphs are many objects that stay: a look at each 700 new ones finds little


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool:
    """As pytest does, with room on the stack; what the test forks has it, too."""
    names = pyfuncitem._fixtureinfo.argnames
    with_large_stack(pyfuncitem.obj)(**{name: pyfuncitem.funcargs[name] for name in names})
    return True


def cells_of(file: Path, items: Iterable[pytest.Item]) -> list[Any]:
    """What the tests of a file have as their parameter ``cell``."""
    params = [item.callspec.params for item in items if item.path == file and hasattr(item, "callspec")]
    found = (given.get("cell") for given in params)
    return [cell for cell in found if type(cell).__name__ == "Cell"]  # no import of what only some tests need


@pytest.fixture(autouse=True, scope="module")
def _ranks_inherit_cells_of_their_file(request: pytest.FixtureRequest) -> None:
    """What a file's tests will run on ranks is compiled before these are forked. Of other files nothing is: they may
    run on other workers, each of which would compile it again."""
    if "tests.support.cases" in sys.modules:
        cells = cells_of(request.path, request.session.items)
        with_large_stack(sys.modules["tests.support.cases"].expect)(cells)


@pytest.fixture(autouse=True, scope="module")
def _old_objects_rest() -> Iterator[None]:
    """What a module leaves alive (caches of torch, compiled graphs) is never looked through again: compiling makes
    objects by the million, and each full collection, here and in every forked rank, would walk over all of it."""
    yield
    gc.collect()
    gc.freeze()
    assert not torch.distributed.is_initialized(), "a test has made a process group here, which forked ranks inherit"


@pytest.fixture
def ranks() -> Callable[..., list[Any]]:
    """``ranks(n, fn, *args, timeout=60)``: results of fn on n gloo ranks (see tests/support/ranks.py)."""
    return run_ranks
