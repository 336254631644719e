"""The programs of a deployment: `fpld aggregator`, `fpld node`, and the processes that they start."""
