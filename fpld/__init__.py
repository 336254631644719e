"""Federated Probe-Logit Distillation: one language model from text that may not leave its sites."""

__version__ = "0.1.0"
