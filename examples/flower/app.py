"""A Flower app of a few lines: `flwr run .` in this folder, in Flower's simulation or on your SuperLink.

In a simulation the nodes' texts are dealt from the corpus. A real SuperNode is started with a node file
(`--node-config 'node="path of node.toml"'`; `fpld init-node` makes it), and [flower] in federation.toml names the keys.
To bring a model of your own, derive a class from `fpld.students.Student` and return it a name here, which [student] in
federation.toml uses as its kind: `registry.students.register("mine", Mine)`.
"""

from pathlib import Path

from fpld import config
from fpld.engines.flower import client_app, server_app
from fpld.engines.flower.simulation import simulated_home

FEDERATION = Path(__file__).with_name("federation.toml")
OUT = Path.cwd() / "runs" / "flower"

client = client_app(simulated_home(config.load(FEDERATION)[0], OUT))
server = server_app(FEDERATION)
