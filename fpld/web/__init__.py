"""The live page: runs in a folder and the planner, served read-only."""
