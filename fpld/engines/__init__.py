"""Engines: what moves tasks and frames. `local` has all nodes on this machine, `flower` has them anywhere."""
