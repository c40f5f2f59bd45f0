"""The page in a browser: a server of panels that reads stores, answers GET alone and reaches nothing else.

    / and ASSETS   the page and its parts
    /api/runs      every run: its name, its state, its facts
    /api/panels    ?run=0&names=hosts,lives&round=7&epoch=3&row=2: what there is to choose, and the tables
    /api/compare   the runs beside each other
    /api/events    server-sent: a number that rises whenever a store was written or its trainer came or went

An answer is kept while the files that it is of stay as they are, for a few seconds since ages pass. It has a
tag; who sends that back is told whether the answer is another one. Every request needs the token, from the
address or from the cookie that the page sets, and a Host that is an IP address, localhost or the name that
was asked for: a name that a stranger's DNS controls reads nothing.
"""

import hashlib
import hmac
import ipaddress
import json
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import cached_property
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from typing import Any, cast
from urllib.parse import parse_qs, urlencode, urlsplit

from esper.karn.comparing import compare
from esper.karn.panels import PAGES, Run, open_run
from esper.karn.stores import stamp, stores_below, written
from esper.leyline import EsperError
from esper.leyline.storage import is_locked

LOCAL = "127.0.0.1"
PAUSE, BEAT = 0.5, 10.0  # seconds between two looks for news; and between two signs of life to a page
KEPT, HELD = 5.0, 256  # an answer is given again for so many seconds; so many are held
MOST = 64  # connections at a time, each with a thread; more are closed at once
_KINDS = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
ASSETS = {"/": "index.html"} | {f"/{name}": name for name in (
    "app.js", "draw.js", "pages.js", "style.css", "uplot.js", "uplot.css")}
"""address -> file of the folder `web`."""
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer", "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin"}
EXACT = 2**53  # beyond it a browser rounds whole numbers
Query = Mapping[str, str]


class Gallery:
    """Stores that are looked at from many threads, one at a time. What breaks says so and is tried again."""

    def __init__(self, paths: Sequence[str | Path]) -> None:
        self.given, self.paths = paths, list[Path]()
        self._find()
        self.lock, self.news, self.version, self.closed = threading.Lock(), threading.Condition(), 0, False
        self._open: dict[int, Run] = {}
        self._answers: dict[str, tuple[object, float, bytes]] = {}
        self._seen = self._marks()

    def _find(self) -> None:
        """Those that were begun since come last, so that a run keeps its number."""
        found = dict.fromkeys(store for path in self.given for store in stores_below(path))
        self.paths += [store for store in found if store not in self.paths]

    def run(self, number: int) -> Run:
        """Opened at its first use."""
        if not 0 <= number < len(self.paths):
            raise EsperError(f"there is no run {number}; there are {len(self.paths)}, from 0")
        if number not in self._open:
            self._open[number] = open_run(self.paths[number])
        return self._open[number].refresh()

    def newest(self) -> int:
        return max(range(len(self.paths)), key=lambda number: written(self.paths[number]))

    def watch(self) -> None:
        """Until it is closed, tell those who wait when anything was written."""
        while not self.closed:
            before, self._seen = self._seen, self._marks()
            with self.news:
                self.version += before != self._seen
                self.news.notify_all()
                self.news.wait_for(lambda: self.closed, PAUSE)

    def _marks(self) -> list[object]:
        """Others whenever something is written, told by the files alone: SQLite is not asked."""
        return [(stamp(path), is_locked(path.parent)) for path in self.paths]

    def answer(self, path: str, query: Query) -> bytes:
        """In JSON, from memory where that is still true."""
        if path != "/api/panels":
            with suppress(EsperError):
                self._find()
        key, now = f"{path}?{urlencode(sorted(query.items()))}", self._marks()
        marks, since, body = self._answers.get(key, (None, 0.0, b""))
        if marks != now or time.monotonic() - since > KEPT:
            body = json.dumps(_exact(API[path](self, query))).encode()
            self._answers = self._answers if len(self._answers) < HELD else {}
            self._answers[key] = now, time.monotonic(), body
        return body

    def events(self) -> Iterator[int]:
        """The version, at once, whenever it rises and every few seconds."""
        yield (seen := self.version)
        while not self.closed:
            with self.news:
                self.news.wait_for(lambda seen=seen: self.closed or self.version != seen, BEAT)  # type: ignore[misc]
            yield (seen := self.version)

    def close(self) -> None:
        with self.news:
            self.closed = True
            self.news.notify_all()
        with self.lock:
            for run in self._open.values():
                run.connection.close()

    def runs(self, query: Query) -> list[dict[str, Any]]:
        found = []
        for number, path in enumerate(self.paths):
            about: dict[str, Any] = {"run": number, "name": path.parent.name, "path": str(path)}
            try:
                run = self.run(number)
                facts = {name: fact for name, fact in run.facts().items() if name != "config"}
                found.append(about | {"name": run.name, "facts": facts, "state": run.panel("state").json()})
            except EsperError as error:
                found.append(about | {"broken": str(error)})
        return found

    def panels(self, query: Query) -> dict[str, Any]:
        """Those named, or those of a page."""
        try:
            chosen = {name: int(value) for name, value in query.items()
                      if name not in ("names", "page")}
        except ValueError as error:
            raise EsperError(f"a round, an epoch and a row are whole numbers: {error}") from error
        run, names = self.run(chosen.pop("run", 0)), PAGES.get(query.get("page", ""), [])
        names = query["names"].split(",") if "names" in query else names
        return {"extent": asdict(run.extent(chosen.get("round"))),
                "panels": {name: run.panel(name, **chosen).json() for name in names}}

    def compare(self, query: Query) -> dict[str, Any]:
        """Those that can be read."""
        return compare([self.run(each["run"]) for each in self.runs(query) if "broken" not in each]).json()


