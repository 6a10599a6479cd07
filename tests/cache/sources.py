"""Sources of models for tests of keys: what may be edited in them, and what they must not read."""

from __future__ import annotations

import textwrap

HEAD = "import torch, os, time, math, functools, enum, dataclasses, numpy\nfrom torch import nn\n"
NET = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.scale, self.names, self.limits = 2.0, ["a", "b"], {"low": 1, "high": {3, 4}}
        self.act = lambda x: torch.tanh(x) * 3

    def forward(self, x, y=None, times=1):
        return ((self.down(self.act(self.up(x))) * self.scale - 1) ** 2).mean()
"""

CALLS = "        return ((self.down(self.act(self.up(x))) * self.scale - 1) ** 2).mean()\n"


def calling(text: str, before: str = "") -> str:
    """A model whose forward calls something, and what stands before it."""
    return before + NET.replace(CALLS, f"        return self.down(self.up(x) * {text}).mean()\n")


def holding(value: str, text: str, before: str = "import users_other\n") -> str:
    """A model that holds a value, and whose forward calls something."""
    held = calling(text, before).replace("self.scale, self.names", "self.held, self.scale, self.names")
    return held.replace("= 2.0,", f"= {value}, 2.0,")


EDITS: dict[str, tuple[str, str, str]] = {
    "forward": (NET, "- 1)", "- 2)"),
    "attribute": (NET, "self.scale, self.names", "self.scale, self.other"),
    "a number": (NET, "= 2.0,", "= 2.5,"),
    "the sign of zero": (NET.replace("= 2.0,", "= 0.0,"), "= 0.0,", "= -0.0,"),
    "whole or not": (NET, "= 2.0,", "= 2,"),
    "a set": (NET, "{3, 4}", "{3, 5}"),
    "order of a dict": (NET, '"low": 1, "high": {3, 4}', '"high": {3, 4}, "low": 1'),
    "lambda": (NET, "* 3", "* 4"),
    "a comment": (NET, "    def forward", "    # lines move\n    def forward"),
    "a constant of the file": (calling("SCALE", "SCALE = 2\n"), "SCALE = 2", "SCALE = 3"),
    "a helper": (calling("helper()", "def helper(): return 2\n"), "return 2", "return 3"),
    "a helper's helper": (
        calling("outer()", "def inner(): return 2\ndef outer(): return inner() + 1\n"), "return 2", "return 3",
    ),
    "a default": (calling("helper()", "def helper(a=2): return a\n"), "a=2", "a=3"),
    "a keyword's default": (calling("helper()", "def helper(*, a=2): return a\n"), "a=2", "a=3"),
    "a closure": (calling("helper()", "def make(n):\n    return lambda: n\nhelper = make(2)\n"), "make(2)", "make(3)"),
    "a decorator": (
        calling("helper()", "def twice(n):\n    def wrap(f):\n        return functools.wraps(f)(lambda: f() * n)\n"
        "    return wrap\n@twice(2)\ndef helper(): return 1\n"), "@twice(2)", "@twice(3)",
    ),
    "a cached function": (calling("helper()", "@functools.cache\ndef helper(): return 2\n"), "return 2", "return 3"),
    "a partial": (calling("helper()", "helper = functools.partial(lambda a: a, 2)\n"), ", 2)", ", 3)"),
    "a table of functions": (calling("TABLE['f']()", "TABLE = {'f': lambda: 2}\n"), "lambda: 2", "lambda: 3"),
    "an attribute of a class": (calling("C.n", "class C:\n    n = 2\n"), "n = 2", "n = 3"),
    "an inherited one": (calling("D.n", "class C:\n    n = 2\nclass D(C): pass\n"), "n = 2", "n = 3"),
    "a method of an object": (
        calling("o.f()", "class C:\n    def f(self): return 2\no = C()\n"), "return 2", "return 3",
    ),
    "a method's helper": (
        calling("o.f()", "def g(): return 2\nclass C:\n    def f(self): return g()\no = C()\n"), "return 2", "return 3",
    ),
    "an object made in it": (
        calling("C().n", "N = 2\nclass C:\n    def __init__(self): self.n = N\n"), "N = 2", "N = 3",
    ),
    "an operator of an object": (
        calling("(o + 1)", "N = 2\nclass C:\n    def __add__(self, other): return N\no = C()\n"), "N = 2", "N = 3",
    ),
    "a property": (
        calling("o.f", "N = 2\nclass C:\n    @property\n    def f(self): return N\no = C()\n"), "N = 2", "N = 3",
    ),
    "an attribute of an object": (
        calling("o.n", "class C: pass\no = C()\no.n = 2\n"), "o.n = 2", "o.n = 3",
    ),
    "a class's class": (
        calling("C.n", "class M(type):\n    @property\n    def n(cls): return 2\nclass C(metaclass=M): pass\n"),
        "return 2", "return 3",
    ),
    "a global by its text": (calling("globals()['SCALE']", "SCALE = 2\n"), "SCALE = 2", "SCALE = 3"),
    "a partial method": (
        calling("o.f()", "class C:\n    def g(self, n): return n\n    f = functools.partialmethod(g, 2)\no = C()\n"),
        "(g, 2)", "(g, 3)",
    ),
    "slots": (calling("o.n", "class C:\n    __slots__ = ('n',)\no = C()\no.n = 2\n"), "o.n = 2", "o.n = 3"),
    "a dataclass": (
        calling("o.n", "@dataclasses.dataclass\nclass C:\n    n: int = 2\no = C()\n"), "int = 2", "int = 3",
    ),
    "an enum": (calling("E.A.value", "class E(enum.Enum):\n    A = 2\n    B = 5\n"), "A = 2", "A = 3"),
    "a method named by a text": (
        calling("getattr(self, 'factor')()", "N = 2\n") + "    def factor(self): return N\n", "N = 2", "N = 3",
    ),
    "a method of the model": (
        calling("self.factor()", "N = 2\n") + "    def factor(self): return N\n", "N = 2", "N = 3",
    ),
    "a tensor of the file": (calling("T", "T = torch.tensor([2.0])\n"), "([2.0", "([3.0"),
    "an array of the file": (calling("float(T[0])", "T = numpy.array([2.0])\n"), "([2.0", "([3.0"),
    "a function inside": (calling("(lambda: 2)()"), "lambda: 2", "lambda: 3"),
    "a constant set": (calling("(1 if 2 in {2, 5} else 0)"), "{2, 5}", "{4, 5}"),
    "a tensor that a module holds": (
        NET.replace("self.scale,", "self.table, self.scale,").replace("= 2.0,", "= torch.ones(2), 2.0,"),
        "torch.ones(2)", "torch.zeros(2)",
    ),
    "an environment's variable": (calling("float(os.environ.get('USERS_N', '1'))"), "'1'", "'2'"),
}  # fmt: skip

READS = {
    "the clock": calling("time.time()"),
    "the clock, by name": calling("now()", "from time import perf_counter as now\n"),
    "the date": calling("datetime.now().hour", "from datetime import datetime\n"),
    "a file": calling("float(open('n').read())"),
    "a path": calling("float(Path('n').read_text())", "from pathlib import Path\n"),
    "a file, behind a helper": calling("helper()", "def helper(): return float(open('n').read())\n"),
    "a folder": calling("len(os.listdir('.'))"),
    "a name made up": calling("float(os.environ[f'users_{x.dim()}'])"),
    "a text that is code": calling("eval('1 + 1')"),
    "a module by a text": calling("__import__('users_other').n"),
    "a module that is loaded": calling("sys.modules['users_other'].N", "import sys\n"),
    "the clock, in a value": holding("time", "self.held.time()", ""),
    "its process": calling("os.getpid()"),
    "a file in an object that it makes": calling(
        "C().n", "class C:\n    def __init__(self): self.n = float(open('n').read())\n"
    ),
}

WITHIN = """
        def inner():
            from users_other import helper
            return helper()
        return self.up(x).mean() * inner()
