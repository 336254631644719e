"""What runs at a site, whatever the engine: the node's specification, its round, its models and its prior."""
