"""How a site's connection stands: a state with its reason, found without Flower's words.

    connecting -> connected -> training <-> waiting -> stopped
         |
         +-> certificate refused, not admitted: what an operator must mend

`try_connection` reaches for the aggregator as a node does: a TCP connection, a TLS handshake with the site's `ca.pem`,
and one request. What fails there is said in words of this project. `ConnectionWatch` looks at a SuperNode while it
runs. A node that is let in is `connected`. One that ends before that, although the aggregator answers, is not admitted.
Each change is a line of the site's log, and stands in a file for `fpld node status`.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import socket
import ssl
import time
from typing import TYPE_CHECKING, Literal, NamedTuple

from fpld.engines.flower.credentials import clock_difference
from fpld.engines.flower.log import append_log
from fpld.engines.flower.site.folder import CONTACT_FILE
from fpld.errors import FpldError
from fpld.storage.files import write_atomic

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from fpld.engines.flower.launch.processes import ChildProcess

SiteStateName = Literal[
    "connecting", "not admitted", "certificate refused", "connected", "training", "waiting", "stopped"
]
HEALTHY_STATES = ("connected", "training", "waiting")
STATE_FILE = "state.json"  # in the folder `flower` of a site
SIGNED_ON = "SuperNode ID"  # what Flower writes when a node is let in
_RETRYING = "Connection attempt failed"  # what Flower writes while it cannot reach the SuperLink
_RECONNECTED = "Connection successful"
_FAILED = " failed: "  # in a line of the site's log about work that failed
_TRIAL_SECONDS = 10.0  # for each step of a trial
_FIRST_TRIAL_SECONDS = 5.0  # after a start: by then a node is connected as a rule
_NEXT_TRIAL_SECONDS = 15.0
_LOOK_SECONDS = 1.0  # between two looks at Flower's log
_CONTACT_SECONDS = 60.0  # without contact for longer, the connection is tried
_TAIL_BYTES = 1 << 14
# OpenSSL's reasons to refuse a certificate.
_NOT_YET_VALID = 9
_EXPIRED = 10
_OTHER_HOST = (62, 64)


class SiteState(NamedTuple):
    """How a site stands, and why."""

    state: SiteStateName
    reason: str = ""

    @property
    def healthy(self) -> bool:
        """Return whether the site takes part, or is ready to."""
        return self.state in HEALTHY_STATES

    def __str__(self) -> str:
        return f"{self.state}: {self.reason}" if self.reason else self.state


class Trial(NamedTuple):
    """What a trial of the connection has shown: the problem, if any, and a sentence if the clocks differ."""

    problem: SiteState | None
    clock: str = ""


def not_admitted(name: str) -> SiteState:
    """Return the state of a node that was turned away: Flower has one error for all reasons, of code 2004."""
    return SiteState(
        "not admitted",
        f"the aggregator has not admitted this node's key yet (is this {name}.pub in its folder keys?), or a process "
        "elsewhere is connected with the same key (a copy of this folder?): then one of the two must go",
    )


def try_connection(address: str, ca: Path | None, *, seconds: float = _TRIAL_SECONDS) -> Trial:
    """Reach for the aggregator as a node does, without its key.

    Parameters
    ----------
    address
        Host and port of the aggregator.
    ca
        The certificate of its authority; None without TLS.
    seconds
        The longest wait for each step.
    """
    host, port = address.rsplit(":", 1)
    reason = ""
    try:
        if ca is None:
            connection = http.client.HTTPConnection(host, int(port), timeout=seconds)
        else:
            context = ssl.create_default_context(cafile=str(ca))
            connection = http.client.HTTPSConnection(host, int(port), timeout=seconds, context=context)
        with contextlib.closing(connection):
            connection.request("GET", "/health")
            return Trial(None, clock_difference(connection.getresponse().headers.get("date")))
    except ssl.SSLCertVerificationError as error:
        return Trial(SiteState("certificate refused", _refusal(error, host, "ca.pem" if ca is None else ca.name)))
    except ssl.SSLError:
        reason = f"what answers at {address} does not speak TLS: is the port right, and was it started with --insecure?"
    except socket.gaierror:
        reason = f"the name {host} is unknown to this machine: check `address` in node.toml, and the network"
    except (http.client.HTTPException, ConnectionResetError):
        reason = f"what answers at {address} is no aggregator, or wants TLS: check `address` in node.toml"
    except OSError as error:
        why = "no answer in time" if isinstance(error, TimeoutError) else error.strerror or type(error).__name__
        reason = f"nothing listens at {address} ({why}): is the aggregator running, and the port open to this machine?"
    return Trial(SiteState("connecting", reason))


def _refusal(error: ssl.SSLCertVerificationError, host: str, ca: str) -> str:
    """Return why the aggregator's certificate is not accepted, and what to do."""
    if error.verify_code == _EXPIRED:
        return (
            "the aggregator's certificate has ended: it needs new ones (`fpld certs`); or this machine's clock is wrong"
        )
    if error.verify_code == _NOT_YET_VALID:
        return "the aggregator's certificate is not valid yet: set this machine's clock"
    if error.verify_code in _OTHER_HOST:
        return (
            f"the aggregator's certificate is not for {host}: use a name that it is for, or have it made for this one"
        )
    return f"{ca} is not this aggregator's: fetch federation.toml again, and join with it"


