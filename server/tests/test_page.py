"""The page at /: its routes, its headers, and which files are served. ``make test-page`` runs it in a browser."""

from __future__ import annotations

import json
import posixpath
import re
from typing import Any

import httpx
import pytest
from fetch_page_libraries import LIBRARIES, versions

from evener_server.api_keys import ApiKeys
from evener_server.app import create_app
from evener_server.options import ServerOptions
from evener_server.page import FOLDER, page_files

#: What a page of ours may weigh: a phone loads it over a slow line.
MAX_FIRST_LOAD, MAX_ALL = 300_000, 1_200_000
TEXT = {name: file.content.decode() for name, file in page_files().items() if name.endswith((".html", ".css", ".js"))}
OWN = {name: text for name, text in TEXT.items() if not name.startswith("libraries/")}


def test_the_page_is_at_the_root_and_brings_nothing_from_elsewhere(api: Any) -> None:
    response = api.get("/")
    assert response.status_code == 200 and response.headers["content-type"] == "text/html; charset=utf-8"
    for name, text in OWN.items():
        found = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+", re.sub(r"^\s*(?://|/?\*).*", "", text, flags=re.M)))
        assert found <= {"http://www.w3.org"}, name


def test_all_that_the_page_names_is_served(api: Any) -> None:
    html = api.get("/").text
    names = set(re.findall(r'(?:src|href)="([^"#]+)"', html))
    assert {"page/js/main.js", "page/style/base.css"} <= names
    for name in names:
        assert api.get(f"/{name}").status_code == 200, name
    for name, text in OWN.items():
        for path in re.findall(r'(?:from|import|import\()\s*"(\.[^"]+)"', text):
            assert posixpath.normpath(posixpath.join(name, "..", path)) in page_files(), (name, path)
    icons = set(re.findall(r'(?:icon\(|iconButton\()"(\w+)"', "".join(OWN.values())))
    assert icons <= set(re.findall(r'id="icon-(\w+)"', html))


def test_scripts_run_only_from_files_and_nothing_may_be_fetched_from_elsewhere(api: Any) -> None:
    policy = dict(each.split(" ", 1) for each in api.get("/").headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == policy["font-src"] == "'self'"
    assert policy["img-src"] == "'self' data: blob:" and policy["frame-ancestors"] == "'none'"
    assert policy["require-trusted-types-for"] == "'script'" and policy["trusted-types"] == "dompurify"
    html = api.get("/").text
    assert not re.search(r"<script>|<script (?!src|type=\"module\" src)|<style|\son\w+=|\sstyle=", html)
    # With trusted types these would fail in a browser; DOMPurify alone makes elements from text.
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", "".join(OWN.values()))


@pytest.mark.parametrize("path", ["/", "/page/js/main.js", "/page/libraries/katex/fonts/KaTeX_Main-Regular.woff2"])
def test_every_file_has_the_headers_and_a_head_has_no_body(api: Any, path: str) -> None:
    response, head = api.get(path), api.request("HEAD", path)
    assert response.status_code == head.status_code == 200 and not head.content
    for answer in (response, head):
        assert answer.headers["x-content-type-options"] == "nosniff" and answer.headers["cache-control"] == "no-cache"
        assert answer.headers["content-security-policy"] and answer.headers["referrer-policy"] == "no-referrer"
    assert head.headers["etag"] == response.headers["etag"]


@pytest.mark.parametrize(
    ("name", "kind"),
    [("js/api.js", "text/javascript; charset=utf-8"), ("style/base.css", "text/css; charset=utf-8"),
     ("icon.svg", "image/svg+xml"), ("libraries/katex/fonts/KaTeX_Main-Regular.woff2", "font/woff2"),
     ("libraries/marked/LICENSE", "text/plain; charset=utf-8")],
)  # fmt: skip
def test_a_file_has_its_media_type(api: Any, name: str, kind: str) -> None:
    assert api.get(f"/page/{name}").headers["content-type"] == kind


@pytest.mark.parametrize("known", ["{tag}", "W/{tag}", '"other", {tag}', "*"])
def test_a_file_that_a_browser_has_is_not_sent_again(api: Any, known: str) -> None:
    tag = api.get("/page/js/main.js").headers["etag"]
    again = api.get("/page/js/main.js", headers={"if-none-match": known.format(tag=tag)})
    assert again.status_code == 304 and not again.content and again.headers["etag"] == tag
    assert api.get("/page/js/main.js", headers={"if-none-match": '"other"'}).status_code == 200


@pytest.mark.parametrize(
    "path",
    ["/page/", "/page/js", "/page/js/", "/page/js/no.js", "/page/../page.py", "/page/..%2fpage.py",
     "/page/js/../../page.py",
     "/page/%2e%2e/options.py", "/page//etc/passwd", "/page/js/main.js/", "/page/JS/main.js", "/page/js/main.js%00",
     "/page/" + "x" * 5000, "/index.html", "/page"],
)  # fmt: skip
def test_only_files_of_the_list_are_served(api: Any, error: Any, path: str) -> None:
    response = api.request("GET", httpx.URL("http://test").copy_with(raw_path=path.encode()))
    assert response.status_code == 404 and error(response)["code"] == "unknown_url"
    assert len(response.content) < 6000


def test_other_methods_are_refused(api: Any, error: Any) -> None:
    for path in ("/", "/page/js/main.js"):
        assert error(api.post(path, {}))["code"] == "method_not_allowed"


def test_without_the_key_there_is_no_page(make_api: Any, error: Any) -> None:
    api = make_api(options=ServerOptions(page=False))
    for path in ("/", "/page/js/main.js"):
        assert api.get(path).status_code == 404 and error(api.get(path))["code"] == "unknown_url"
    assert api.chat().status_code == 200


def test_the_page_needs_no_api_key_and_what_it_asks_for_does(api: Any) -> None:
    def status(path: str, options: ServerOptions) -> int:
        app = create_app(api.llm, keys=ApiKeys(["sk-1"]), options=options)
        transport = httpx.ASGITransport(app)

        async def ask() -> httpx.Response:
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                return await client.get(path)

        return int(api.run(ask()).status_code)

    for path, with_page, without in (
        ("/", 200, 401), ("/page/js/main.js", 200, 401), ("/page/js/no.js", 401, 401), ("/v1/models", 401, 401),
    ):  # fmt: skip
        assert status(path, ServerOptions()) == with_page, path
        assert status(path, ServerOptions(page=False)) == without, path


def test_other_host_names_get_no_page(api: Any) -> None:
    app = create_app(api.llm, hosts=["localhost"])

    async def ask(host: str) -> int:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=f"http://{host}") as client:
            return (await client.get("/")).status_code

    assert api.run(ask("localhost")) == 200 and api.run(ask("evil.example")) == 403


def test_behind_a_path_of_a_proxy_the_page_and_what_it_names_are_found(make_api: Any) -> None:
    api = make_api(options=ServerOptions(root_path="/llm"))
    assert api.get("/llm/").status_code == api.get("/llm/page/js/main.js").status_code == 200
    # All its addresses are relative, so that they keep the proxy's path.
    assert not re.search(r'(?:src|href)="/', api.get("/llm/").text)
    assert not re.search(r'"/(?:v1|page)/', "".join(OWN.values()))


def test_files_of_the_page_are_logged_for_debugging_only(api: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "evener_server.access"):
        api.get("/page/js/main.js")
        api.get("/")
    (line,) = caplog.messages
    assert "path=/ " in line


def test_the_model_says_whether_it_takes_images(api: Any) -> None:
    assert api.get("/v1/models").json()["data"][0]["input_modalities"] == ["text"]


def test_the_page_is_small() -> None:
    sizes = {name: len(file.content) for name, file in page_files().items()}
    later = ("libraries/katex/", "libraries/highlight/")
    assert sum(size for name, size in sizes.items() if not name.startswith(later)) < MAX_FIRST_LOAD
    assert sum(sizes.values()) < MAX_ALL


def test_the_libraries_are_those_that_are_pinned_each_with_its_licence() -> None:
    folder = FOLDER / "libraries"
    assert json.loads((folder / "versions.json").read_text()) == versions()
    found = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert found == {f"{each.folder}/{name}" for each in LIBRARIES for name in each.files.values()} | {"versions.json"}
    for library in LIBRARIES:
        assert "LICENSE" in library.files.values()
        assert re.search("Copyright|Apache License", (folder / library.folder / "LICENSE").read_text())


def test_every_text_is_there_in_both_languages_and_is_used() -> None:
    texts = OWN["js/texts.js"].split("\n  zh: {")
    names = [set(re.findall(r"(?:^|[{,])\s+(\w+):\s", part, re.M)) - {"en", "zh"} for part in texts]
    assert names[0] == names[1] and len(names[0]) > 80
    # Names of sampling fields are their texts' names too.
    rest = "".join(text for name, text in OWN.items() if name != "js/texts.js")
    assert [name for name in sorted(names[0]) if not re.search(rf'"{name}"|\b{name}: {{ min', rest)] == []
