"""A program that has run goes on as PyG after anything that code of the layer reads has changed."""

import importlib
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from textwrap import indent
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import pyg_accel

N, E, WIDTH = 12, 60, 4
WARM = 3
_names = count()
HEAD = """
import abc, argparse, array, builtins, collections, contextvars, copy, dataclasses, enum, functools, importlib
import inspect, itertools, math, operator, os, pickle, random, sys, threading, types, typing, weakref
import numpy as np
import torch
import torch_geometric
from torch_geometric.data import Data
from torch_geometric.nn import MessagePassing
from torch_geometric.nn.aggr import Aggregation, SumAggregation
class Box:
    def __init__(self, a=2.0):
        self.a = a
class Plain(torch.nn.Module):
    def forward(self, x):
        return x
"""


class Read(NamedTuple):
    """A way to read a number: code of the module, of the constructor, of the read, of changes."""

    read: str
    change: str
    init: str = ""
    module: str = ""
    back: str = ""


CLASS = "class Conf:\n    a = 2.0\n"
OWN = "self.a = 2.0"
FAKE = """
for _name in ("fake_pkg", "fake_pkg.conf"):
    sys.modules[_name] = types.ModuleType(_name)
sys.modules["fake_pkg"].__path__ = []
sys.modules["fake_pkg"].conf = sys.modules["fake_pkg.conf"]
sys.modules["fake_pkg.conf"].A = 2.0
fake_pkg = sys.modules["fake_pkg"]
"""
SET = 'sys.modules["fake_pkg.conf"].A = {}'


def changing(target: str, read: str, init: str = "", module: str = "") -> Read:
    """Read what an assignment changes from 2.0 to 5.0 and back."""
    return Read(read, f"{target} = 5.0", init, module, f"{target} = 2.0")


