"""Attack a run as its aggregator could: canaries in a node's text, and what labels and student tell about them."""
