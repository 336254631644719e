"""The protocol without I/O: a node, an aggregator, what they say to each other, and who gets how many bits.

The paper's variants are assemblies of the same pieces: Algorithm 1 is the mean of frames coded against nothing at equal
bits; heterogeneous budgets give the allocator caps and weights; Algorithm 2 adds a warm-up and an estimator; sequential
refinement codes against the node's own reconstruction.
"""

from fpld.budget.policy import Budget
from fpld.protocol.aggregator import Aggregator, Receipt, Settings
from fpld.protocol.combine import Combined
from fpld.protocol.messages import Task
from fpld.protocol.node import Node

__all__ = ["Aggregator", "Budget", "Combined", "Node", "Receipt", "Settings", "Task"]