READS: dict[str, Read] = {
    # names
    "attribute": changing("o.a", "self.a", OWN),
    "global": changing("A", "A", module="A = 2.0"),
    "global of builtins": changing("builtins.TEST_A", "TEST_A", module="builtins.TEST_A = 2.0"),
    "global over builtins": Read("abs(-2.0)", "abs = lambda v: 5.0", back="del abs"),
    "closure": Read("get()", "put(5.0)", back="put(2.0)", module="""
def made():
    v = 2.0
    def get(): return v
    def put(n):
        nonlocal v
        v = n
    return get, put
get, put = made()"""),
    "default": Read("f()", "f.__defaults__ = (5.0,)", back="f.__defaults__ = (2.0,)",
                    module="def f(a=2.0): return a"),
    "default of a keyword": Read("f()", "f.__kwdefaults__['a'] = 5.0", back="f.__kwdefaults__ = {'a': 2.0}",
                                 module="def f(*, a=2.0): return a"),
    "mutable default": changing("L[0]", "f()", module="L = [2.0]\ndef f(a=L): return a[0]"),
    "code of a function": Read("f()", "f.__code__ = g.__code__", module="def f(): return 2.0\ndef g(): return 5.0"),
    "rebound function": Read("f()", "f = g", module="def f(): return 2.0\ndef g(): return 5.0"),
    "attribute of a function": changing("f.a", "f.a", module="def f(): return f.a\nf.a = 2.0"),
    "attribute of its own": changing("f.a", "f()", module="def f(): return f.a\nf.a = 2.0"),
    "import": Read("f()", SET.format(5.0), back=SET.format(2.0), module=FAKE + "def f():\n    import fake_pkg.conf\n    return fake_pkg.conf.A"),
    "import from": Read("f()", SET.format(5.0), back=SET.format(2.0), module=FAKE + "def f():\n    from fake_pkg.conf import A\n    return A"),
    "module replaced": Read("f()", "sys.modules['fake_pkg.conf'] = types.SimpleNamespace(A=5.0)", module=FAKE + "def f():\n    from fake_pkg.conf import A\n    return A"),
    "sys.modules": Read("sys.modules['fake_pkg.conf'].A", SET.format(5.0), back=SET.format(2.0), module=FAKE),
    "package.module": Read("fake_pkg.conf.A", SET.format(5.0), back=SET.format(2.0), module=FAKE),
    "__import__": Read("__import__('fake_pkg.conf').conf.A", SET.format(5.0), module=FAKE),
    "import_module": Read("importlib.import_module('fake_pkg.conf').A", SET.format(5.0), module=FAKE),
    "__getattr__ of a module": changing("STORE['a']", "fake_pkg.conf.B", module=FAKE + "STORE = {'a': 2.0}\nfake_pkg.conf.__getattr__ = lambda name: STORE['a']"),
    # classes
    "class": changing("Conf.a", "Conf.a", module=CLASS),
    "class in an attribute": changing("Conf.a", "self.c.a", "self.c = Conf", CLASS),
    "class in a list": changing("Conf.a", "self.c[0].a", "self.c = [Conf]", CLASS),
    "class of an object": changing("Conf.a", "self.c.a", "self.c = Conf()", CLASS),
    "class, hidden by an object": Read("self.c.a", "o.c.a = 5.0", "self.c = Conf()", CLASS, "del o.c.a"),
    "own class": changing("type(o).a", "self.a", init="type(self).a = 2.0"),
    "own class by name": changing("type(o).a", "type(self).a", init="type(self).a = 2.0"),
    "own class, hidden": Read("self.a", "o.a = 5.0", "type(self).a = 2.0", back="del o.a"),
    "base class, hidden": Read("self.c.a", "Low.a = 5.0", "self.c = Low()", CLASS + "class Low(Conf): pass", "del Low.a"),
    "class of a module": changing("Net.a", "Net.a", module="class Net(torch.nn.Module):\n    a = 2.0"),
    "nested class": changing("Conf.Low.a", "Conf.Low.a", module="class Conf:\n    class Low:\n        a = 2.0"),
    "metaclass": changing("Meta.a", "Conf.a", module="class Meta(type):\n    a = 2.0\nclass Conf(metaclass=Meta): pass"),
    "property of a metaclass": changing("A", "Conf.a", module="A = 2.0\nclass Meta(type):\n    @property\n    def a(cls): return A\nclass Conf(metaclass=Meta): pass"),
    "__getattr__ of a metaclass": changing("A", "Conf.a", module="A = 2.0\nclass Meta(type):\n    def __getattr__(cls, name): return A\nclass Conf(metaclass=Meta): pass"),
    "bases": Read("self.c.a", "Low.__bases__ = (Other,)", "self.c = Low()", CLASS + "class Other:\n    a = 5.0\nclass Low(Conf): pass", "Low.__bases__ = (Conf,)"),
    "class of an object swapped": Read("self.c.a", "o.c.__class__ = Other", "self.c = Conf()", CLASS + "class Other:\n    a = 5.0", "o.c.__class__ = Conf"),
    "isinstance": Read("(5.0 if isinstance(self.c, Other) else 2.0)", "o.c.__class__ = Other", "self.c = Conf()", CLASS + "class Other: pass", "o.c.__class__ = Conf"),
    "isinstance of a registered class": Read("(5.0 if isinstance(self.c, Abstract) else 2.0)", "Abstract.register(Conf)", "self.c = Conf()", CLASS + "class Abstract(abc.ABC): pass"),
    "__instancecheck__": changing("A", "(5.0 if isinstance(self.c, Conf) else 2.0)", "self.c = Box()", "A = 2.0\nclass Meta(type):\n    def __instancecheck__(cls, o): return A > 3\nclass Conf(metaclass=Meta): pass"),
    "subclasses": Read("(2.0 + len(Conf.__subclasses__()))", "class Low(Conf): pass", module=CLASS),
    "Enum": Read("Mode.X.value[0]", "Mode.X.value[0] = 5.0", module="class Mode(enum.Enum):\n    X = [2.0]", back="Mode.X.value[0] = 2.0"),
    "attribute of an Enum": changing("Mode.X.a", "Mode.X.a", module="class Mode(enum.Enum):\n    X = 1\nMode.X.a = 2.0"),
    "attribute of an Enum of the layer": changing("Mode.X.a", "self.m.a", "self.m = Mode.X", "class Mode(enum.Enum):\n    X = 1\nMode.X.a = 2.0"),
    "class of an Enum": changing("Mode.extra", "self.m.extra", "self.m = Mode.X", "class Mode(enum.Enum):\n    X = 1\nMode.extra = 2.0"),
    "property of an Enum": changing("A", "self.m.extra", "self.m = Mode.X", "A = 2.0\nclass Mode(enum.Enum):\n    X = 1\n    @property\n    def extra(self): return A"),
    "Enum member replaced": Read("self.m.value", "o.m = Mode.Y", "self.m = Mode.X", "class Mode(enum.Enum):\n    X = 2.0\n    Y = 5.0", "o.m = Mode.X"),
    "_value_ of an Enum": changing("Mode.X._value_", "self.m.value", "self.m = Mode.X", "class Mode(enum.Enum):\n    X = 2.0"),
    # functions
    "partial": changing("o.f.keywords['a']", "self.f()", "self.f = functools.partial(g, a=2.0)", "def g(a): return a"),
    "attribute of a partial": changing("o.f.a", "self.f.a", "self.f = functools.partial(g, a=2.0)\nself.f.a = 2.0", "def g(a): return a"),
    "property": changing("o._v", "self.p", "self._v = 2.0\ntype(self).p = property(lambda self: self._v)"),
    "property replaced": Read("self.p", "type(o).p = property(lambda self: 5.0)", "type(self).p = property(lambda self: 2.0)"),
    "cached_property": changing("o.c.v", "self.c.p", "self.c = Conf()", "class Conf:\n    v = 2.0\n    @functools.cached_property\n    def p(self): return self.v"),
    "cached value": Read("self.c.p", "o.c.__dict__['p'] = 5.0", "self.c = Conf()", "class Conf:\n    v = 2.0\n    @functools.cached_property\n    def p(self): return self.v"),
    "descriptor": changing("A", "self.c.d", "self.c = Conf()", "A = 2.0\nclass Desc:\n    def __get__(self, o, t=None): return A\nclass Conf:\n    d = Desc()"),
    "bound method": changing("B.a", "self.f()", "self.f = B.get", "class Conf(Box):\n    def get(self): return self.a\nB = Conf()"),
    "bound method replaced": Read("self.f()", "o.f = Conf(5.0).get", "self.f = B.get", "class Conf(Box):\n    def get(self): return self.a\nB = Conf()", "o.f = B.get"),
    "wraps": changing("A", "f()", module="A = 2.0\ndef deco(g):\n    @functools.wraps(g)\n    def inner(): return g() * A\n    return inner\n@deco\ndef f(): return 1.0"),
    "lru_cache": Read("f()", "A = 5.0; f.cache_clear()", module="A = 2.0\n@functools.lru_cache\ndef f(): return A"),
    "lru_cache, not cleared": Read("f()", "A = 5.0", module="A = 2.0\n@functools.lru_cache\ndef f(): return A"),
    "singledispatch": Read("f(self.b)", "f.register(Box)(lambda v: 5.0)", "self.b = Box()", "@functools.singledispatch\ndef f(v): return 2.0"),
    "__call__": changing("o.f.a", "self.f()", "self.f = Conf()", "class Conf(Box):\n    def __call__(self): return self.a"),
    "partialmethod": changing("o.f.a", "self.f.get()", "self.f = Conf()", "class Conf(Box):\n    def _get(self, n): return self.a * n\n    get = functools.partialmethod(_get, 1)"),
    "staticmethod": Read("self.c.get()", "Conf.get = staticmethod(lambda: 5.0)", "self.c = Conf()", "class Conf:\n    @staticmethod\n    def get(): return 2.0"),
    "classmethod": changing("Conf.a", "self.c.get()", "self.c = Conf()", CLASS + "    @classmethod\n    def get(cls): return cls.a"),
    "super": changing("A", "self.c.get()", "self.c = Low()", "A = 2.0\nclass Conf:\n    def get(self): return A\nclass Low(Conf):\n    def get(self): return super().get()"),
    "generator": changing("A", "next(f())", module="A = 2.0\ndef f():\n    yield A"),
    "recursion": changing("A", "f(3)", module="A = 2.0\ndef f(n): return A if n == 0 else f(n - 1)"),
    "exception": changing("A", "f()", module="A = 2.0\ndef f():\n    try:\n        raise KeyError(A)\n    except KeyError as e:\n        return e.args[0]"),
    "missing attribute": Read("f(self)", "o.missing = 5.0", module="def f(s):\n    try:\n        return s.missing\n    except AttributeError:\n        return 2.0", back="del o.missing"),
    "missing global": Read("f()", "MISSING = 5.0", module="def f():\n    try:\n        return MISSING\n    except NameError:\n        return 2.0", back="del MISSING"),
    "missing key": Read("self.d.get('a', 2.0)", "o.d['a'] = 5.0", "self.d = {}", back="del o.d['a']"),
    "missing attribute of a class": Read("getattr(Conf, 'b', 2.0)", "Conf.b = 5.0", module=CLASS, back="del Conf.b"),
    "missing attribute of an object": Read("(5.0 if hasattr(self.c, 'b') else 2.0)", "o.c.b = 1", "self.c = Box()", back="del o.c.b"),
    "missing attribute of a module": Read("getattr(fake_pkg, 'b', 2.0)", "fake_pkg.b = 5.0", module=FAKE, back="del fake_pkg.b"),
    "with": changing("A", "f()", module="A = 2.0\nclass Conf:\n    def __enter__(self): return A\n    def __exit__(self, *_): pass\ndef f():\n    with Conf() as a:\n        return a"),
    # operators
    "__rmul__": changing("o.c.a", "self.c", "self.c = Conf()", "class Conf(Box):\n    def __rmul__(self, x): return x * self.a"),
    "__float__": changing("o.c.a", "float(self.c)", "self.c = Conf()", "class Conf(Box):\n    def __float__(self): return self.a"),
    "__getitem__": changing("o.c.a", "self.c[0]", "self.c = Conf()", "class Conf(Box):\n    def __getitem__(self, i): return self.a"),
    "__len__": Read("(1.0 + len(self.c))", "o.c.a = 5", "self.c = Conf(2)", "class Conf(Box):\n    def __len__(self): return self.a", "o.c.a = 2"),
    "__bool__": Read("(2.0 if self.c else 5.0)", "o.c.a = False", "self.c = Conf(True)", "class Conf(Box):\n    def __bool__(self): return self.a", "o.c.a = True"),
    "__iter__": changing("o.c.a", "[*self.c][0]", "self.c = Conf()", "class Conf(Box):\n    def __iter__(self): return iter([self.a])"),
    "__contains__": Read("(2.0 if 1 in self.c else 5.0)", "o.c.a = False", "self.c = Conf(True)", "class Conf(Box):\n    def __contains__(self, i): return self.a", "o.c.a = True"),
    "__eq__": Read("(2.0 if self.c == 1 else 5.0)", "o.c.a = 2", "self.c = Conf(1)", "class Conf(Box):\n    def __eq__(self, v): return self.a == v\n    __hash__ = None", "o.c.a = 1"),
    "__str__": changing("o.c.a", "float(f'{self.c}')", "self.c = Conf()", "class Conf(Box):\n    def __str__(self): return str(self.a)"),
    "equal data classes": changing("o.c.a", "(2.0 if self.c == Conf() else 5.0)", "self.c = Conf()", "@dataclasses.dataclass\nclass Conf:\n    a: float = 2.0"),
    # containers
    "dict": changing("o.d['a']", "self.d['a']", "self.d = {'a': 2.0}"),
    "global dict": changing("D['a']", "D['a']", module="D = {'a': 2.0}"),
    "dict in a dict": changing("o.d['a'][1]", "self.d['a'][1]", "self.d = {'a': {1: 2.0}}"),
    "list": changing("o.d[0]", "self.d[0]", "self.d = [2.0]"),
    "sum of a list": Read("sum(self.d)", "o.d.append(3.0)", "self.d = [1.0, 1.0]", back="o.d.pop()"),
    "order of a dict": Read("[*self.d.values()][0]", "o.d['a'] = o.d.pop('a')", "self.d = {'a': 2.0, 'b': 5.0}"),
    "set": Read("max(self.d)", "o.d.add(5.0)", "self.d = {2.0}", back="o.d.remove(5.0)"),
    "deque": changing("o.d[0]", "self.d[0]", "self.d = collections.deque([2.0])"),
    "OrderedDict": Read("next(iter(self.d.values()))", "o.d.move_to_end('a')", "self.d = collections.OrderedDict(a=2.0, b=5.0)", back="o.d.move_to_end('b')"),
    "defaultdict": Read("self.d['a']", "o.d['a'] = 5.0", "self.d = collections.defaultdict(lambda: 2.0)"),
    "Counter": changing("o.d['a']", "self.d['a']", "self.d = collections.Counter(a=2.0)"),
    "ChainMap": changing("o.d.maps[1]['a']", "self.d['a']", "self.d = collections.ChainMap({}, {'a': 2.0})"),
    "UserDict": changing("o.d['a']", "self.d['a']", "self.d = collections.UserDict(a=2.0)"),
    "mapping proxy": changing("D['a']", "self.d['a']", "self.d = types.MappingProxyType(D)", "D = {'a': 2.0}"),
    "dict subclass": changing("o.d['a']", "self.d.a", "self.d = Conf(a=2.0)", "class Conf(dict):\n    __getattr__ = dict.__getitem__"),
    "attribute of a dict subclass": changing("o.d.b", "self.d.b", "self.d = Conf(a=1.0)\nself.d.b = 2.0", "class Conf(dict): pass"),
    "attribute of a list subclass": changing("o.d.b", "self.d.b", "self.d = Conf([1.0])\nself.d.b = 2.0", "class Conf(list): pass"),
    "attribute of a tuple subclass": changing("o.d.b", "self.d.b", "self.d = Conf([1.0])\nself.d.b = 2.0", "class Conf(tuple): pass"),
    "attribute of a float subclass": changing("o.d.b", "self.d.b", "self.d = Conf(1.0)\nself.d.b = 2.0", "class Conf(float): pass"),
    "attribute of a string subclass": changing("o.d.b", "self.d.b", "self.d = Conf('a')\nself.d.b = 2.0", "class Conf(str): pass"),
    "namedtuple": changing("o.d.a[0]", "self.d.a[0]", "self.d = Conf([2.0])", "Conf = collections.namedtuple('Conf', 'a')"),
    "namedtuple replaced": Read("self.d.a", "o.d = o.d._replace(a=5.0)", "self.d = Conf(2.0)", "Conf = collections.namedtuple('Conf', 'a')", "o.d = Conf(2.0)"),
    "item of a tuple": changing("o.d[0][0]", "self.d[0][0]", "self.d = ([2.0],)"),
    "array": changing("o.d[0]", "self.d[0]", "self.d = array.array('d', [2.0])"),
    "numpy": changing("o.d[0]", "float(self.d[0])", "self.d = np.array([2.0])"),
    "bytearray": Read("float(self.d[0])", "o.d[0] = 5", "self.d = bytearray([2])", back="o.d[0] = 2"),
    # objects
    "object": changing("o.c.a", "self.c.a", "self.c = Box()"),
    "object in an object": changing("o.c.a.a", "self.c.a.a", "self.c = Box(Box())"),
    "object replaced": Read("self.c.a", "o.c = Box(5.0)", "self.c = Box()", back="o.c = Box()"),
    "object in a list": changing("o.c[0].a", "self.c[0].a", "self.c = [Box()]"),
    "global object": changing("C.a", "C.a", module="C = Box()"),
    "SimpleNamespace": changing("o.c.a", "self.c.a", "self.c = types.SimpleNamespace(a=2.0)"),
    "argparse": changing("ARGS.a", "ARGS.a", module="ARGS = argparse.Namespace(a=2.0)"),
    "data class": changing("o.c.a", "self.c.a", "self.c = Conf()", "@dataclasses.dataclass\nclass Conf:\n    a: float = 2.0"),
    "data class with slots": changing("o.c.a", "self.c.a", "self.c = Conf()", "@dataclasses.dataclass(slots=True)\nclass Conf:\n    a: float = 2.0"),
    "asdict": changing("o.c.a", "dataclasses.asdict(self.c)['a']", "self.c = Conf()", "@dataclasses.dataclass\nclass Conf:\n    a: float = 2.0"),
    "__slots__": changing("o.c.a", "self.c.a", "self.c = Conf()\nself.c.a = 2.0", "class Conf:\n    __slots__ = ('a',)"),
    "slots of a base": changing("o.c.a", "self.c.a", "self.c = Low()\nself.c.a = 2.0", "class Conf:\n    __slots__ = ('a',)\nclass Low(Conf): pass"),
    "__getattr__": changing("o.c.s['a']", "self.c.a", "self.c = Conf({'a': 2.0})", "class Conf:\n    def __init__(self, s): self.s = s\n    def __getattr__(self, name): return self.s[name]"),
    "__getattribute__": changing("A", "self.c.a", "self.c = Conf()", "A = 2.0\nclass Conf:\n    def __getattribute__(self, name): return A"),
    "__dict__ replaced": Read("self.c.a", "o.c.__dict__ = {'a': 5.0}", "self.c = Box()", back="o.c.__dict__ = {'a': 2.0}"),
    "weak reference": changing("B.a", "self.c().a", "self.c = weakref.ref(B)", "B = Box()"),
    "proxy": changing("B.a", "self.c.a", "self.c = weakref.proxy(B)", "B = Box()"),
    "proxy of a module": changing("B.a", "self.c.a", "object.__setattr__(self, 'c', weakref.proxy(B))", "B = Plain()\nB.a = 2.0"),
    "WeakValueDictionary": changing("B.a", "W['b'].a", module="B = Box()\nW = weakref.WeakValueDictionary(b=B)"),
    "threading.local": changing("T.a", "T.a", module="T = threading.local()\nT.a = 2.0"),
    "ContextVar": Read("V.get()", "V.set(5.0)", module="V = contextvars.ContextVar('v', default=2.0)", back="V.set(2.0)"),
    "array of ctypes": changing("V.value", "V.value", module="import ctypes\nV = ctypes.c_double(2.0)"),
    "child": changing("o.m.a", "self.m.a", "self.m = Plain()\nself.m.a = 2.0"),
    "child in a list": changing("o.m[0].a", "self.m[0].a", "self.m = torch.nn.ModuleList([Plain()])\nself.m[0].a = 2.0"),
    "child in a plain list": changing("o.m[0].a", "self.m[0].a", "self.m = [Plain()]\nself.m[0].a = 2.0"),
    "layer in a list": changing("o.a", "self.m[0].a", "self.a = 2.0\nself.m = [self]"),
    "class of the child": Read("self.m.a", "o.m.__class__ = Other", "self.m = Net()", "class Net(Plain):\n    a = 2.0\nclass Other(Plain):\n    a = 5.0", "o.m.__class__ = Net"),
    "class of the owner": Read("self.k()", "o.__class__ = type('Low', (type(o),), {'k': lambda s: 5.0})", "type(self).k = lambda s: 2.0"),
    "training": Read("(2.0 if self.training else 5.0)", "o.eval()", back="o.train()"),
    "ParameterDict": Read("len(self.m)", "o.m['b'] = torch.nn.Parameter(torch.ones(1))", "self.m = torch.nn.ParameterDict({'a': torch.ones(1)})", back="del o.m['b']"),
    # state
    "iterator": Read("next(C)", "pass", module="C = itertools.count(2)"),
    "cycle": Read("next(self.c)", "pass", "self.c = itertools.cycle([2.0, 3.0])"),
    "iterator of a list": Read("next(self.c)", "pass", "self.c = iter([*range(99)])"),
    "running generator": Read("next(G)", "pass", module="def f():\n    n = 1.0\n    while True:\n        n += 1.0\n        yield n\nG = f()"),
    "counter": Read("f()", "pass", module="N = [0.0]\ndef f():\n    N[0] += 1.0\n    return N[0]"),
    "random": Read("random.random()", "random.seed(1)", module="random.seed(0)"),
    "random object": Read("R.random()", "R.seed(1)", module="R = random.Random(0)"),
    "numpy.random": Read("float(np.random.rand())", "np.random.seed(1)", module="np.random.seed(0)"),
    "numpy generator": Read("float(self.r.random())", "pass", "self.r = np.random.default_rng(0)"),
    "torch.rand": Read("torch.rand(1)", "torch.manual_seed(9)"),
    "torch.Generator": Read("torch.rand(1, generator=self.g)", "o.g.manual_seed(9)", "self.g = torch.Generator()\nself.g.manual_seed(1)"),
    "initial_seed": Read("float(torch.initial_seed() % 7)", "torch.manual_seed(9)"),
    "os.environ": Read("float(os.environ['TEST_A'])", "os.environ['TEST_A'] = '5'", module="os.environ['TEST_A'] = '2'", back="os.environ['TEST_A'] = '2'"),
    "os.getenv": Read("float(os.getenv('TEST_B', '2'))", "os.environ['TEST_B'] = '5'", back="del os.environ['TEST_B']"),
    "optimizer": Read("self.o.param_groups[0]['lr']", "o.o.param_groups[0]['lr'] = 5.0", "self.o = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=2.0)", back="o.o.param_groups[0]['lr'] = 2.0"),
    "scheduler": Read("(1.0 + self.s.last_epoch)", "o.s.optimizer.step(); o.s.step()", "self.s = torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=2.0), 1)"),
    "get_last_lr": Read("self.s.get_last_lr()[0]", "o.s.optimizer.step(); o.s.step()", "self.s = torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=2.0), 1)"),
    "Data": changing("o.d.a", "self.d.a", "self.d = Data(a=2.0)"),
    "item of Data": changing("o.d['a']", "self.d['a']", "self.d = Data(a=2.0)"),
    "sys": Read("float(sys.getrecursionlimit())", "sys.setrecursionlimit(1500)", back="sys.setrecursionlimit(1000)"),
    "argv": Read("float(len(sys.argv))", "sys.argv.append('')", back="sys.argv.pop()"),
    # flags
    "deterministic": Read("(5.0 if torch.are_deterministic_algorithms_enabled() else 2.0)", "torch.use_deterministic_algorithms(True)", back="torch.use_deterministic_algorithms(False)"),
    "anomaly": Read("(5.0 if torch.is_anomaly_enabled() else 2.0)", "torch.autograd.set_detect_anomaly(True)", back="torch.autograd.set_detect_anomaly(False)"),
    "threads": Read("float(torch.get_num_threads())", "torch.set_num_threads(2)", back="torch.set_num_threads(1)"),
    "default dtype": Read("float(torch.finfo(torch.get_default_dtype()).bits)", "torch.set_default_dtype(torch.float64)", back="torch.set_default_dtype(torch.float32)"),
    "dtype of torch.tensor": Read("float(torch.finfo(torch.tensor(1.0).dtype).bits)", "torch.set_default_dtype(torch.float64)", back="torch.set_default_dtype(torch.float32)"),
    "__future__": Read("(5.0 if torch.__future__.get_swap_module_params_on_conversion() else 2.0)", "torch.__future__.set_swap_module_params_on_conversion(True)", back="torch.__future__.set_swap_module_params_on_conversion(False)"),
    "cudnn": Read("(5.0 if torch.backends.cudnn.benchmark else 2.0)", "torch.backends.cudnn.benchmark = True", back="torch.backends.cudnn.benchmark = False"),
    "mkldnn": Read("(5.0 if torch.backends.mkldnn.enabled else 2.0)", "torch.backends.mkldnn.enabled = not torch.backends.mkldnn.enabled", back="torch.backends.mkldnn.enabled = not torch.backends.mkldnn.enabled"),
    "tf32": Read("(5.0 if torch.backends.cuda.matmul.allow_tf32 else 2.0)", "torch.backends.cuda.matmul.allow_tf32 = True", back="torch.backends.cuda.matmul.allow_tf32 = False"),
    "precision": Read("float(len(torch.get_float32_matmul_precision()))", "torch.set_float32_matmul_precision('high')", back="torch.set_float32_matmul_precision('highest')"),
    "filled memory": Read("(5.0 if torch.utils.deterministic.fill_uninitialized_memory else 2.0)", "torch.utils.deterministic.fill_uninitialized_memory = False", back="torch.utils.deterministic.fill_uninitialized_memory = True"),
    "dtype of autocast": Read("(5.0 if torch.get_autocast_dtype('cpu') is torch.float16 else 2.0)", "torch.set_autocast_dtype('cpu', torch.float16)", back="torch.set_autocast_dtype('cpu', torch.bfloat16)"),
    "cache of autocast": Read("(5.0 if torch.is_autocast_cache_enabled() else 2.0)", "torch.set_autocast_cache_enabled(False)", back="torch.set_autocast_cache_enabled(True)"),
    "warn always": Read("(5.0 if torch.is_warn_always_enabled() else 2.0)", "torch.set_warn_always(True)", back="torch.set_warn_always(False)"),
    "flag of PyG": Read("(5.0 if torch_geometric.backend.use_segment_matmul else 2.0)", "torch_geometric.backend.use_segment_matmul = True", back="torch_geometric.backend.use_segment_matmul = None"),
    "flag of PyG's types": Read("(5.0 if torch_geometric.typing.WITH_PT20 else 2.0)", "torch_geometric.typing.WITH_PT20 = False", back="torch_geometric.typing.WITH_PT20 = True"),
    "debug mode of PyG": Read("(5.0 if torch_geometric.is_debug_enabled() else 2.0)", "torch_geometric.set_debug(True)", back="torch_geometric.set_debug(False)"),
    "experimental mode of PyG": Read("(5.0 if torch_geometric.is_experimental_mode_enabled('disable_dynamic_shapes') else 2.0)", "torch_geometric.set_experimental_mode(True, 'disable_dynamic_shapes')", back="torch_geometric.set_experimental_mode(False, 'disable_dynamic_shapes')"),
    "function of torch": Read("f(self)", "torch.nn.functional.relu, K = (lambda v: v * 5.0), torch.nn.functional.relu", module="def f(s): return torch.nn.functional.relu(torch.ones(1))", back="torch.nn.functional.relu = K"),
    # tensors
    "tensor in place": Read("self.t", "o.t.fill_(5.0)", "self.t = torch.tensor(2.0)", back="o.t.fill_(2.0)"),
    "tensor replaced": Read("self.t", "o.t = torch.tensor(5.0)", "self.t = torch.tensor(2.0)", back="o.t = torch.tensor(2.0)"),
    "number of a tensor": Read("self.t.item()", "o.t.fill_(5.0)", "self.t = torch.tensor(2.0)"),
    "attribute of a tensor": changing("o.t.a", "self.t.a", "self.t = torch.ones(1)\nself.t.a = 2.0"),
    "requires_grad": Read("(2.0 if self.w.requires_grad else 5.0)", "o.w.requires_grad_(False)", "self.w = torch.nn.Parameter(torch.ones(1))", back="o.w.requires_grad_(True)"),
    "dtype of data": Read("(2.0 if self.w.dtype == torch.float32 else 5.0)", "o.w.data = o.w.data.double()", "self.w = torch.nn.Parameter(torch.ones(1))", back="o.w.data = o.w.data.float()"),
    "shape of data": Read("float(self.w.shape[0])", "o.w.data = torch.ones(5)", "self.w = torch.nn.Parameter(torch.ones(2))", back="o.w.data = torch.ones(2)"),
    "len of a tensor": Read("float(len(self.w))", "o.w.data = torch.ones(5)", "self.w = torch.nn.Parameter(torch.ones(2))", back="o.w.data = torch.ones(2)"),
    "numel": Read("float(self.w.numel())", "o.w.resize_(5)", "self.w = torch.ones(2)", back="o.w.resize_(2)"),
    "strides of data": Read("(2.0 if self.w.is_contiguous() else 5.0)", "o.w.data = torch.ones(3, 2).t()", "self.w = torch.ones(2, 3)", back="o.w.data = torch.ones(2, 3)"),
    "stride": Read("float(self.w.stride(0))", "o.w.data = torch.ones(3, 2).t()", "self.w = torch.ones(2, 3)", back="o.w.data = torch.ones(2, 3)"),
    "is_leaf": Read("(2.0 if self.w.is_leaf else 5.0)", "o.w = torch.ones(2, requires_grad=True) * 1", "self.w = torch.ones(2, requires_grad=True)", back="o.w = torch.ones(2, requires_grad=True)"),
    "grad_fn": Read("(2.0 if self.w.grad_fn is None else 5.0)", "o.w = torch.ones(2, requires_grad=True) * 1", "self.w = torch.ones(2, requires_grad=True)", back="o.w = torch.ones(2, requires_grad=True)"),
    "grad": Read("(2.0 if self.w.grad is None else 5.0)", "o.w.grad = torch.ones(1)", "self.w = torch.nn.Parameter(torch.ones(1))", back="o.w.grad = None"),
    "_version": Read("float(self.w._version)", "o.w.add_(1)", "self.w = torch.ones(1)"),
    "_base": Read("(2.0 if self.w._base is None else 5.0)", "o.w = torch.ones(2)[:1]", "self.w = torch.ones(1)"),
    "device": Read("(2.0 if self.w.device.type == 'cpu' else 5.0)", "o.w = torch.ones(1, device='meta')", "self.w = torch.ones(1)", back="o.w = torch.ones(1)"),
    "is_sparse": Read("(2.0 if not self.w.is_sparse else 5.0)", "o.w = torch.eye(2).to_sparse()", "self.w = torch.eye(2)", back="o.w = torch.eye(2)"),
    "is_complex": Read("(2.0 if not self.w.is_complex() else 5.0)", "o.w = torch.eye(2) * 1j", "self.w = torch.eye(2)", back="o.w = torch.eye(2)"),
    "is_conj": Read("(2.0 if not self.w.is_conj() else 5.0)", "o.w = o.w.conj()", "self.w = torch.eye(2) * 1j"),
    "isinstance of a tensor": Read("(2.0 if isinstance(self.w, torch.nn.Parameter) else 5.0)", "del o.w; o.w = torch.ones(1)", "self.w = torch.nn.Parameter(torch.ones(1))"),
    "identity": Read("(2.0 if self.c is C else 5.0)", "o.c = Box()", "self.c = C", "C = Box()", "o.c = C"),
    "identity of a tensor": Read("(2.0 if self.c is C else 5.0)", "o.c = torch.ones(1)", "self.c = C", "C = torch.ones(1)", "o.c = C"),
    "tied": Read("(2.0 if self.u is self.v else 5.0)", "o.u = Box()", "self.u = self.v = Box()", back="o.u = o.v"),
    # names computed at run time
    "getattr": changing("o.a", "getattr(self, self.n)", "self.a, self.n = 2.0, 'a'"),
    "getattr by concatenation": changing("o.aa", "getattr(self, 'a' + 'abc'[0])", "self.aa = 2.0"),
    "getattr of another name": changing("o.a", "ask(self, 'a')", "self.a = 2.0", "ask = getattr"),
    "getattr of builtins": changing("o.a", "builtins.getattr(self, self.n)", "self.a, self.n = 2.0, 'a'"),
    "map of getattr": changing("o.a", "[*map(getattr, [self], ['a'])][0]", OWN),
    "reduce of getattr": changing("o.c.a", "functools.reduce(getattr, ['c', 'a'], self)", "self.c = Box()"),
    "vars": changing("o.a", "vars(self)['a']", OWN),
    "__dict__": changing("o.a", "self.__dict__['a']", OWN),
    "__getattribute__ called": changing("o.a", "self.__getattribute__('a')", OWN),
    "attrgetter": changing("o.a", "operator.attrgetter('a')(self)", OWN),
    "attrgetter of a path": changing("o.c.a", "GET(self)", "self.c = Box()", "GET = operator.attrgetter('c.a')"),
    "methodcaller": changing("o.c.a", "operator.methodcaller('get')(self.c)", "self.c = Conf()", "class Conf(Box):\n    def get(self): return self.a"),
    "property of attrgetter": changing("o.c._v", "self.c.p", "self.c = Conf()", "class Conf:\n    def __init__(self): self._v = 2.0\n    p = property(operator.attrgetter('_v'))"),
    "eval": changing("A", "eval('A')", module="A = 2.0"),
    "eval of an attribute": changing("o.a", "eval('s.a', {'s': self})", OWN),
    "exec": changing("A", "f()", module="A = 2.0\ndef f():\n    d = {}\n    exec('v = A', globals(), d)\n    return d['v']"),
    "globals": changing("A", "globals()['A']", module="A = 2.0"),
    "format": changing("o.a", "float('{0.a}'.format(self))", OWN),
    "format_map": changing("o.c.a", "float('{c.a}'.format_map({'c': self.c}))", "self.c = Box()"),
    "format by name": changing("o.c.a", "float('{c.a}'.format(c=self.c))", "self.c = Box()"),
    "str.format": changing("o.c.a", "float(str.format('{0.a}', self.c))", "self.c = Box()"),
    "match": changing("o.c.a", "f(self.c)", "self.c = Box()", "def f(c):\n    match c:\n        case Box(a=v):\n            return v"),
    "match by position": changing("o.c.a", "f(self.c)", "self.c = Conf()", "class Conf(Box):\n    __match_args__ = ('a',)\ndef f(c):\n    match c:\n        case Conf(v):\n            return v"),
    "match of a mapping": changing("o.c['a']", "f(self.c)", "self.c = {'a': 2.0}", "def f(c):\n    match c:\n        case {'a': v}:\n            return v"),
    "copy": changing("o.c.a", "copy.copy(self.c).a", "self.c = Box()"),
    "pickle": changing("o.c.a", "pickle.loads(pickle.dumps(self.c)).a", "self.c = Box()"),
    "getattr_static": changing("o.c.a", "inspect.getattr_static(self.c, 'a')", "self.c = Box()"),
    "frame": changing("A", "sys._getframe().f_globals['A']", module="A = 2.0"),
    "function's globals": changing("A", "f.__globals__['A']", module="A = 2.0\ndef f(): pass"),
    "repr": changing("o.c.a", "float(repr(self.c)[len('namespace(a='):-1])", "self.c = types.SimpleNamespace(a=2.0)"),
    "extra_repr": Read("float(len(repr(self.m)))", "o.m = torch.nn.Linear(300, 1)", "self.m = torch.nn.Linear(3, 1)"),
    "len of parameters": Read("float(len([*self.parameters()]))", "o.w = torch.nn.Parameter(torch.ones(1))", back="del o.w"),
    "state_dict": Read("float(len(self.state_dict()))", "o.w = torch.nn.Parameter(torch.ones(1))", back="del o.w"),
    "get_submodule": changing("o.m.a", "self.get_submodule('m').a", "self.m = Plain()\nself.m.a = 2.0"),
    "__module__": Read("float(len(Box.__module__))", "Box.__module__ = 'another name'"),
    "__name__": Read("float(len(Box.__name__))", "Box.__name__ = 'another name'", back="Box.__name__ = 'Box'"),
    "__qualname__ of a function": Read("float(len(f.__name__))", "f.__name__ = 'another'", module="def f(): pass", back="f.__name__ = 'f'"),
    "__doc__": Read("float(len(f.__doc__))", "f.__doc__ = 'other text'", module="def f():\n    'text'", back="f.__doc__ = 'text'"),
    "__annotations__": Read("float(len(f.__annotations__))", "f.__annotations__['b'] = int", module="def f(a: int): pass", back="del f.__annotations__['b']"),
    "__file__": Read("float(len(__name__))", "__name__ = 'another name'"),
    "__wrapped__": Read("f.__wrapped__()", "f.__wrapped__ = lambda: 5.0", module="def g(): return 2.0\n@functools.wraps(g)\ndef f(): pass", back="f.__wrapped__ = g"),
    "hash": Read("float(hash(self.c) % 7)", "o.c.a = 5", "self.c = Conf(2)", "class Conf(Box):\n    def __hash__(self): return self.a", "o.c.a = 2"),
    "sorted by a key": changing("A", "sorted([1.0, 2.0], key=lambda v: v * (A - 3))[0]", module="A = 2.0"),
    "filter": changing("A", "float(len([*filter(lambda v: v < A, [1, 2, 3, 4])]))", module="A = 2.0"),
}  # fmt: skip
# The code around a read: of the base of the layer, of the layer, of its child and its aggregation.
PLACES: dict[str, dict[str, str]] = {
    "forward": {"forward": "x = x * ({})"},
    "message": {"message": "x_j = x_j * ({})"},
    "aggregate": {"layer": "def aggregate(self, inputs, index, ptr=None, dim_size=None):\n"
                           "    return super().aggregate(inputs, index, ptr, dim_size) * ({})"},
    "update": {"layer": "def update(self, inputs):\n    return inputs * ({})"},
    "edge_update": {"forward": "e = self.edge_updater(edge_index, x=x)",
                    "layer": "def edge_update(self, x_j):\n    return x_j.sum(-1) * ({})"},
    "child": {"forward": "x = self.child(x)", "child": "def forward(self, x):\n    return x * ({})"},
    "aggregation": {"aggregation": "def forward(self, x, *args, **kwargs):\n"
                                   "    return super().forward(x, *args, **kwargs) * ({})"},
    "property": {"forward": "x = x * self.prop", "layer": "@property\ndef prop(self):\n    return {}"},
    "super": {"forward": "x = x * super().helped()", "base": "def helped(self):\n    return {}"},
    "function": {"forward": "x = x * helper(self)", "module": "def helper(self):\n    return {}"},
    "nested function": {"message": "def inner():\n    return {}\nx_j = x_j * inner()"},
    "comprehension": {"message": "x_j = sum([x_j * ({}) for _ in range(1)])"},
    "lambda": {"init": "self.fn = lambda: {}", "message": "x_j = x_j * self.fn()"},
}  # fmt: skip
OWNERS = {"child": "child", "aggregation": "aggr_module"}


