"""Rules: how the nodes' decoded logits become one."""