"""
GATE = "    def gate({0}): return users_other.N\n"
OTHERS = (  # what calls a file of the user's
    calling("users_other.helper()", "import users_other\n"),
    calling("users_other.made_up", "import users_other\n"),
    calling("helper()", "from users_other import helper\n"),
    NET.replace(CALLS, "        import users_other\n        return self.up(x).mean() * users_other.helper()\n"),
    NET.replace(CALLS, "        from users_other import helper\n        return self.up(x).mean() * helper()\n"),
    NET.replace(CALLS, WITHIN),
    # in a value, which is read under a name of any code
    holding("users_other", "self.held.helper()"),
    holding("{'a': users_other}", "self.held['a'].N"),
    holding("functools.partial(getattr, users_other, 'N')", "self.held()"),
    calling("f()", "import users_other\ndef f(m=users_other): return m.helper()\n"),
    calling("f()", "import users_other\ndef make(m):\n    return lambda: m.N\nf = make(users_other)\n"),
    # under a name that is a text elsewhere
    calling("get(users_other)", "import users_other, operator\nget = operator.attrgetter('N')\n"),
    holding("'N'", "getattr(users_other, self.held)"),
    holding("'N'", "users_other.__dict__[self.held]"),
    holding("{'a': 'gate'}", "getattr(self, self.held['a'])()") + GATE.format("self"),
    holding("'gate'", "globals()[self.held]()") + textwrap.dedent(GATE).format(""),
)
