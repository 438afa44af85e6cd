"""Foundations: native libraries, stores, hooks, the report."""
