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
def rule_of(cls: type) -> tuple[Rule | None, str]:
    """Return the rule for a class, or the reason why there is none."""
    for base in cls.__mro__:
        if base in _RULES:
            # A subclass that writes one of these anew may compute anything.
            changed = [m for m in METHODS if getattr(cls, m, None) is not getattr(base, m, None)]
            changed += [m for m in RENDERED if not _same_propagation(cls, base, m)]
            if changed:
                return None, f"{cls.__name__} has its own {', '.join(changed)}"
            return _RULES[base], ""
    return None, f"no lifting rule for {cls.__name__}"


def _same_propagation(cls: type, base: type, name: str) -> bool:
    own = getattr(cls, name)
    return is_rendered(own, cls) or own is getattr(base, name)
