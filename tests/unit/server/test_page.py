"""The page's files as they are served; how the page behaves is tested in a browser, tests/e2e/test_page.py."""

from __future__ import annotations

from importlib.resources import files

import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

from onekernel.server.app import create_app
from onekernel.server.page import page_routes
from onekernel.server.service import Service
from onekernel.server.settings import ServerSettings


@pytest.fixture
def client() -> TestClient:
    return TestClient(Starlette(routes=page_routes()))


def test_every_file_of_the_folder_is_served_with_its_type_and_the_policy(client: TestClient) -> None:
    names = {file.name for file in files("onekernel.server").joinpath("static").iterdir()}
    assert names == {"index.html"} | {route.path.rpartition("/")[2] for route in page_routes()} - {""}
    for name in names:
        answer = client.get("/" if name == "index.html" else f"/static/{name}")
        assert answer.status_code == 200
        kind = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
        assert answer.headers["content-type"].startswith(kind[name.rpartition(".")[2]])
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"


def test_an_unchanged_file_is_not_sent_again(client: TestClient) -> None:
    tag = client.get("/").headers["etag"]
    again = client.get("/", headers={"If-None-Match": tag})
    assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize("path", ["/static/", "/static/../page.py", "/static/%2e%2e/page.py", "/static//etc/passwd"])
def test_no_other_path_leads_to_a_file(client: TestClient, path: str) -> None:
    assert client.get(path).status_code == 404


def test_the_page_needs_no_key_but_the_model_s_name_does() -> None:
    service = Service(ServerSettings(model_names=("secret-model",), api_key="key"))
    client = TestClient(create_app(service))
    assert client.get("/").status_code == client.get("/static/app.js").status_code == 200
    assert client.get("/v1/models").status_code == 401
    assert "secret-model" not in client.get("/").text


def test_the_model_list_tells_the_read_limit_where_it_is_known() -> None:
    service = Service(ServerSettings(model_names=("m",)))
    client = TestClient(create_app(service))
    assert "onekernel" not in client.get("/v1/models").json()["data"][0]
    service.read_limit_us = 547.123
    assert client.get("/v1/models").json()["data"][0]["onekernel"] == {"read_limit_us": 547.12}
