"""Sampled labels: an unbiased sparse estimate of what a node's probabilities add to the prior's."""
