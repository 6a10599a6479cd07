"""Variables of the environment as all tests have them, whatever is set for a user's own runs. Imported by the conftest
before anything that reads them."""

from __future__ import annotations

import os

OF_RUNS = "AUTOPAR_TESTS_"  # by which a run of the tests tells its workers


def clean() -> None:
    """In this process, and so in those that it starts."""
    for name in list(os.environ):
        if name.startswith(("AUTOPAR_", "OMP_", "MKL_")) and not name.startswith(OF_RUNS):
            del os.environ[name]
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # tests that name no device are about the CPU; CUDA survives no fork
    os.environ["AUTOPAR_CACHE"] = "off"  # what is tested is the compiler; tests of the cache have folders of their own
    os.environ["AUTOPAR_FLIGHT"] = "off"  # ranks fail in many tests
    os.environ["AUTOPAR_HEARTBEAT_TIMEOUT"] = "16"  # read at import; eight ranks on two busy cores are slow to beat
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else each process that a test starts compiles all sources anew
    # torch's store looks up who connects, and serves nobody the while: seconds that tests of timeouts have not got.
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")


clean()
