"""Write docs/api.md: what `autopar` and `autopar.integrations` export, with signatures and docstrings.

python docs/make_api.py            writes the page
python docs/make_api.py --check    fails when the page is out of date

Classes that no name stands for, because a function makes them, follow that function.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parent / "api.md"
PACKAGES = ("autopar", "autopar.integrations")
WIDTH = 110  # of a signature in one line
HEAD = """# API

Made by `make docs` from the docstrings of public names; change them there. How to use them:
[the guide](guide/training.md); options of `parallelize`: [options](options.md).

| name | what |
|---|---|
"""


class _Text:
    """An annotation as the source has it."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def render() -> str:
    """The page: a table of names, and a section for each."""
    rows, parts = [], []
    for package in PACKAGES:
        module = importlib.import_module(package)
        for name in sorted(module.__all__, key=str.lower):
            value = getattr(module, name)
            text = _doc(value) if callable(value) else importlib.import_module(module._HOME[name]).__doc__ or ""
            rows.append(f"| [`{package}.{name}`](#{_anchor(package, name)}) | {_first_sentence(text)} |\n")
            parts += _section(f"{package}.{name}", value, text)
            if (made := _made_by(value, set(module.__all__))) is not None:
                parts += _section(f"{made.__name__}, which {name} makes", made, _doc(made))
    return HEAD + "".join(rows) + "".join(parts)


def _anchor(package: str, name: str) -> str:
    return f"{package}.{name}".replace(".", "").lower()


def _doc(value: Any) -> str:
    return inspect.getdoc(value) or ""


def _first_sentence(text: str) -> str:
    paragraph = " ".join(text.partition("\n\n")[0].split())
    first = paragraph.partition(". ")[0].rstrip(".:")
    return first.replace("|", "\\|").replace("``", "`")


def _section(title: str, value: Any, text: str) -> Iterator[str]:
    """``text``: its docstring; of a table that of the file that it is in."""
    yield f"\n## {title}\n"
    if inspect.isclass(value):
        yield _block(_signature(value.__name__, value), text)
        for name, member in _members(value):
            if isinstance(member, property):
                yield _block(f"{value.__name__}.{name}", inspect.getdoc(member) or "")
            else:
                yield _block(_signature(f"{value.__name__}.{name}", member, bound=True), _doc(member))
    elif inspect.isroutine(value):
        yield _block(_signature(value.__name__, value), text)
    else:
        yield _block(f"{title.rpartition('.')[2]}: {type(value).__name__} of {', '.join(value)}", text)


def _block(head: str, text: str) -> str:
    """A signature, and below it the docstring."""
    body = "".join(f"    {line}".rstrip() + "\n" for line in text.splitlines())
    return f"\n```text\n{head}\n{body}```\n"


def _members(cls: type) -> Iterator[tuple[str, Any]]:
    """Public methods and properties of a class and of those of autopar that it is made from, which say what they do."""
    seen: set[str] = set()
    for base in cls.__mro__:
        if not base.__module__.startswith("autopar"):
            continue
        for name, member in vars(base).items():
            member = getattr(member, "__func__", member) if not isinstance(member, property) else member
            told = inspect.isfunction(member) or isinstance(member, property)
            if told and not name.startswith("_") and name not in seen and inspect.getdoc(member):
                seen.add(name)
                yield name, member


def _made_by(value: Any, public: set[str]) -> type | None:
    """The class of autopar that a function is annotated to return, unless it is public itself."""
    if not inspect.isfunction(value):
        return None
    annotation = value.__annotations__.get("return")
    found = value.__globals__.get(annotation) if isinstance(annotation, str) else annotation
    ours = inspect.isclass(found) and found.__module__.startswith("autopar")
    return found if ours and found.__name__ not in public else None


def _signature(name: str, value: Any, bound: bool = False) -> str:
    if isinstance(value, type) and issubclass(value, Exception):
        return f"class {name}({value.__bases__[0].__name__})"
    signature = inspect.signature(value)
    given = list(signature.parameters.values())[1 if bound else 0 :]
    parameters = [p.replace(annotation=_bare(p.annotation)) for p in given]
    signature = signature.replace(parameters=parameters, return_annotation=_bare(signature.return_annotation))
    if inspect.isclass(value):
        signature = signature.replace(return_annotation=inspect.Signature.empty)
    line = f"{name}{signature}"
    if len(line) <= WIDTH or not parameters:
        return line
    texts = _separated([str(p) for p in parameters], parameters)
    end = "" if signature.return_annotation is inspect.Signature.empty else f" -> {signature.return_annotation!r}"
    return f"{name}(\n" + "".join(f"    {text},\n" for text in texts) + f"){end}"


def _separated(texts: list[str], parameters: list[inspect.Parameter]) -> list[str]:
    """With the * behind which names must be given."""
    kinds = [p.kind for p in parameters]
    at = kinds.index(inspect.Parameter.KEYWORD_ONLY) if inspect.Parameter.KEYWORD_ONLY in kinds else None
    if at is None or inspect.Parameter.VAR_POSITIONAL in kinds:
        return texts
    return [*texts[:at], "*", *texts[at:]]


def _bare(annotation: Any) -> Any:
    return _Text(annotation) if isinstance(annotation, str) else annotation


def main(arguments: list[str]) -> int:
    """Write or check the page; returns the exit status."""
    text = render()
    if "--check" in arguments:
        return int(not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text)
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
