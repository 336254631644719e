"""A federation in seconds, from the front door: two nodes, two rounds, one model that writes.

`fpld.run("demo")` is the same with transformers and five nodes, in minutes.
"""

import fpld

run = fpld.run("tiny", seed=1)

for row in run.table:
    print(f"{row.method:18} {row.heldout_loss:.3f} nats per token, {row.uplink_bytes:,} bytes sent")
for record in run.rounds:
    print(f"round {record.round}: {record.heldout_loss:.3f} nats per token, {record.payload_bytes:,} bytes of labels")
print(run.generate("My fellow citizens", tokens=60))
print(f"{run.folder} holds the run: fpld.read_run({str(run.folder)!r}) reads it again")
