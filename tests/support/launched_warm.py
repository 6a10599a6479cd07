"""Imported by what forks the ranks of `tests.support.launched`: what the first step of a transformer loads and finds
out; and they share what the run has captured."""

from __future__ import annotations

from contextlib import suppress

import torch

from autopar.adapters.copying.fake import skeleton_of
from autopar.cache.fingerprint_values import Uncacheable
from autopar.cache.step_key import step_key
from autopar.ir.mesh import Mesh
from autopar.models.tiny import TINY
from tests.support.capture_cache import FOLDER, share_captures
from tests.support.derived_once import share_derivatives
from tests.support.no_stacks import note_no_stacks
from tests.support.preload import warm

torch.set_num_threads(1)  # a process with threads is not to be forked
note_no_stacks()
share_captures()
share_derivatives(FOLDER)
warm()
with suppress(Uncacheable):  # somebody edits a file while the tests run
    step_key("train", skeleton_of(TINY["llama"].build()), TINY["llama"].batch(2, 4), Mesh.of(dp=1))
