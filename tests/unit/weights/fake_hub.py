"""A hub in this process: huggingface-hub's real client talks to it over a transport without a network."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import httpx

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class FakeHub:
    """One repository, `org/name`, with files by name; `requests` lists what was asked for."""

    files: dict[str, bytes]
    refuse: tuple[int, str] | None = None
    """HTTP status and X-Error-Code for the listing."""
    refuse_files: tuple[int, str] | None = None
    """The same for the files' own contents: how a gated repository answers."""
    down: bool = False
    files_down: bool = False
    requests: list[str] = field(default_factory=list)

    def client(self) -> httpx.Client:
        """Return a client for `huggingface_hub.set_client_factory`."""
        return httpx.Client(transport=httpx.MockTransport(self._answer), follow_redirects=True)

    def fetched(self) -> set[str]:
        """Return the names of the files whose contents were sent."""
        return {request.rpartition("/")[2] for request in self.requests if request.startswith("GET /org/name/resolve")}

    def _answer(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        self.requests.append(f"{request.method} {path}")
        listing = path.startswith("/api/models/")
        if self.down or (self.files_down and not listing):
            raise httpx.ConnectError("Network is unreachable", request=request)
        refused = self.refuse if listing else self.refuse_files
        if not (path + "/").startswith(("/api/models/org/name/", "/org/name/")):
            refused = (401, "RepoNotFound")
        elif "/other" in path:
            refused = (404, "RevisionNotFound")
        if refused:
            return httpx.Response(refused[0], headers={"X-Error-Code": refused[1]}, request=request)
        if listing and "/tree/" in path:
            tree = [{"type": "file", "path": n, "size": len(b), "oid": _digest(b)} for n, b in self.files.items()]
            return httpx.Response(200, json=tree)
        if listing:
            siblings = [{"rfilename": n, "size": len(b), "blobId": _digest(b)} for n, b in self.files.items()]
            return httpx.Response(200, json={"id": "org/name", "sha": COMMIT, "siblings": siblings})
        content = self.files[path.partition(f"/resolve/{COMMIT}/")[2]]
        headers = {"ETag": f'"{_digest(content)}"', "X-Repo-Commit": COMMIT, "Content-Length": str(len(content))}
        return httpx.Response(200, headers=headers, content=content if request.method == "GET" else b"")


def _digest(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()
