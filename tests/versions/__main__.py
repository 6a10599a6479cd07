"""A part of the tests with other versions of torch and transformers, and docs/versions.md of what came out.

    python -m tests.versions                        every pair of `TORCH` and `TRANSFORMERS`
    python -m tests.versions 2.12,5.10 2.15,5.24    these pairs alone; of the others the page keeps what is known

Each torch has an environment, build/versions/2.12, made where it is not there yet: its CPU build where its index can be
reached, else the default one, which brings CUDA (5 GB), as 2.13+cuda does everywhere. transformers is exchanged there.
The oldest pair has one of its own, with the oldest of all libraries. What came out is in results.json here.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.support.launched import ROOT

TORCH = ("2.12", "2.13", "2.13+cuda", "2.14", "2.15")
CUDA = {"2.13+cuda": "===2.13.0"}  # the build with CUDA, which alone has no ending
TRANSFORMERS = ("5.10", "5.17", "5.24")
OLDEST = (
    "cloudpickle==3.0.*", "networkx==3.0", "numpy==1.26.4", "rich==13.7.*", "safetensors==0.4.3", "scipy==1.15.0",
    "sympy==1.13.3", "tqdm==4.66.*",
)  # fmt: skip
FOLDER = ROOT / "build" / "versions"
RESULTS = Path(__file__).parent / "results.json"
PAGE = ROOT / "docs" / "versions.md"
TOOLS = ("hypothesis", "psutil", "pytest", "pytest-timeout", "pytest-xdist")
CPU_INDEX = ("--timeout", "15", "--retries", "1", "--extra-index-url", "https://download.pytorch.org/whl/cpu")
FACTS = (
    "import json, sys, torch, transformers, numpy; print(json.dumps([sys.version.split()[0], torch.__version__, "
    "transformers.__version__, numpy.__version__]))"
)

KNOWN = """
What is known of the differences:

- torch 2.11 and older are refused: operators on a subclass of DTensor run DTensor's own code there.
- Python 3.12 and 3.13, where torch counts writes to dicts in another way, ran `tests/versions/exact.py`,
  `test_autograd_function`, `test_module`, `test_guards`, `test_read_guards` and every habit on one process, with torch
  2.13 and transformers 5.24: all passed. The pairs of the table ran with Python 3.11.
- torch 2.12: `apply` of a custom autograd Function takes no keyword arguments, in plain torch either; three tests of
  `tests/capture/test_autograd_function.py` pass some.
- transformers 5.10 and 5.17: opt, bart, whisper, nllb_moe, falcon with padding and informer draw whether to skip a
  layer as a tensor, which is refused; dbrx multiplies by matrices of other shapes than in 5.23 and does not run at the
  sizes of the tests; their tiny longcat_flash has other sizes; gemma2's loss differs by 1e-11. 5.23 has all of them.
- transformers before 5.23: `autopar.integrations.Trainer` is refused; with label smoothing that of 5.10 has other
  losses. So with 5.10 and 5.17 the tests of the trainer fail. (The run with torch 2.12 was before that.)
- The run of `cache.test_stored_steps` with 2.12 and 5.10 below was before keys of stored steps were those of graphs.
- In some pairs of the table only `tests/versions/exact.py` was run: the second table says which files.
"""

# What touches private names of the libraries, or what they have changed.
SUITE = (
    "tests/versions/exact.py",
    "tests/capture/test_versions.py",
    "tests/capture/test_autograd_function.py",
    "tests/capture/test_capture.py",
    "tests/capture/test_decompose.py",
    "tests/capture/test_dict_guards.py",
    "tests/capture/test_read_guards.py",
    "tests/module/test_module.py",
    "tests/rules/test_rules.py",
    "tests/autodiff/test_activation_checkpoint.py",
    "tests/runtime/test_compiled_order.py",
    "tests/runtime/test_launch.py",
    "tests/runtime/test_saving.py",
    "tests/runtime/test_state.py",
    "tests/cache/test_step_key.py",
    "tests/cache/test_stored_steps.py",
    "tests/hf/test_masks_of_others.py",
    "tests/hf/test_own_experts.py",
    "tests/integrations/test_trainer.py",
)


def environment(torch: str, transformers: str) -> Path:
    """The Python of a pair's environment, made if it is not there, with this transformers."""
    is_oldest = (torch, transformers) == (TORCH[0], TRANSFORMERS[0])
    folder = FOLDER / (f"{torch}-oldest" if is_oldest else torch)
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    index = () if torch in CUDA or shutil.which("nvidia-smi") else CPU_INDEX
    wanted = (f"torch{CUDA.get(torch, f'=={torch}.*')}", f"transformers=={transformers}.*", *TOOLS)
    command = [python, "-m", "pip", "install", "--quiet", *index, *wanted, *(OLDEST if is_oldest else ())]
    subprocess.run([*command, "-e", ".[hf]"], cwd=ROOT, check=True)
    return python


