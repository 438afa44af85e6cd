"""Graphs: CSR and its transpose, values derived from a graph and stored with it, matrix formats."""

from pyg_accel.graph.cbsr import CBSR
from pyg_accel.graph.csr import CSR, for_autograd, ptr2index
from pyg_accel.graph.graph import Graph, check_graph

__all__ = ["CBSR", "CSR", "Graph", "check_graph", "for_autograd", "ptr2index"]
