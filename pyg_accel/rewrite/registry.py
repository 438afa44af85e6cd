"""Lifting rules by class of layer: one small rule a family, registered with :func:`lifts`."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from pyg_accel.rewrite.algebra import Algebra, Call
from pyg_accel.rewrite.guards import METHODS, RENDERED, is_rendered

__all__ = ["Rule", "lifts", "rule_of"]

Rule = Callable[[Any, Call], Algebra]
_RULES: dict[type, Rule] = {}


def lifts(*classes: type) -> Callable[[Rule], Rule]:
    """Register a rule for layers of these classes, and of subclasses that change none of it."""

    def register(rule: Rule) -> Rule:
        for cls in classes:
            if cls in _RULES:
                raise ValueError(f"there is a rule for {cls.__name__} already")
            _RULES[cls] = rule
        rule_of.cache_clear()
        return rule

    return register


@lru_cache(maxsize=256)
def rule_of(cls: type) -> Rule | None:
    """Return the rule for a class; None if its code is to be run in every call."""
    for base in cls.__mro__:
        if base in _RULES:
            # A subclass that writes one of these anew may compute anything.
            same = all(getattr(cls, m, None) is getattr(base, m, None) for m in METHODS)
            return _RULES[base] if same and all(_renders(cls, base, m) for m in RENDERED) else None
    return None


def _renders(cls: type, base: type, name: str) -> bool:
    own = getattr(cls, name)
    return is_rendered(own, cls) or own is getattr(base, name)
