"""Count what a deployment over Flower puts on the wire, beside the payload: `python benchmarks/flower_overhead.py`.

Three nodes on loopback, TLS and node authentication, each behind a relay that counts the bytes of its connections (TLS
included, TCP/IP not). Rounds are those of `examples/flower/federation.toml`, or of a configuration that is given.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

from fpld.config import load
from fpld.engines.flower.processes import free_port

EXAMPLE = Path(__file__).parent.parent / "examples/flower/federation.toml"


class Relay:
    """Pass connections on, and count what goes up (to the aggregator) and down."""

    def __init__(self, target: int) -> None:
        self.target, self.port, self.bytes = target, free_port(), Counter[str]()
        self._listener = socket.create_server(("127.0.0.1", self.port))
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            inside, _ = self._listener.accept()
            try:
                outside = socket.create_connection(("127.0.0.1", self.target))
            except OSError:
                inside.close()
                continue
            for way, source, sink in (("up", inside, outside), ("down", outside, inside)):
                threading.Thread(target=self._pump, args=(way, source, sink), daemon=True).start()

    def _pump(self, way: str, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(1 << 16):
                self.bytes[way] += len(data)
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            source.close()
            sink.close()


def fpld(*arguments: object) -> list[str]:
    """Return the command line of a command."""
    return [sys.executable, "-m", "fpld", *map(str, arguments)]


def main() -> None:
    """Run the deployment and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", nargs="?", type=Path, default=EXAMPLE)
    arguments = parser.parse_args()
    config, text = load(arguments.config)
    port = free_port()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "keys").mkdir()
        flower = f'\n[flower]\naddress = "127.0.0.1:{port}"\ncerts = "{folder}/certs"\nkeys = "{folder}/keys"\n'
        (folder / "run.toml").write_text(text + flower)
        relays, nodes = {}, []
        for node in config.nodes:
            relay = relays[node.name] = Relay(port)
            subprocess.run(fpld("certs", "--address", f"127.0.0.1:{relay.port}", "--out", folder / "certs"), check=True)
            source = ["--corpus", config.data.corpus, "--label", node.label or node.name]
            join = ["--join", folder / "certs/federation.toml", "--out", folder / node.name]
            subprocess.run(fpld("init-node", node.name, *join, *source), check=True)
            (folder / node.name / f"{node.name}.pub").rename(folder / "keys" / f"{node.name}.pub")
        running = subprocess.Popen(fpld("aggregator", folder / "run.toml", "--out", folder / "out"))
        try:
            time.sleep(20)  # until the keys are admitted
            nodes = [subprocess.Popen(fpld("node", folder / name / "node.toml")) for name in relays]
            failed = running.wait()
        finally:
            running.terminate()
            for process in nodes:
                process.terminate()
            for process in nodes:
                process.wait()
        if failed:
            raise SystemExit(failed)
        lines = [json.loads(line) for line in (folder / "out/trace.jsonl").read_text().splitlines()]
        contexts, vocab = config.probe.contexts, 256 if config.tokenizer.kind == "bytes" else config.tokenizer.vocab
        print(f"{len(lines)} rounds; student {(folder / 'out/student.safetensors').stat().st_size} bytes")
        print("node, bytes of payload up, bytes up in all, beyond the payload, per round, bytes down in all")
        for index, (name, relay) in enumerate(relays.items()):
            payload = round(sum(line["bits_sent"][index] for line in lines) * contexts * vocab / 8)
            beyond = relay.bytes["up"] - payload
            row = [name, payload, relay.bytes["up"], beyond, round(beyond / len(lines)), relay.bytes["down"]]
            print(", ".join(map(str, row)))


if __name__ == "__main__":
    main()
