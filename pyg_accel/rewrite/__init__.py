"""Rewrites a model: the cheapest order of its matrix products, for this graph and machine."""
