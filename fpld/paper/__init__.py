"""The paper: its statements as functions, its channel in reals, its simulator, and its figures reproduced."""
