"""Foundations: state of calls, the report, native libraries, stores, hooks, the machine."""
