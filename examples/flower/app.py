"""A Flower app of a few lines: `flwr run .` in this folder, in Flower's simulation or on your SuperLink.

Nodes that are started with `partition-id=0` and so on get their texts from the corpus: a trial, in which nodes do not
authenticate. A real SuperNode is started with a node file (`--node-config 'node="path of node.toml"'`; `fpld init-node`
makes it), and [flower] in federation.toml names the keys.
To bring a model of your own, derive a class from `fpld.students.Student` and register it here under a name, which
[student] in federation.toml uses as its kind: `registry.students.register("mine", Mine)`.
"""

import logging
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp.typing import ClientAppCallable
from flwr.serverapp import Grid, ServerApp

from fpld import config
from fpld.engines.flower import client_app, serve
from fpld.engines.flower.messages import content_bytes
from fpld.engines.flower.simulation import simulated_site

FEDERATION, TEXT = config.read_config(Path(__file__).with_name("federation.toml"))
OUT = Path.cwd() / "runs" / "flower"
log = logging.getLogger("flwr")


def log_reply_size(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Log the size of a node's reply: a mod of your own, which sees every message and every reply."""
    reply = call_next(message, context)
    log.info("%s: %s bytes leave this node", message.metadata.message_type, content_bytes(reply.content))
    return reply


client = client_app(simulated_site(FEDERATION, OUT), mods=[log_reply_size])
server = ServerApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Run all rounds with the Strategy `ProbeLogitDistillation`; the rows are those of `fpld run`."""
    for row in serve(grid, FEDERATION, TEXT, Path(str(context.run_config["out"]))):
        log.info(
            "%s: %.4f nats per token with %s bytes sent up", row["method"], row["heldout_loss"], row["uplink_bytes"]
        )