def text_of(read: Read, place: str) -> str:
    """The module of a layer that reads a number at a place."""
    parts = {key: code.format(read.read) for key, code in PLACES[place].items()}
    init = f"{read.init}\n" if read.init else ""
    of_layer = init if place not in OWNERS else ""

    def cls(name: str, base: str, init: str, body: str, call: str = "") -> str:
        start = f"def __init__(self):\n    super().__init__({call})\n{indent(init, '    ')}"
        return f"class {name}({base}):\n{indent(start + body, '    ')}\n"

    aggregation = "Sum()" if place == "aggregation" else "'sum'"
    body = f"""
def forward(self, x, edge_index):
    x, e = self.lin(x), None
{indent(parts.get("forward", "pass"), "    ")}
    return self.propagate(edge_index, x=x, e=e)
def message(self, x_j, e):
{indent(parts.get("message", "pass"), "    ")}
    return x_j if e is None else x_j * e.unsqueeze(-1)
{parts.get("layer", "")}
"""
    return "\n".join([
        HEAD, read.module,
        cls("Child", "torch.nn.Module", init if place == "child" else "", parts.get("child", "")),
        cls("Sum", "SumAggregation", init if place == "aggregation" else "", parts.get("aggregation", "")),
        cls("Base", "MessagePassing", "", parts.get("base", "def none(self): pass"), "**kwargs")
        .replace("__init__(self)", "__init__(self, **kwargs)"),
        parts.get("module", ""),
        cls("Layer", "Base", f"self.lin = torch.nn.Linear({WIDTH}, {WIDTH})\nself.child = Child()\n"
            f"{of_layer}{parts.get('init', '')}\n", body, f"aggr={aggregation}"),
    ])  # fmt: skip