def run(python: Path, tests: tuple[str, ...] = SUITE) -> dict[str, Any]:
    """What the tests find with this Python."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *tests]
        subprocess.run(command, cwd=ROOT, check=False)
        facts = subprocess.run([python, "-c", FACTS], capture_output=True, text=True, check=True).stdout
        return {"found": json.loads(facts), "date": datetime.now(UTC).date().isoformat(), **counts(report)}


def counts(report: Path) -> dict[str, Any]:
    """Of a report of pytest in XML: by file {"passed": 3, "failed": 1}, names of what failed, reasons of skips."""
    files: dict[str, Counter[str]] = {}
    failed: list[str] = []
    skipped: Counter[str] = Counter()
    for case in ET.parse(report).iter("testcase"):
        module = case.get("classname", "")
        outcome = "passed"
        for kind in ("failure", "error", "skipped"):
            if (found := case.find(kind)) is not None:
                outcome = "skipped" if kind == "skipped" else "failed"
                if kind == "skipped":
                    skipped[found.get("message", "")] += 1
                else:
                    failed.append(f"{module}::{case.get('name')}")
        files.setdefault(module, Counter())[outcome] += 1
    return {"files": files, "failed": failed, "skipped": skipped}


def page(results: dict[str, Any]) -> str:
    """docs/versions.md."""
    lines = [
        "# Versions of torch and transformers",
        "",
        "autopar takes torch 2.12 or newer and transformers 5.10 or newer; older ones it refuses in a sentence, and of",
        "ones newer than those below it warns once. Written by `make test-versions`, which runs a part of the tests",
        "(`tests/versions/__main__.py` lists the files) in an environment for each pair. The whole suite runs with",
        "torch 2.13 and transformers 5.23.",
        "",
        "| torch | " + " | ".join(f"transformers {t}" for t in TRANSFORMERS) + " |",
        "|---|" + "---|" * len(TRANSFORMERS),
    ]
    for torch in TORCH:
        row = [torch.replace("+cuda", " CUDA build"), *(_cell(results.get(f"{torch},{t}")) for t in TRANSFORMERS)]
        lines.append(f"| {' | '.join(row)} |")
    lines += ["", "| pair | Python, torch, transformers, numpy | date | files |", "|---|---|---|---|"]
    for pair, of in sorted(results.items()):
        files = ", ".join(f"{name.removeprefix('tests.')} {_sum(n)}" for name, n in sorted(of["files"].items()))
        lines.append(f"| {pair} | {', '.join(of['found'])} | {of['date']} | {files} |")
    lines += KNOWN.splitlines() + [""]
    for pair, of in sorted(results.items()):
        lines += [f"- {pair} failed: `{name}`" for name in of["failed"]]
        lines += [f"- {pair} skipped {n}: {reason}" for reason, n in sorted(of["skipped"].items())]
    return "\n".join(lines) + "\n"


def _cell(of: dict[str, Any] | None) -> str:
    if of is None:
        return "not run"
    return _sum(sum((Counter(n) for n in of["files"].values()), Counter()))


def _sum(found: dict[str, int]) -> str:
    """3 passed, 1 failed"""
    return ", ".join(f"{found[kind]} {kind}" for kind in ("passed", "failed", "skipped") if found.get(kind))


def main(pairs: list[str]) -> int:
    """Run these pairs, or all. Returns 1 if a test failed."""
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for pair in pairs or [f"{a},{b}" for a in TORCH for b in TRANSFORMERS]:
        results[pair] = run(environment(*pair.split(",")))
        RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    PAGE.write_text(page(results))
    return int(any(of["failed"] for of in results.values()))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
