"""Who may import whom, and the few other rules of the house, read off the source of every file."""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import networkx as nx
import pytest

ROOT = Path(__file__).resolve().parents[2]
MOST_FILES = 25  # of one folder
MOST_LINES = 700  # of one file

# file -> {imported or used private name: reason}. Files of the adapters need no entry.
PRIVATE_NAMES_ALLOWED: dict[str, dict[str, str]] = {}

# torch documents it as public, in spite of its name.
DOCUMENTED = {"torch._check"}

# Who may import whom: a room (or a file beside the rooms) imports itself and what stands on lower floors.
FLOORS: tuple[set[str], ...] = (
    {"spelling", "errors", "files", "adapters", "version", "zero_stages"},
    {"registry", "lift_to_float64", "private_folder", "values", "capture.branches", "capture.reads"},
    {"chips", "token_dispatchers"},
    {"ops", "schedule", "precision", "ac_policies", "capture.side_effects"},
    {
        "capture.layer_dedup",
        "planner.recompute",
        "runtime.schedules",
    },  # schedules are data: the planner takes them out of the registry
    {"capture.custom_autograd", "capture.module_state", "capture.flex"},
    {"capture.trace"},
    {"ir"},
    {"attention", "capture"},
    {"options"},
    {"plan"},
    {"rules", "steps"},
    {"cost", "rewrite"},
    {"planner.experts", "planner.pipeline"},
    {
        "planner",
        "passes.canonicalize",
        "passes.canonicalize.experts",
        "passes.autodiff",
        "passes.step",
        "passes.attention",
    },
    {"passes.partition", "passes.stage"},
    {"passes"},
    {"compile", "report"},
    {"report.html"},
    {"report.dump"},
    {"runtime.fault"},
    {"runtime.mesh"},
    {"runtime.comm"},
    {"runtime.consistency", "runtime.params", "runtime.health"},
    {"runtime.exec", "runtime.inputs", "runtime.optim"},
    {"runtime.checkpoint", "runtime.guards"},
    {"runtime.module"},
    {"runtime.training"},
    {"runtime.replicas"},
    {"runtime"},
    {"serving"},
    {"serve_model"},
    {"generation", "serve_roles"},
    {"cache"},
    {"auto"},
    {"api"},
    {"verification", "models"},
    {"integrations.http"},
    {"cli", "integrations", "testing"},
    {"autopar", "__main__"},
)
# What runs step graphs knows nothing of how they were made.
UNKNOWN_TO = {"runtime": {"compile", "planner", "passes", "report"}}

SMALL_LIBRARIES = {
    "cloudpickle", "torch", "networkx", "numpy", "safetensors", "rich", "scipy", "sympy", "tqdm", "autopar",
}  # fmt: skip
EXTRA_LIBRARIES = {
    "models": {"transformers", "accelerate"},
    "passes": set(),
    "runtime": set(),
    "core": {"flash_attn", "triton"},
    "integrations": {
        "transformers",
        "accelerate",
        "fastapi",
        "starlette",
        "uvicorn",
        "openai",
        "prometheus_client",
        "llguidance",
    },
    "serving": {"transformers"},  # in functions of `generate`, for its arguments and results
}

# Only here process groups are made.
MAKES_GROUPS = {"autopar/runtime/mesh/process_groups.py"}
GROUP_MAKERS = re.compile(r"\b(new_group|new_subgroups\w*|split_group)\(")


@functools.cache
def sources(*folders: str) -> list[Path]:
    """Python files of top-level folders."""
    return [file for folder in folders for file in sorted((ROOT / folder).rglob("*.py"))]


DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
PACKAGE = sources("autopar")


@functools.cache
def trees() -> dict[Path, ast.Module]:
    """Every file of the package, parsed: when it is asked for, not whenever tests are collected."""
    return {file: ast.parse(text_of(file)) for file in PACKAGE}


@functools.cache
def nodes(file: Path) -> list[ast.AST]:
    """All of a file of the package."""
    return [*ast.walk(trees()[file])]


@functools.cache
def text_of(file: Path) -> str:
    return file.read_text(encoding="utf-8")


