"""What loads torch: neither help, nor mistakes in arguments, nor schedules, nor the bare package."""

from __future__ import annotations

import subprocess
import sys

import pytest

from autopar.cli.main import COMMANDS
from autopar.cli.show_command import LEVELS
from autopar.passes.partition.lower_to_local import LowerToLocal
from autopar.passes.partition.propagate_placements import PropagatePlacements
from autopar.passes.pipelines import GLOBAL_PASSES


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        *([command.name, "--help"] for command in COMMANDS),
        ["schedule", "--name", "all", "--stages", "4", "--microbatches", "8"],
        ["plan", "--mesh", "dp=2"],
    ],
    ids=" ".join,
)
def test_torch_is_loaded_only_where_it_is_needed(arguments: list[str]) -> None:
    """Help, mistakes in arguments and schedules as pure data answer without it."""
    code = f"""
import sys
from autopar.cli.main import COMMANDS, main
from autopar.cli.show_command import LEVELS
try:
    main({arguments!r})
except SystemExit:
    pass
assert "autopar" in sys.modules and not {{"torch", "numpy", "transformers"}} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


def test_names_of_the_package_are_loaded_when_they_are_used_and_no_model_of_transformers_is() -> None:
    code = """
import atexit, gc, sys, autopar
atexit.register(gc.freeze)
assert "torch" not in sys.modules and set(autopar.__all__) <= set(dir(autopar))
assert all(getattr(autopar, name) is not None for name in autopar.__all__) and "torch" in sys.modules
try:
    autopar.nothing
except AttributeError as error:
    assert "nothing" in str(error)
else:
    raise AssertionError
import autopar.models.hf
models = [name for name in sys.modules if ".modeling_" in name and ".models." in name]
assert not models, f"another release may lack one, and each takes its time: {models}"
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


def test_levels_are_those_of_the_passes() -> None:
    assert [LEVELS["global"], LEVELS["typed"], LEVELS["local"]] == [
        GLOBAL_PASSES[-1].name, PropagatePlacements.name, LowerToLocal.name,
    ]  # fmt: skip


def test_no_import_looks_for_gpus() -> None:
    """A process that has done so cannot be forked into ranks that use them."""
    code = """
import torch

def never(*args, **kwargs):
    raise AssertionError("looked for GPUs")

torch.cuda.is_available = torch.cuda.device_count = torch.cuda.get_device_properties = never
import autopar, autopar.models.hf, autopar.models.tiny, autopar.cli.main, autopar.integrations
assert all(getattr(autopar, name) is not None for name in autopar.__all__)
import tests.gpu_check.command
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
