"""What a function reads is part of its key, whatever holds it: the same file, run with another number, is another key.

Two and three stand for that number. What is neither read nor told apart raises."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autopar.cache.fingerprint import Fingerprint
from autopar.cache.fingerprint_values import Uncacheable

HEAD = """
import array, collections, contextvars, dataclasses, datetime, decimal, enum, fractions, functools, itertools, logging
import operator, os, pathlib, queue, random, re, threading, types, typing, uuid, weakref
import numpy as np
import torch
from torch import nn
class Plain: pass
o = Plain()
o.n = 2
local = threading.local()
local.n, local.d = 2, {"a": 2}
"""
HELD = {  # what stands in the file, and what the function computes
    "local": ("", "local.n"),
    "a dict in one": ("", "local.d['a']"),
    "by a text": ("", "getattr(local, 'n', 1)"),
    "in an object": ("x = types.SimpleNamespace(a=[local])", "x.a[0].n"),
    "in a default": ("def g(l=local): return l.n", "g()"),
    "in a closure": ("def make(l):\n    return lambda: l.n\ng = make(local)", "g()"),
    "its method": ("g = local.__getattribute__", "g('n')"),
    "a class of it": ("class L(threading.local):\n    def __init__(self): self.n = 2\nx = L()", "x.n"),
    "its slots": ("class L(threading.local):\n    __slots__ = ('n',)\nx = L()\nx.n = 2", "x.n"),
    "a context variable": ("v = contextvars.ContextVar('v')\nv.set(2)", "v.get()"),
    "its default": ("v = contextvars.ContextVar('v', default=2)", "v.get()"),
    "in a dict": ("v = contextvars.ContextVar('v')\nv.set(2)\nx = {'a': v}", "x['a'].get()"),
    "a namespace": ("class S(types.SimpleNamespace): pass\nx = S(n=2)", "x.n"),
    "a proxy of a dict": ("x = types.MappingProxyType({'a': 2})", "x['a']"),
    "an attribute of a dict": ("class D(dict): pass\nx = D()\nx.n = 2", "x.n"),
    "a default dict": ("x = collections.defaultdict(lambda: 2)", "x['b']"),
    "an ordered dict": ("class D(collections.OrderedDict): pass\nx = D(a=2)", "x['a']"),
    "views": ("x = {1: 2}.items()", "list(x)[0]"),
    "a reference": ("x = weakref.ref(o)", "x().n"),
    "a dict of references": ("x = weakref.WeakValueDictionary(a=o)", "x['a'].n"),
    "a method's reference": (
        "class C:\n    def f(self): return self.n\nc = C()\nc.n = 2\nx = weakref.WeakMethod(c.f)", "x()()",
    ),
    "a private slot": ("class C:\n    __slots__ = ('__n',)\n    def __init__(self): self.__n = 2\nx = C()", "x"),
    "a member of an enum": ("class E(enum.Enum):\n    A = 1\nE.A.more = 2", "E.A.more"),
    "flags": ("class F(enum.Flag):\n    A = 1\n    B = 2\n    C = 8\nx = F.A | F.B", "x.value"),
    "a named tuple": ("class P(typing.NamedTuple):\n    a: int\n    b: int = 1\nx = P(2)", "x.a"),
    "its default value": ("class P(typing.NamedTuple):\n    a: int = 2", "P().a"),
    "a class of one": ("class P(collections.namedtuple('P', 'a')): pass\nx = P(1)\nx.n = 2", "x.n"),
    "a typed dict": ("class T(typing.TypedDict):\n    a: int\nx = T(a=2)", "x['a']"),
    "a dataclass": ("@dataclasses.dataclass(frozen=True, slots=True)\nclass C:\n    n: int\nx = C(2)", "x.n"),
    "a factory": (
        "@dataclasses.dataclass\nclass C:\n    n: Any = dataclasses.field(default_factory=lambda: 2)", "C().n",
    ),
    "a slot of another name": ("class C:\n    __slots__ = iter(('n',))\nx = C()\nx.n = 2", "x.n"),
    "an attribute of tensors": ("torch.Tensor.users_n = 2", "torch.Tensor.users_n"),
    "a gradient": ("x = torch.zeros(1, requires_grad=True)\nx.grad = torch.tensor([2.0])", "x.grad"),
    "an array": ("x = array.array('i', [2])", "x[0]"),
    "memory": ("x = memoryview(bytes([2]))", "x[0]"),
    "objects in an array": ("x = np.array([o, None], dtype=object)", "x[0].n"),
    "an attribute of an array": ("class A(np.ndarray): pass\nx = np.zeros(1).view(A)\nx.n = 2", "x.n"),
    "a masked array": ("x = np.ma.array([7.0], fill_value=2)", "float(x.fill_value)"),
    "a type of numpy": ("x = np.dtype([('a', 'i4', 2)])", "x.itemsize"),
    "an attribute of a tensor": ("x = torch.zeros(1)\nx.n = 2", "x.n"),
    "an attribute of torch's class": ("nn.Linear.users_n = 2", "nn.Linear.users_n"),
    "a fraction": ("class F(fractions.Fraction): pass\nx = F(1)\nx.n = 2", "x.n"),
    "a number with an attribute": ("class F(complex): pass\nx = F(1)\nx.n = 2", "x.n"),
    "a path": ("class P(pathlib.PurePosixPath): pass\nx = P('/a')\nx.n = 2", "x.n"),
    "a date": ("class D(datetime.datetime): pass\nx = D(2000, 1, 1)\nx.n = 2", "x.n"),
    "a time": ("x = datetime.time(2)", "x.hour"),
    "a time zone": ("x = datetime.datetime(2000, 1, 1, tzinfo=datetime.timezone(datetime.timedelta(hours=2)))", "x"),
    "a pattern": ("x = re.compile('2')", "x"),
    "a number": ("x = uuid.UUID(int=2)", "x.int"),
    "a method of a number": ("x = (2).__add__", "x(1)"),
    "a call of a method": ("x = operator.methodcaller('__add__', 2)", "x(1)"),
    "a partial's class": ("class P(functools.partial): pass\nx = P(lambda a: a, 2)", "x()"),
    "functions by types": ("g = functools.singledispatch(lambda a: 1)\ng.register(int, lambda a: 2)", "g(1)"),
    "the longest a queue may be": ("x = collections.deque([1], maxlen=2)", "x.maxlen"),
    "a queue": ("x = queue.Queue()\nx.put(2)", "x.queue[0]"),
    "an event": ("class E(threading.Event): pass\nx = E()\nx.n = 2", "x.n"),
    "what a logger tells": ("x = logging.getLogger('users.a')\nx.setLevel(20 + 2)", "x.isEnabledFor(22)"),
    "what a logger has": ("x = logging.getLogger('users.a')\nx.n = 2", "x.n"),
    "an error": ("x = ValueError(o)", "x.args[0].n"),
    "a type's metadata": ("x = typing.Annotated[int, o]", "x.__metadata__[0].n"),
    "a cell": ("def make(a):\n    return lambda: a\nx = make(2).__closure__[0]", "x.cell_contents"),
    "the environment": ("e = os.environ\ne['USERS_N'] = '2'", "e['USERS_N']"),
    "the environment's function": ("g = os.getenv\nos.environ['USERS_N'] = '2'", "g('USERS_N')"),
}  # fmt: skip
UNTOLD = {
    "an iterator": ("x = iter([2])", "next(x)"),
    "a counter": ("x = itertools.count(2)", "next(x)"),
    "a generator": ("def g(n):\n    while True: yield n\nx = g(2)", "next(x)"),
    "draws": ("x = random.Random(2)", "x.random()"),
    "draws of numpy": ("x = np.random.default_rng(2)", "x.random()"),
    "draws of torch": ("x = torch.Generator().manual_seed(2)", "x.initial_seed()"),
    "a proxy": ("x = weakref.proxy(o)", "x.n"),
    "a function of numpy's kind": ("x = np.frompyfunc(lambda a: 2, 1, 1)", "x(1)"),
    "a file of a class": ("class M(types.ModuleType):\n    @property\n    def n(s): return 2\nm = M('m')", "m.n"),
    "a context": ("x = contextvars.copy_context()", "x"),
    "the thread": ("", "threading.current_thread().n"),
    "annotations": ("class C:\n    a: 2", "C.__annotations__['a']"),
    "a text about it": ("class C:\n    '2'", "C.__doc__"),
    "what was kept": ("N = [2]\n@functools.cache\ndef g(): return N[0]\ng()\nN[0] = 1", "g()"),
    "what a method kept": (
        "class C:\n    @functools.cache\n    def f(self): return self.n\nx = C()\nx.n = 2\nx.f()", "x.f()",
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("USERS_N", "")
    yield
    sys.modules.pop("users_held", None)
    for cls in (nn.Linear, torch.Tensor):
        if "users_n" in vars(cls):
            del cls.users_n


def digest(before: str, text: str, folder: Path, number: str = "2") -> str:
    """Of a function of a file that says 2, run as if it said another number."""
    source = f"{HEAD}{before}\ndef f(): return {text}\n"
    path = folder / "users_held.py"
    path.write_text(source)
    module: Any = types.ModuleType("users_held")
    module.__file__ = str(path)
    sys.modules["users_held"] = module
    head, call = source[: source.index("def f()")], source[source.index("def f()") :]
    exec(compile(head.replace("2", number) + call, str(path), "exec"), module.__dict__)
    reached = Fingerprint()
    reached.add("f", module.f)
    return reached.digest()


@pytest.mark.parametrize("name", HELD)
def test_what_is_held_counts(name: str, tmp_path: Path) -> None:
    before, text = HELD[name]
    first = digest(before, text, tmp_path)
    assert first == digest(before, text, tmp_path) != digest(before, text, tmp_path, "3")


@pytest.mark.parametrize("name", UNTOLD)
def test_what_cannot_be_told(name: str, tmp_path: Path) -> None:
    with pytest.raises(Uncacheable):
        digest(*UNTOLD[name], tmp_path)


def test_what_a_function_keeps(tmp_path: Path) -> None:
    """Of what is as it was before the function kept anything, it would find the same in another process; but who reads
    a step there would leave it empty, so one that is filled is another."""
    before = (
        "N = [2]\n@functools.cache\ndef g(a): return a + N[0]\n@functools.cache\ndef h(a): return a + torch.pi\nh(1)"
    )
    first = digest(before, "g(1) + h(1)", tmp_path)
    module: Any = sys.modules["users_held"]

    def now() -> str:
        reached = Fingerprint()
        reached.add("f", module.f)
        return reached.digest()

    module.f()
    filled = now()
    module.f()
    assert now() == filled != first
    module.N[0] = 4
    with pytest.raises(Uncacheable, match="g, which keeps results"):
        now()
    module.g.cache_clear()
    assert now() != first


def test_what_libraries_know_of_packages_has_no_order() -> None:
    """Which distributions are installed comes in the order of a set, another one in each process."""
    first, second = {"a": ["x"], "b": ["y", "z"]}, {"b": ["y", "z"], "a": ["x"]}
    facts = []
    for lenient in (True, False):
        for value in (first, second):
            reached = Fingerprint()
            reached._lenient = lenient
            reached._walk(value)
            facts.append(reached.facts)
    assert facts[0] == facts[1] and facts[2] != facts[3]
