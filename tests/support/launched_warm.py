"""Imported by what forks the ranks of `tests.support.launched`: what the first step of a transformer loads and finds
out; and they share what the run has captured."""

from __future__ import annotations

import torch

from autopar.capture.front_end import capture
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
capture(TINY["llama"].build(), TINY["llama"].batch(2, 4))
