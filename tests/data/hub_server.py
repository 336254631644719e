"""A hub on loopback: the requests that huggingface_hub makes to fetch and to push, over folders on the disk.

    python -m tests.data.hub_server ROOT

ROOT/models/OWNER/NAME/COMMIT and ROOT/datasets/OWNER/NAME/COMMIT are repositories. Prints its port. What is pushed goes
to the commit `pushed`. Requests without the token `hf_test` are refused for repositories named `private`.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

PUSHED = "pushed"


class Hub(BaseHTTPRequestHandler):
    """Answer from the folder `root`."""

    root: Path
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002 - the name of the base class
        """Be quiet."""

    def do_HEAD(self) -> None:
        """Answer with the headers of a file."""
        self.do_GET()

    def do_GET(self) -> None:
        """Answer with a list of files, or a file."""
        path = self.path.partition("?")[0]
        if "/private/" in path and self.headers.get("Authorization") != "Bearer hf_test":
            return self._json({"error": "Repository not found"}, 401, "RepoNotFound")
        listed = re.fullmatch(r"/api/(models|datasets)/([^/]+/[^/]+?)(?:/(revision|tree)/([^/]+)(/.*)?)?", path)
        if listed:
            kind, name, form, commit, below = listed.groups()
            if commit is None:  # the newest
                commit = max(path.name for path in (self.root / kind / name).iterdir())
            folder = self.root / kind / name / commit
            files = sorted(file for file in (folder / (below or "/")[1:]).rglob("*") if file.is_file())
            if not files:
                return self._json({"error": "Revision not found"}, 404, "RevisionNotFound")
            paths = {file.relative_to(folder).as_posix(): file.stat().st_size for file in files}
            if form == "tree":
                tree = [{"type": "file", "path": path, "size": size, "oid": "0"} for path, size in paths.items()]
                return self._json(tree)
            siblings = [{"rfilename": path} for path in paths]
            return self._json({"id": name, "sha": commit, "siblings": siblings, "private": False, "tags": []})
        file = re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        if not file:
            return self._json({"error": path}, 404)
        kind, name, commit, member = file.groups()
        found = self.root / (kind or "models/").strip("/") / name / commit / member
        if not found.is_file():
            return self._json({"error": "Entry not found"}, 404, "EntryNotFound")
        content = found.read_bytes()
        self.send_response(200)
        self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')  # noqa: S324 - as Git names a file
        self.send_header("X-Repo-Commit", commit)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)
        return None

    def do_POST(self) -> None:
        """Make a repository, or take a commit."""
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Authorization") != "Bearer hf_test":
            return self._json({"error": "Invalid token"}, 401)
        if self.path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization') or 'me'}/{asked['name']}"
            return self._json({"url": f"http://{self.headers['Host']}/{name}", "name": name, "id": name})
        if "/preupload/" in self.path:
            files = json.loads(body)["files"]
            return self._json(
                {"files": [{"path": each["path"], "uploadMode": "regular", "shouldIgnore": False} for each in files]}
            )
        commit = re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/main", self.path.partition("?")[0])
        if commit:
            for line in body.splitlines():
                entry = json.loads(line)
                if entry["key"] == "file":
                    target = self.root / "models" / commit[1] / PUSHED / entry["value"]["path"]
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(base64.b64decode(entry["value"]["content"]))
            made = {"commitUrl": f"http://{self.headers['Host']}/{commit[1]}/commit/{'b' * 40}", "commitOid": "b" * 40}
            return self._json({"success": True, **made, "pullRequestUrl": None})
        return self._json({}) if "validate-yaml" in self.path else self._json({"error": self.path}, 404)

    def _json(self, value: Any, status: int = 200, code: str = "") -> None:
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        if code:
            self.send_header("X-Error-Code", code)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def serve_hub(root: Path) -> ThreadingHTTPServer:
    """Return a server on a free port of loopback."""
    return ThreadingHTTPServer(("127.0.0.1", 0), type("RootedHub", (Hub,), {"root": root}))


if __name__ == "__main__":
    server = serve_hub(Path(sys.argv[1]))
    print(server.server_address[1], flush=True)  # noqa: T201
    server.serve_forever()
