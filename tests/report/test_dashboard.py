"""`fpld dashboard` over HTTP: read-only, for this machine or with the token, and no name becomes a path."""

from __future__ import annotations

import http.client
import json
import re
import socket
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote, urlencode, urlsplit

import pytest

from fpld.cli import main
from tests.report.conftest import EVIL, EVIL_PATH, EVIL_SCRIPT, Served, serve

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    text: str

    def json(self) -> Any:
        return json.loads(self.text)


def ask(served: Served, path: str, method: str = "GET", body: str | None = None, **headers: str) -> Answer:
    """Send a request exactly as it is written: no client tidies up a path with `..` on the way."""
    place = urlsplit(served.url)
    connection = http.client.HTTPConnection(place.hostname or "", place.port or 80, timeout=30)
    connection.request(method, path, body, headers={name.replace("_", "-"): value for name, value in headers.items()})
    answer = connection.getresponse()
    result = Answer(answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read().decode())
    connection.close()
    return result


@pytest.fixture(scope="module")
def local(finished: Path) -> Iterator[Served]:
    with serve(finished.parent) as served:
        yield served


@pytest.mark.slow
def test_it_is_for_this_machine_by_default(local: Served) -> None:
    assert local.url.startswith("http://127.0.0.1:")
    assert local.token is None
    page = ask(local, "/")
    assert page.status == 200
    assert page.headers["content-security-policy"].startswith("default-src 'none'; script-src 'self'")
    assert page.headers["cache-control"] == "no-store"
    for source in re.findall(r'(?:src|href)="([^"]+)"', page.text):
        assert source == "data:," or ask(local, source).status == 200


@pytest.mark.parametrize("host", ["localhost", "localhost:1", "127.0.0.1:8337", "[::1]", "[::1]:8337", "LocalHost"])
def test_names_of_this_machine_are_taken(local: Served, host: str) -> None:
    assert ask(local, "/api/runs", Host=host).status == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8337",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "[::1].evil",
        "[::1].evil:8337",
        "[::1]evil",
        "[::1",
        "::1",
        "[::2]:8337",
        "localhost:",
        "localhost:80:80",
        "localhost:evil",
        "evil@localhost",
        "",
    ],
)
def test_names_of_other_sites_are_refused(local: Served, host: str) -> None:
    """Another site's name that resolves to this machine must not read the page in a browser here."""
    answer = ask(local, "/api/runs", Host=host)
    assert answer.status in (400, 403)
    assert "toy" not in answer.text


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
@pytest.mark.parametrize("path", ["/", "/api/runs", "/api/run?name=toy", "/login"])
def test_it_is_read_only(local: Served, method: str, path: str) -> None:
    assert ask(local, path, method).status == 405


def test_runs_and_their_parts(local: Served) -> None:
    (row,) = ask(local, "/api/runs").json()
    assert (row["name"], row["state"]) == ("toy", "done")
    run = ask(local, "/api/run?name=toy").json()
    assert "What each node contributed" in run["body"]
    assert ask(local, f"/api/run?name=toy&have={run['stamp']}").json() == {"stamp": run["stamp"]}


@pytest.mark.parametrize(
    "name", ["..", "../toy", "toy/../toy", "/etc", "toy/fpld", "./toy", "%2e%2e%2ftoy", "", EVIL, "toy\0"]
)
def test_names_open_nothing(local: Served, name: str) -> None:
    answer = ask(local, f"/api/run?name={quote(name)}")
    assert answer.status == 404
    assert "no run is called" in answer.json()["error"]
    assert ask(local, f"/api/planner?run={quote(name)}").status == 404


@pytest.mark.parametrize(
    "path", ["../app.py", "../../errors.py", "..%2fapp.py", "vendor/../page.css", "/etc/passwd", "nothing.js", ""]
)
def test_assets_are_only_those_listed(local: Served, path: str) -> None:
    answer = ask(local, f"/assets/{path}")
    assert answer.status == 404
    assert "import" not in answer.text


