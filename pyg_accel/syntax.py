"""Python's parser, for one thread at a time.

Python 3.11 counts its depth in a syntax tree per process: of threads that parse at the same time,
one may raise "SystemError: AST constructor recursion depth mismatch" (python/cpython#106905).
"""

import ast
import threading

__all__ = ["expression_tree", "module_tree"]

_lock = threading.RLock()  # a finalizer that runs meanwhile may parse as well


def expression_tree(text: str) -> ast.expr:
    """Return the syntax tree of an expression."""
    with _lock:
        return ast.parse(text, mode="eval").body


def module_tree(text: str) -> ast.Module:
    """Return the syntax tree of statements."""
    with _lock:
        return ast.parse(text)