def relative(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


def area(file: Path) -> str:
    """The folder of the package that a file is in, if its libraries are listed; else core."""
    folder = file.relative_to(ROOT).parts[1]
    return folder if folder in EXTRA_LIBRARIES else "core"


def module_of(file: Path) -> list[str]:
    """Parts of the dotted name of the package that a file is in."""
    return list(file.relative_to(ROOT).parent.parts)


@functools.cache
def imports(file: Path) -> list[tuple[str, int]]:
    """(absolute dotted name, line); ``from a import b`` gives a.b."""
    return [*_imports(file)]


def _imports(file: Path) -> Iterator[tuple[str, int]]:
    for node in nodes(file):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = module_of(file)
            base = package[: len(package) - node.level + 1] if node.level else []
            prefix = ".".join([*base, *(node.module.split(".") if node.module else [])])
            yield from ((f"{prefix}.{alias.name}", node.lineno) for alias in node.names)


def dotted(file: Path) -> str:
    """autopar.ir.graph of autopar/ir/graph.py; a package's name of its __init__."""
    parts = [*module_of(file), file.stem]
    return ".".join(parts[:-1] if file.stem == "__init__" else parts)


MODULES = {dotted(file): file for file in PACKAGE}


def reached(file: Path) -> Iterator[tuple[str, int]]:
    """(module of the project, line) of every import in a file, those inside of functions included."""
    for name, line in imports(file):
        if name.split(".")[0] == "autopar":
            yield name if name in MODULES else name.rpartition(".")[0], line


PACKAGES = {module for module, file in MODULES.items() if file.name == "__init__.py"}
ONE_ROOM = {"adapters", "models", "ops"}  # with what lies in them


def room(module: str) -> str:
    """The room of a module ("runtime.exec"), or the file beside the rooms."""
    package = module if module in PACKAGES else module.rpartition(".")[0]
    if package == "autopar":
        return module.rpartition(".")[2]
    name = package.partition(".")[2]
    top = name.partition(".")[0]
    return top if top in ONE_ROOM else name


def circles(arrows: Iterable[tuple[str, str]]) -> list[list[str]]:
    """Names that reach each other."""
    graph = nx.DiGraph(pair for pair in arrows if pair[0] != pair[1])
    return [sorted(names) for names in nx.strongly_connected_components(graph) if len(names) > 1]


def test_arrows_point_down() -> None:
    """A room imports what stands on lower floors, and itself. (What a registry or `importlib` loads by name is no
    arrow: so the models of a library are loaded when a model is one of them.)"""
    floor = {name: i for i, names in enumerate(FLOORS) for name in names}
    wrong = []
    for module, file in MODULES.items():
        here = room(module)
        for target, line in reached(file):
            there = room(target)
            unknown = UNKNOWN_TO.get(here.partition(".")[0], set())
            if here != there and (floor[there] >= floor[here] or there.partition(".")[0] in unknown):
                wrong.append(f"{relative(file)}:{line}: {here} imports {there} ({target})")
    assert not wrong, "\n".join(wrong)


def test_every_room_has_a_floor() -> None:
    assert {room(module) for module in MODULES} == set().union(*FLOORS)


def test_nothing_imports_in_a_circle() -> None:
    """Neither files nor rooms; annotations count as everything else."""
    arrows = [(module, target) for module, file in MODULES.items() for target, _ in reached(file)]
    assert not circles(arrows)
    assert not circles((room(a), room(b)) for a, b in arrows)


def test_circles_are_found() -> None:
    assert circles([("a", "b"), ("b", "c"), ("c", "a"), ("c", "d"), ("d", "d")]) == [["a", "b", "c"]]


def test_imports_are_written_in_full() -> None:
    """`from . import x` would be no dotted name that somebody can search."""
    relatives = [n for file in PACKAGE for n in nodes(file) if isinstance(n, ast.ImportFrom) and n.level]
    assert not relatives


def test_rooms_say_what_is_in_them() -> None:
    """The docstring of a room: what stands there, and who may import it."""
    rooms = [f for f in PACKAGE if f.name == "__init__.py"]
    short = [relative(f) for f in rooms if len((ast.get_docstring(trees()[f]) or "").splitlines()) < 4]
    assert not short


def test_libraries() -> None:
    """Only torch and small libraries, and transformers only in models/ and integrations/."""
    wrong = []
    for file in PACKAGE:
        allowed = SMALL_LIBRARIES | EXTRA_LIBRARIES[area(file)]
        for name, line in imports(file):
            top = name.split(".")[0]
            if top not in allowed and top not in sys.stdlib_module_names:
                wrong.append(f"{relative(file)}:{line} imports {name}")
    assert not wrong, "\n".join(wrong)


# --- private names ------------------------------------------------------------------------------------


def is_adapter(file: Path) -> bool:
    """Whether a file may use private names of torch or transformers."""
    name = relative(file)
    return (
        name.startswith(("autopar/adapters/", "autopar/capture/", "autopar/integrations/"))
        or re.match(r"autopar/models/hf\w*\.py$", name) is not None
    )


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


@functools.cache
def our_private_names() -> set[str]:
    """Private names that the project defines: functions, classes, methods, fields, variables, attributes of self."""
    names = {"_asdict", "_replace", "_fields"}  # the public part of named tuples
    for file in PACKAGE:
        for node in nodes(file):
            if isinstance(node, DEFINITIONS):
                names.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                owner = node.value
                if isinstance(owner, ast.Name) and owner.id in ("self", "cls"):
                    names.add(node.attr)
    return names


def private_uses(file: Path, ours: set[str]) -> Iterator[tuple[str, int]]:
    for name, line in imports(file):
        if name.split(".")[0] != "autopar" and any(is_private(part) for part in name.split(".")):
            yield name, line
    for node in nodes(file):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in ours:
            text = ast.unparse(node)
            # aten's own operators may begin with an underscore: torch.ops.aten._to_copy is a public operator name
            if text not in DOCUMENTED and not re.search(r"\b_?(aten|prims|ops(\.\w+)?)\._\w+", text):
                yield node.attr, node.lineno


def test_private_names_of_libraries_stay_in_adapters() -> None:
    ours = our_private_names()
    wrong = []
    for file in PACKAGE:
        if not is_adapter(file):
            allowed = PRIVATE_NAMES_ALLOWED.get(relative(file), {})
            wrong += [
                f"{relative(file)}:{line} uses {name}" for name, line in private_uses(file, ours) if name not in allowed
            ]
    assert not wrong, "\n".join(wrong)


def test_exceptions_are_needed_and_have_reasons() -> None:
    ours = our_private_names()
    for name, allowed in PRIVATE_NAMES_ALLOWED.items():
        used = {use for use, _ in private_uses(ROOT / name, ours)}
        for private, reason in allowed.items():
            assert reason, f"{name}: {private} is allowed without a reason"
            assert private in used, f"{name}: {private} is allowed but not used"


def test_adapters_are_imported_by_few() -> None:
    """Private names do not leave an adapter: nothing private is imported from one."""
    wrong = [
        f"{relative(file)}:{line} imports {name}"
        for file in PACKAGE
        for name, line in imports(file)
        if name.startswith("autopar.adapters.") and is_private(name.rpartition(".")[2])
    ]
    assert not wrong, "\n".join(wrong)


# --- process groups -----------------------------------------------------------------------------------


def test_passes_never_touch_a_process_group() -> None:
    wrong = [
        f"{relative(file)}:{line} imports {name}"
        for file in PACKAGE
        if area(file) == "passes"
        for name, line in imports(file)
        if name.startswith("torch.distributed")
    ]
    wrong += [
        f"{relative(file)}:{node.lineno} uses torch.distributed"
        for file in PACKAGE
        if area(file) == "passes"
        for node in nodes(file)
        if isinstance(node, ast.Attribute) and node.attr == "distributed" and ast.unparse(node) == "torch.distributed"
    ]
    assert not wrong, "\n".join(wrong)


def test_one_file_makes_process_groups() -> None:
    wrong = [relative(f) for f in PACKAGE if GROUP_MAKERS.search(text_of(f)) and relative(f) not in MAKES_GROUPS]
    assert not wrong, f"process groups are made in {wrong}, not only in {sorted(MAKES_GROUPS)}"


# --- readability --------------------------------------------------------------------------------------


def test_files_are_short() -> None:
    lengths = {relative(f): len(text_of(f).splitlines()) for f in [*PACKAGE, *sources("tests", "docs")]}
    long = {name: length for name, length in lengths.items() if length > MOST_LINES}
    assert not long, f"longer than {MOST_LINES} lines: {long}"


def test_folders_are_small() -> None:
    counts = Counter(file.parent for file in PACKAGE if file.name != "__init__.py")
    assert not {relative(folder): count for folder, count in counts.items() if count > MOST_FILES}


def test_public_names_have_docstrings() -> None:
    """Modules (that hold anything), and their public functions and classes."""
    wrong = []
    for file, tree in trees().items():
        if tree.body and not ast.get_docstring(tree):
            wrong.append(f"{relative(file)}: the module")
        public = [s for s in tree.body if isinstance(s, DEFINITIONS) and not s.name.startswith("_")]
        wrong += [f"{relative(file)}:{s.lineno} {s.name}" for s in public if not ast.get_docstring(s)]
    assert not wrong, "without a docstring:\n" + "\n".join(wrong)


@pytest.mark.parametrize("word", ["TO" + "DO", "FIX" + "ME", "NotImplemented" + "Error"])
def test_nothing_is_left_for_later(word: str) -> None:
    found = [relative(f) for f in [*PACKAGE, *sources("tests", "docs")] if word in text_of(f)]
    assert not found, f"{word} in {found}"
