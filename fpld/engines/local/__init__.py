"""A whole run on this machine: the federation and its baselines, with nodes as jobs of a pool."""