def outcome(layer: Any, x: Tensor, edge_index: Tensor) -> list[Tensor] | type[Exception]:
    """Result and gradients of a call, or the error that it raised."""
    x = x.clone().requires_grad_()
    layer.zero_grad()
    try:
        out = layer(x, edge_index)
        out.square().sum().backward()
    except Exception as error:
        return type(error)
    return [out.detach(), x.grad, *(p.grad for p in layer.parameters() if p.grad is not None)]


def story(folder: Path, read: Read, place: str, nodes: int, edges: int) -> list[Any]:
    """What two layers return, before and after what their code reads has changed."""
    name = f"reads_{next(_names)}"
    (folder / f"{name}.py").write_text(text_of(read, place))
    importlib.invalidate_caches()
    torch.manual_seed(3)
    module = importlib.import_module(name)
    layers = [module.Layer(), module.Layer()]
    x, edge_index = torch.randn(nodes, WIDTH), torch.randint(nodes, (2, edges))
    seen = [outcome(layer, x, edge_index) for layer in layers for _ in range(WARM)]
    space = vars(module)
    owners = [layer.get_submodule(OWNERS.get(place, "")) for layer in layers]
    for change in (read.change, read.back) * 2 if read.back else (read.change,):
        for owner in owners if "o." in change else owners[:1]:
            space["o"] = owner
            exec(change, space)
            del space["o"]
            seen += [outcome(layer, x, edge_index) for layer in layers for _ in range(2)]
    return seen


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    before = dict(sys.modules)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in sys.modules.keys() - before.keys():
        del sys.modules[name]
    torch.use_deterministic_algorithms(False)
    torch.set_default_dtype(torch.float32)


def assert_same(found: list[Any], expected: list[Any]) -> None:
    assert len(found) == len(expected)
    for number, (mine, right) in enumerate(zip(found, expected, strict=True)):
        if isinstance(right, type) or isinstance(mine, type):
            assert mine == right, number
            continue
        assert len(mine) == len(right), number
        for a, b in zip(mine, right, strict=True):
            scale = max(float(b.abs().max()), 1.0)
            torch.testing.assert_close(a, b, rtol=0, atol=1e-4 * scale,
                                       msg=lambda m, n=number: f"call {n}: {m}")  # fmt: skip


@pytest.mark.usefixtures("always")
@pytest.mark.each
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", READS)
def test_a_change_of_what_code_reads_counts(name: str, place: str, folder: Path) -> None:
    expected = story(folder, READS[name], place, N, E)
    with pyg_accel.patched():
        found = story(folder, READS[name], place, N, E)
    assert_same(found, expected)