API: Mapping[str, Callable[[Gallery, Query], Any]] = {
    "/api/runs": Gallery.runs, "/api/panels": Gallery.panels, "/api/compare": Gallery.compare}
"""address -> what answers it, in JSON."""


class Handler(BaseHTTPRequestHandler):
    """GET; anything else is refused by its base class."""

    protocol_version, timeout = "HTTP/1.1", 60
    server_version, sys_version = "esper", ""

    def log_message(self, format: str, *about: object) -> None: ...  # addresses hold the token

    @property
    def page(self) -> "Dashboard":
        return cast("Dashboard", self.server)

    def do_GET(self) -> None:
        try:
            place = urlsplit(self.path)
        except ValueError:
            return self._answer("text/plain", b"that is no address", HTTPStatus.BAD_REQUEST)
        query = {name: values[-1] for name, values in parse_qs(place.query).items()}
        try:
            if not self.page.knows_host(self.headers.get("Host", "")):
                self._answer("text/plain", b"this server is not asked by that name", HTTPStatus.FORBIDDEN)
            elif not self._may(query):
                self._answer("text/plain", b"use the address that esper dashboard printed, with its token",
                             HTTPStatus.FORBIDDEN)
            elif place.path == "/api/events":
                self._events()
            elif place.path in API:
                self._json(place.path, query)
            elif place.path in ASSETS:
                name = ASSETS[place.path]
                self._answer(_KINDS[Path(name).suffix], self.page.assets[name])
            else:
                self._answer("text/plain", b"there is nothing here", HTTPStatus.NOT_FOUND)
        except (ConnectionError, TimeoutError):
            self.close_connection = True

    def _may(self, query: Query) -> bool:
        cookie: SimpleCookie = SimpleCookie()
        with suppress(CookieError):
            cookie.load(self.headers.get("Cookie", ""))
        given = query.get("token", cookie[name].value if (name := self.page.cookie) in cookie else "")
        return hmac.compare_digest(given.encode(), self.page.token.encode())

    def _json(self, path: str, query: Query) -> None:
        try:
            with self.page.gallery.lock:
                body = self.page.gallery.answer(path, {k: v for k, v in query.items() if k != "token"})
            tag = f'"{hashlib.blake2b(body, digest_size=16).hexdigest()}"'
            known = self.headers.get("If-None-Match") == tag
            status, body = (HTTPStatus.NOT_MODIFIED, b"") if known else (HTTPStatus.OK, body)
            self._answer("application/json", body, status, ETag=tag)
        except EsperError as error:
            told = json.dumps({"error": str(error)}).encode()
            self._answer("application/json", told, HTTPStatus.BAD_REQUEST)

    def _answer(self, kind: str, body: bytes, status: HTTPStatus = HTTPStatus.OK, **more: str) -> None:
        self._head(kind, status, {"Content-Length": str(len(body)), **more})
        self.wfile.write(body)

    def _head(self, kind: str, status: HTTPStatus, more: Mapping[str, str]) -> None:
        self.send_response(status)
        headers = {**HEADERS, "Content-Type": f"{kind}; charset=utf-8", **more}
        if status == HTTPStatus.OK and kind == "text/html":
            headers["Set-Cookie"] = f"{self.page.cookie}={self.page.token}; HttpOnly; SameSite=Strict; Path=/"
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def _events(self) -> None:
        self._head("text/event-stream", HTTPStatus.OK, {"Connection": "close"})
        for version in self.page.gallery.events():
            self.wfile.write(f"data: {version}\n\n".encode())


class Dashboard(ThreadingHTTPServer):
    """A server of the page of some runs; `serve` runs it. Port 0 is any that is free."""

    daemon_threads = True

    def __init__(self, runs: Sequence[str | Path], host: str, port: int) -> None:
        self.gallery, self.host, self.token = Gallery(runs), host, secrets.token_urlsafe(24)
        self.places = threading.BoundedSemaphore(MOST)
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            super().__init__((host, port), Handler)
        except (OSError, OverflowError) as error:
            raise EsperError(f"cannot serve at {host}, port {port}: {error}; "
                             "choose another --host or --port") from error

    @cached_property
    def assets(self) -> dict[str, bytes]:
        folder = files(__package__) / "web"
        return {name: (folder / name).read_bytes() for name in ASSETS.values()}

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    @property
    def cookie(self) -> str:
        """Cookies know no ports, so their names do."""
        return f"esper_{self.port}"

    @property
    def url(self) -> str:
        name = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{name}:{self.port}/?token={self.token}"

    def knows_host(self, header: str) -> bool:
        try:
            name = urlsplit(f"//{header}").hostname or ""
            return name in ("localhost", self.host.lower()) or bool(ipaddress.ip_address(name))
        except ValueError:
            return False

    def verify_request(self, request: Any, client_address: Any) -> bool:
        return self.places.acquire(blocking=False)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # a browser that went away is no error
            super().handle_error(request, client_address)


@contextmanager
def serve(runs: Sequence[str | Path], host: str = LOCAL, port: int = 0) -> Iterator[Dashboard]:
    """Serve in threads until this is left."""
    with Dashboard(runs, host, port) as page:
        for work in (page.gallery.watch, page.serve_forever):
            threading.Thread(target=work, daemon=True).start()
        try:
            yield page
        finally:
            page.shutdown()
            page.gallery.close()


def _exact(value: Any) -> Any:
    """Whole numbers that a browser would round, as text."""
    if isinstance(value, dict):
        return {name: _exact(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_exact(each) for each in value]
    return str(value) if isinstance(value, int) and abs(value) > EXACT else value
