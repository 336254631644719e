"""Files: arrays in safetensors, atomic writes, the folder of a run."""