def test_plans(local: Served) -> None:
    start = ask(local, "/api/planner?run=toy").json()
    assert [site["name"] for site in start["sites"]] == ["north", "east", "south"]
    links = ",".join(str(site["limit"]) for site in start["sites"])
    query = {"run": "toy", "links": links, "deadline": start["deadline"], "total": 0.5}
    first = ask(local, f"/api/plan?{urlencode(query)}").json()["body"]
    more = ask(local, f"/api/plan?{urlencode({**query, 'total': 1})}").json()["body"]
    assert "Bits for each node" in first
    assert first != more
    for nonsense in ({"links": "1"}, {"total": 7}, {"deadline": "nan"}, {"deadline": -1}, {"links": "-1,2,3"}):
        assert "No such plan" in ask(local, f"/api/plan?{urlencode({**query, **nonsense})}").json()["body"]
    assert ask(local, "/api/plan?links=x").status == 400
    example = ask(local, "/api/planner").json()  # without a run; its sites have links
    assert [site["unit"] for site in example["sites"]] == ["bit/s"] * 4
    links = ",".join(str(site["limit"]) for site in example["sites"])
    few = ask(local, f"/api/plan?{urlencode({'links': links, 'deadline': 0.01, 'total': 0.5})}").json()["body"]
    assert "feasible is a deadline of at least" in few


def test_another_address_asks_for_a_token(finished: Path) -> None:
    with serve(finished.parent, "--host", "0.0.0.0") as served:  # noqa: S104
        assert served.token is not None
        assert len(served.token) >= 24
        for path in ("/", "/api/runs", "/api/run?name=toy", "/assets/page.css", "/nothing"):
            assert ask(served, path).status == 401
        form = {"Content_Type": "application/x-www-form-urlencoded"}
        wrong = ask(served, "/login", "POST", urlencode({"token": served.token[:-1]}), **form)
        assert wrong.status == 401
        assert "That is not the token" in wrong.text
        assert "set-cookie" not in wrong.headers
        assert ask(served, "/login", "POST", "token=" + "x" * 10_000, **form).status == 413
        right = ask(served, "/login", "POST", urlencode({"token": served.token}), **form)
        assert right.status == 303
        cookie = right.headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=strict" in cookie
        assert served.token not in cookie
        assert ask(served, "/api/runs", Cookie=cookie.partition(";")[0]).status == 200
        assert ask(served, "/api/runs", Cookie="fpld=guess").status == 401
        assert ask(served, "/api/runs", Authorization=f"Bearer {served.token}").status == 200
        assert ask(served, "/api/runs", Authorization="Bearer guess").status == 401
        assert ask(served, "/", "POST", Cookie=cookie.partition(";")[0]).status == 405


def test_a_token_of_ones_own(finished: Path) -> None:
    token = "correct horse battery"  # noqa: S105
    with serve(finished.parent, FPLD_TOKEN=token) as served:
        assert served.token == token
        assert ask(served, "/").status == 401
        assert ask(served, "/", Authorization=f"Bearer {token}").status == 200


def test_hostile_runs_are_text(hostile: Path) -> None:
    with serve(hostile.parent) as served:
        (row,) = ask(served, "/api/runs").json()
        assert row["name"] == EVIL
        run = ask(served, f"/api/run?name={quote(EVIL)}").json()
        for part in (run["live"], run["body"]):
            assert EVIL not in part
            assert EVIL_SCRIPT not in part
            assert "&lt;img src=x" in part
        assert EVIL_PATH in run["body"]


def test_a_damaged_run_is_named_and_the_others_are_shown(finished: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad"
    bad.mkdir()
    (bad / "config.toml").write_text("")
    (bad / "versions.json").write_text("{}")
    (bad / "trace.jsonl").write_text("{")
    with serve(tmp_path) as served:
        (row,) = ask(served, "/api/runs").json()
        assert row["state"] == "unreadable"
        assert "trace.jsonl, line 1" in ask(served, "/api/run?name=bad").json()["body"]


def test_bad_arguments(finished: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        cases = [
            (["dashboard", str(finished / "nowhere")], "is no folder"),
            (["dashboard", str(finished), "--port", "99999"], "--port must be from 0 to 65535"),
            (["dashboard", str(finished), "--port", str(taken.getsockname()[1])], "cannot serve on 127.0.0.1"),
            (["dashboard", str(finished), "--host", "no.such.host.invalid"], "cannot serve on no.such.host.invalid"),
        ]
        for arguments, message in cases:
            assert main(arguments) == 2
            assert message in capsys.readouterr().err
    monkeypatch.setenv("FPLD_TOKEN", "short")
    assert main(["dashboard", str(finished)]) == 2
    assert "FPLD_TOKEN must have at least 16 characters" in capsys.readouterr().err
