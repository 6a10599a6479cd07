"""Imported by what forks the ranks of `tests.launched`: what the first step of a transformer loads and finds out;
and they share what the run has captured."""

from __future__ import annotations

from contextlib import suppress

import torch

from autopar.adapters.fake import skeleton_of
from autopar.cache.step_key import step_key
from autopar.cache.values_reached import CannotTell
from autopar.ir.mesh import Mesh
from autopar.models.tiny import TINY
from tests.captured_once import FOLDER, share_captures
from tests.derived_once import share_derivatives
from tests.no_stacks import note_no_stacks
from tests.warm import warm

torch.set_num_threads(1)  # a process with threads is not to be forked
note_no_stacks()
share_captures()
share_derivatives(FOLDER)
warm()
with suppress(CannotTell):  # somebody edits a file while the tests run
    step_key("train", skeleton_of(TINY["llama"].build()), TINY["llama"].batch(2, 4), Mesh.of(dp=1))
