"""Who gets how many bits: allocators, estimators of what they go by, and the budget of a round."""
