"""What holds before anything large is imported: see `tests.conftest`."""

import atexit
import gc
import os

gc.set_threshold(50_000, 20, 100)  # importing torch and transformers makes millions of objects, none of them garbage
atexit.register(gc.freeze)  # nor at the end, where a last look would take a second
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # read when numpy is imported; its threads spin for work
