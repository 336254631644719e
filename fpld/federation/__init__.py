"""A federation that trains: text to nodes, local training, rounds, distillation, baselines, and the run's folder."""
