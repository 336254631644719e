"""Files: arrays in safetensors, writes that are whole or not there, the folder of a run."""
