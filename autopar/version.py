"""The version of the package, for everybody on any floor: pyproject.toml has the same
(tests/house/test_packaging.py)."""

VERSION = "0.1.0"