class ConnectionWatch:
    """The state of a site, kept true while its SuperNode runs."""

    def __init__(self, folder: Path, name: str, address: str, ca: Path | None) -> None:
        self._folder = folder
        self._name = name
        self._address = address
        self._ca = ca
        self._signed_on = False  # the SuperNode that runs was let in
        self._begun = 0.0
        self._next_look = 0.0
        self._next_trial = 0.0
        self.state = SiteState("stopped")
        self.set(SiteState("connecting", f"to {address}"))

    def set(self, state: SiteState) -> None:
        """Write a state down, with a line in the log, if it is another one."""
        if state == self.state:
            return
        self.state = state
        content = {**state._asdict(), "time": round(time.time(), 3)}
        with contextlib.suppress(FpldError):  # a full disk is no reason to end
            write_atomic(self._folder / "flower" / STATE_FILE, json.dumps(content).encode())
            if state.state not in ("training", "waiting"):  # these the site's app has said itself
                append_log(self._folder, str(state))

    def start(self) -> None:
        """Note that a SuperNode was started."""
        self._signed_on = False
        self._begun = time.time()
        self._next_look = time.monotonic() + _LOOK_SECONDS
        self._next_trial = time.monotonic() + _FIRST_TRIAL_SECONDS

    def look(self, child: ChildProcess, texts: Iterable[str]) -> None:
        """Look at a SuperNode that runs; `texts` are new lines of the site's log."""
        for text in texts:
            self._read(text)
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + _LOOK_SECONDS
        if not self._signed_on and self._is_signed_on(child):
            self._signed_on = True
            self.set(SiteState("connected", "the aggregator's first message is to come"))
        if now >= self._next_trial and (not self._signed_on or self._is_silent(child)):
            self._next_trial = now + _NEXT_TRIAL_SECONDS
            problem = try_connection(self._address, self._ca).problem
            if problem is not None:
                self._signed_on = False
                self.set(problem)

    def ended(self, child: ChildProcess) -> bool:
        """Note that the SuperNode has ended; return whether it was turned away, which the state explains."""
        killed = (child.process.poll() or 0) < 0
        if killed or self._signed_on or self._is_signed_on(child):
            self.set(SiteState("connecting", f"to {self._address}, again"))
            return False
        trial = try_connection(self._address, self._ca)
        refusal = SiteState("not admitted", trial.clock) if trial.clock else not_admitted(self._name)
        self.set(trial.problem or refusal)
        return True

    def _read(self, text: str) -> None:
        """Follow the site's own log: its app says what it does."""
        if match := re.match(r"round (\d+): training", text):
            self.set(SiteState("training", f"round {match[1]}"))
        elif match := re.match(r"round (\d+): sending", text):
            self.set(SiteState("waiting", f"round {match[1]} is sent"))
        elif self.state.state == "training" and _FAILED in text:
            self.set(SiteState("waiting", text))
        elif text.endswith(" is connected"):
            if not (self.state.state == "waiting" and _FAILED in self.state.reason):  # it joins anew after a failure
                self.set(SiteState("waiting", "joined; the next round is to come"))
        else:
            return
        self._signed_on = True

    def _is_signed_on(self, child: ChildProcess) -> bool:
        return self._contact() >= self._begun or SIGNED_ON in child.output()

    def _is_silent(self, child: ChildProcess) -> bool:
        """Return whether a node that was let in seems to have lost its connection."""
        if self._contact() >= self._begun:
            return time.time() - self._contact() > _CONTACT_SECONDS
        tail = child.output()[-_TAIL_BYTES:]
        return tail.rfind(_RETRYING) > tail.rfind(_RECONNECTED)

    def _contact(self) -> float:
        """Return the time of the last contact; the patch `connection` writes it down."""
        try:
            return (self._folder / "flower" / CONTACT_FILE).stat().st_mtime
        except OSError:
            return 0.0


def read_state(folder: Path) -> SiteState:
    """Return the state that the process of a site has written down; `connecting` if it has not yet."""
    try:
        content = json.loads((folder / "flower" / STATE_FILE).read_bytes())
        return SiteState(content["state"], str(content["reason"]))
    except (OSError, ValueError, KeyError, TypeError):
        return SiteState("connecting")
