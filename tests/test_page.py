"""The page in a browser and the report of runs: who may read them, that they stand alone, and what they show of a planted run."""

import http.client
import json
import os
import re
import shutil
import socket
import sqlite3
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from html import escape
from pathlib import Path
from typing import Any

import pytest

from esper.cli import main
from esper.karn import PAGES, PANELS, compare, open_run, serving, write_run_report
from esper.karn.markup import figure
from esper.karn.panels import said
from esper.karn.run_report import over_seeds
from esper.karn.serving import ASSETS, HEADERS, Dashboard, serve
from esper.leyline import EsperError
from esper.nissa import Store
from tests.planted import plant
from tests.test_panels import old
from tests.test_report import Page

WEB = Path(__file__).parent.parent / "src" / "esper" / "karn" / "web"
OWN = [WEB / name for name in ASSETS.values() if not name.startswith("uplot")]
HOSTILE = '<img src=x onerror="window.hacked=1">'


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("page")
    return [plant(folder / "planted"), plant(folder / "other", 0.05, seed=6)]


@pytest.fixture(scope="module")
def served(folders: list[Path]) -> Iterator[Dashboard]:
    with serve(folders) as dashboard:
        yield dashboard


def get(page: Dashboard, path: str, token: str | None = "", method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
    """With the page's own token, another, or none."""
    connection = http.client.HTTPConnection("127.0.0.1", page.port, timeout=10)
    given = "" if token is None else ("&" if "?" in path else "?") + f"token={token or page.token}"
    connection.request(method, path + given, headers={name.replace("_", "-"): value for name, value in headers.items()})
    answer = connection.getresponse()
    found = answer.status, dict(answer.getheaders()), b"" if path == "/api/events" and answer.status == 200 else answer.read()
    connection.close()
    return found


def asked(page: Dashboard, path: str) -> Any:
    status, _, body = get(page, path)
    assert status == 200, body
    return json.loads(body)


@pytest.mark.parametrize("path", ["/", "/app.js", "/api/runs", "/api/panels?names=state", "/api/compare", "/api/events", "/nothing"])
def test_nothing_is_told_without_the_token(path: str, served: Dashboard) -> None:
    for token in (None, "wrong", served.token[:-1], "ü"):
        status, headers, body = get(served, path, None if token is None else token.replace("ü", "%C3%BC"))
        assert status == 403
        assert body == b"use the address that esper dashboard printed, with its token"
        assert headers["Content-Security-Policy"] == HEADERS["Content-Security-Policy"]
    cookie = f"{served.cookie}={served.token}"
    assert get(served, path, None, Cookie=cookie)[0] == (404 if path == "/nothing" else 200)
    assert get(served, path, "wrong", Cookie=cookie)[0] == 403, "what is said outright counts"
    assert get(served, path, None, Cookie="a=b; ;;=, x")[0] == 403


@pytest.mark.parametrize(("host", "status"), [("localhost:1", 200), ("127.0.0.1", 200), ("[::1]:80", 200), ("192.168.0.7:8000", 200),
                                              ("evil.example", 403), ("127.0.0.1.evil.example:80", 403), ("", 403), ("[", 403)])
def test_a_name_of_a_strangers_dns_reads_nothing(host: str, status: int, served: Dashboard) -> None:
    assert get(served, "/api/runs", Host=host)[0] == status


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS"])
def test_it_can_only_be_read(method: str, served: Dashboard) -> None:
    assert get(served, "/api/runs", method=method)[0] == 501


def test_pages_come_with_a_strict_policy_and_stand_alone(served: Dashboard) -> None:
    status, headers, body = get(served, "/")
    assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    policy = dict(part.strip().split(" ", 1) for part in headers["Content-Security-Policy"].split(";"))
    assert policy | {"img-src": ""} == {
        "default-src": "'none'", "script-src": "'self'", "style-src": "'self'", "connect-src": "'self'", "img-src": "",
        "base-uri": "'none'", "form-action": "'none'", "frame-ancestors": "'none'"}
    assert "HttpOnly; SameSite=Strict" in headers["Set-Cookie"]
    assert re.findall(r'(?:src|href)="([^"]*)"', body.decode()) == ["data:,", "uplot.css", "style.css", "uplot.js", "app.js"]
    assert not re.search(r"<style|style=|<script>|\son\w+=", body.decode())
    assert sum(len(get(served, path)[2]) for path in ASSETS) < 250_000
    for path in ("/index.html", "/../serving.py", "/%2e%2e/serving.py", "/web/app.js", "/api"):
        assert get(served, path)[0] == 404


def test_own_parts_are_few_reach_nothing_and_write_no_markup() -> None:
    assert sum(len(path.read_text().splitlines()) for path in OWN) < 1200
    for path in OWN:
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?:|//\w+\.|innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|new Function", text), path.name
    assert "Permission is hereby granted" in (WEB / "uplot.LICENSE").read_text()


def test_the_page_gets_what_panels_say(served: Dashboard, folders: list[Path]) -> None:
    with open_run(folders[0]) as run, open_run(folders[1]) as other:
        for name in set(PANELS) - {"state"}:
            for chosen in ({}, {"round": 1}, {"round": 2, "epoch": 3, "row": 2}):
                said = "".join(f"&{key}={value}" for key, value in chosen.items())
                expected = json.loads(json.dumps(run.panel(name, **chosen).json()))
                assert asked(served, f"/api/panels?run=0&names={name}{said}")["panels"][name] == expected
        assert asked(served, "/api/compare") == json.loads(json.dumps(compare([run, other]).json()))
    for page, names in PAGES.items():
        assert list(asked(served, f"/api/panels?run=1&page={page}")["panels"]) == names
    assert [each["name"] for each in asked(served, "/api/runs")] == ["planted", "other"]
    extent = asked(served, "/api/panels?round=1")["extent"]
    assert extent == {"rounds": [0, 2], "round": 1, "epochs": 4, "rows": [0, 1, 2, 3], "slots": ["stem", "tail"]}


@pytest.mark.parametrize(("query", "why"), [
    ("names=fame", "no panel 'fame'"), ("run=9&names=state", "there is no run 9; there are 2, from 0"), ("run=-1", "no run -1"),
    ("round=x", "whole numbers"), ("names=hosts&slot=1", "no slot to choose"), ("round=99999999999999999999", "too large")])
def test_what_cannot_be_meant_is_one_sentence(query: str, why: str, served: Dashboard) -> None:
    status, _, body = get(served, f"/api/panels?{query}")
    assert status == 400
    assert why in json.loads(body)["error"]


def test_news_are_told_at_once_and_large_numbers_exactly(tmp_path: Path) -> None:
    store = Store(plant(tmp_path / "run") / "run.db")
    with serve([tmp_path]) as page:
        connection = http.client.HTTPConnection("127.0.0.1", page.port, timeout=10)
        connection.request("GET", f"/api/events?token={page.token}")
        stream = connection.getresponse()
        assert (stream.readline(), stream.readline()) == (b"data: 0\n", b"\n")
        store.write("step", {"round": 3, "epoch": 1, "row": 0, "scenario": 2**60 + 1, "op": "WAIT"})
        store.commit()
        assert stream.readline() == b"data: 1\n"
        assert asked(page, "/api/panels?names=hosts")["panels"]["hosts"]["rows"][0][2] == str(2**60 + 1)
        stream.close()
        connection.close()
    store.close()


def test_nothing_is_asked_of_sqlite_while_no_file_changes(tmp_path: Path) -> None:
    store = Store(plant(tmp_path / "run") / "run.db")
    paths = ("/api/runs", "/api/panels?page=overview", "/api/compare")
    with serve([tmp_path]) as page:
        told = [get(page, path) for path in paths]
        queries: list[str] = []
        page.gallery.run(0).connection.set_trace_callback(queries.append)
        for path, (_, headers, body) in zip(paths, told, strict=True):
            assert get(page, path)[2] == body
            assert get(page, path, If_None_Match=headers["ETag"])[::2] == (304, b"")
            assert get(page, path, If_None_Match='"another"')[::2] == (200, body)
            assert get(page, path, "wrong", If_None_Match=headers["ETag"])[0] == 403
        assert queries == []
        store.write("round", {"round": 3, "utility": 0.5})
        store.commit()
        for path, (_, headers, body) in zip(paths, told, strict=True):
            status, others, now = get(page, path, If_None_Match=headers["ETag"])
            same = path == "/api/compare"  # no examination was added
            assert (status, others["ETag"] == headers["ETag"], now == (b"" if same else body)) == (304 if same else 200, same, same)
        assert queries
    store.close()


def test_an_answer_with_ages_is_kept_for_a_moment_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(tmp_path / "run")
    monkeypatch.setattr(serving, "KEPT", 0.0)
    with serve([tmp_path]) as page:
        assert get(page, "/api/runs")[2] != get(page, "/api/runs")[2]


def test_a_run_that_breaks_or_is_begun_again_is_told(tmp_path: Path) -> None:
    for name in ("a", "b"):
        plant(tmp_path / name)
    with serve([tmp_path]) as page:
        assert asked(page, "/api/panels?run=1&names=learning")["panels"]["learning"]["rows"][-1][1] == 4.0
        for path in (tmp_path / "b").iterdir():
            path.unlink()
        assert "there is no run store" in asked(page, "/api/runs")[1]["broken"]
        assert len(asked(page, "/api/compare")["rows"]) == 1
        store = Store(tmp_path / "b" / "run.db")
        store.write("round", {"round": 0, "utility": 0.5})
        store.commit()
        store.close()
        assert asked(page, "/api/panels?run=1&names=learning")["panels"]["learning"]["rows"] == [[0, 50.0, None, None]]


def test_a_store_that_its_run_brings_to_this_schema_is_followed(tmp_path: Path) -> None:
    path = old(tmp_path / "run.db")
    with serve([path]) as page:
        assert len(asked(page, "/api/panels?names=learning")["panels"]["learning"]["rows"]) == 1
        before = page.gallery.version
        with closing(Store(path)) as store:
            store.write("round", {"round": 1, "utility": 0.5})
            store.commit()
            assert asked(page, "/api/panels?names=learning")["panels"]["learning"]["rows"][1] == [1, 50.0, None, None]
        assert next(version for version in page.gallery.events() if version > before), "and those who wait are told"


def test_a_run_that_is_begun_later_is_found(tmp_path: Path) -> None:
    plant(tmp_path / "second")
    with serve([tmp_path]) as page:
        assert [each["name"] for each in asked(page, "/api/runs")] == ["second"]
        plant(tmp_path / "first")
        assert [(each["run"], each["name"]) for each in asked(page, "/api/runs")] == [(0, "second"), (1, "first")]
        assert asked(page, "/api/panels?run=1&names=learning")["panels"]["learning"]["rows"]


def test_a_damaged_run_leaves_the_others_alone(tmp_path: Path) -> None:
    for name in ("odd", "whole"):
        plant(tmp_path / name)
    with closing(sqlite3.connect(tmp_path / "odd" / "run.db")) as connection, connection:
        connection.execute("UPDATE round SET seconds = 'x'")
    with serve([tmp_path]) as page:
        odd, whole = asked(page, "/api/runs")
        assert "is damaged: TypeError" in odd["broken"]
        assert whole["state"]["rows"][0][2] == 3
        assert [row[0] for row in asked(page, "/api/compare")["rows"]] == ["whole"]


def test_strangers_take_a_few_threads_at_most_and_leave_no_traceback(folders: list[Path], monkeypatch: pytest.MonkeyPatch,
                                                                     capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(serving, "MOST", 2)
    with serve(folders) as page:
        held = [socket.create_connection(("127.0.0.1", page.port)) for _ in range(3)]
        held[2].settimeout(10)
        assert held[2].recv(1) == b"", "closed at once"
        held[0].sendall(b"GET http://[ HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"400" in held[0].recv(100)
        for each in held:
            each.close()
        for _ in range(100):
            with suppress(OSError, http.client.HTTPException):
                assert asked(page, "/api/runs")
                break
            time.sleep(0.05)
        else:
            pytest.fail("places are given back")
    assert capfd.readouterr().err == ""


NUMBERS = [0, 7, 12345, 0.5, -0.125, 2.675, 1.115, 0.125, -0.375, 2.625, 0.009, -0.0012345, 1e-4, 0.0000123, 1e-7, 1234.5, None, "name", [1, None, 0.5]]


@pytest.mark.skipif(shutil.which("node") is None, reason="there is no node on this machine")
def test_a_number_is_written_alike_in_terminal_page_and_report(tmp_path: Path) -> None:
    shutil.copy(WEB / "draw.js", tmp_path / "draw.mjs")
    pairs = [(value, unit) for value in NUMBERS for unit in ("", "points", "%")] + [(age, "s") for age in (-3, 0, 119, 121, 7300, 200_000)]
    pairs += [(37.0, None), (0.0, None), (-2.5, None)]  # fractions
    code = f"import {{ said }} from './draw.mjs'; console.log(JSON.stringify({json.dumps(pairs)}.map(([value, unit]) => said(value, unit))))"
    told = subprocess.run(["node", "--input-type=module", "-e", code], cwd=tmp_path, check=True, capture_output=True, text=True).stdout
    assert json.loads(told) == [said(value, unit) for value, unit in pairs]
    assert [figure(value, unit).replace(",", "") for value, unit in pairs] == json.loads(told)


def test_the_command_says_where_the_page_is(folders: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                            capsys: pytest.CaptureFixture[str]) -> None:
    class Interrupted(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            raise KeyboardInterrupt

    from esper.cli import dashboard

    monkeypatch.setattr(dashboard, "Event", Interrupted)
    assert main(["dashboard", str(folders[0])]) == 0
    said = capsys.readouterr().out
    assert re.match(r"http://127\.0\.0\.1:\d+/\?token=[\w-]{32}\n", said)
    assert "whoever" not in said
    assert main(["dashboard", str(folders[0]), "--host", "0.0.0.0"]) == 0
    assert "whoever reaches this address" in capsys.readouterr().out
    for age, path in enumerate(reversed(folders)):
        for file in path.iterdir():
            os.utime(file, (2e9 - age, 2e9 - age))
    assert main(["dashboard", *map(str, folders)]) == 0
    assert re.match(r"http://127\.0\.0\.1:\d+/\?token=[\w-]{32}#run=1\n", capsys.readouterr().out), "it opens on the newest run"
    assert main(["dashboard", str(tmp_path)]) == 2
    assert "there is no run in" in capsys.readouterr().err
    assert main(["dashboard", str(folders[0]), "--host", "1.2.3.4"]) == 2
    assert "choose another --host or --port" in capsys.readouterr().err


def hostile(folder: Path) -> Path:
    """A run whose every name is markup."""
    store = Store(plant(folder) / "run.db")
    store.write("fact", {"round": 3, "name": ["slots", "family", "blueprints"],
                         "value": [json.dumps([HOSTILE] * 2), json.dumps(HOSTILE), json.dumps([HOSTILE])]})
    store.write("seed", {"round": 2, "epoch": [1, 2], "row": 1, "slot": 0, "stage": ["TRAINING", HOSTILE], "blueprint": HOSTILE, "alpha": 0.5})
    store.write("step", {"round": 2, "epoch": 1, "row": 1, "op": HOSTILE, "slot": 0, "blueprint": HOSTILE, "score": 0.5, "twin": 0.5})
    store.write("anomaly", {"round": 2, "kind": HOSTILE, "place": HOSTILE})
    store.commit()
    store.close()
    return folder


# The report ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def report(folders: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Page:
    path = tmp_path_factory.mktemp("report") / "report.html"
    assert main(["report", str(folders[0]), "--out", str(path)]) == 0
    return Page(path)


def test_a_report_of_a_run_is_whole_and_stands_alone(report: Page) -> None:
    assert not {"script", "link", "img", "iframe"} & set(report.tags)
    assert not re.search(r"https?://(?!www\.w3\.org)", report.source)
    assert len(report.source) < 250_000
    for text in ("planted: stopped after round 3 of 4", "+4.00 points (+3.02 to +4.98)", "open incidents: 1", "2 born, 1 kept, 0 pruned, 1 unfinished",
                 "Learning curves", "Genealogy of seeds", "Incidents"):
        assert text in report.text
    assert "Score against cost" not in report.text, "no examination measured a score"
    assert "Which is better" not in report.text, "there is but one"


def test_a_report_shows_the_numbers_of_its_panels(report: Page, folders: list[Path]) -> None:
    with open_run(folders[0]) as run:
        for name in ("incidents", "actions", "blueprints", "cost"):
            table = run.panel(name)
            for row in table.rows:
                assert [figure(value, table.units.get(column, "")) for column, value in zip(table.columns, row, strict=True)] in report.rows
    assert ["0", "stem", "mixer", "1", "2", "4", "4", "kept", "+3.12", "1.56", "25.00"] in report.rows
    assert ["2", "tail", "norm", "3", "-", "-", "-", "unfinished", "+1.56", "0.78", "-"] in report.rows


def test_a_comparison_tells_luck_from_difference_and_seeds_from_scenarios(folders: list[Path], tmp_path: Path) -> None:
    for path, score, gain in zip(folders, (0.5, 0.625), (0.0, 0.05), strict=True):
        shutil.copytree(path, tmp_path / path.name)
        store = Store(tmp_path / path.name / "run.db")
        store.write("exam", {"round": 3, "policy": "learned", "scenario": [0, 1, 2, 3],
                             "utility": [gain + 0.02, gain + 0.04] * 2, "score": score, "params": 100, "spent": 0.25})
        store.commit()
        store.close()
    write_run_report([tmp_path], tmp_path / "report.html")
    page = Page(tmp_path / "report.html")
    assert "mean of 2 seeds: other, planted" in page.text
    assert ["planted", "5", "3", "+3.00", "+1.87", "+4.13", "4", "+3.00", "-5.00", "-5.00", "-5.00", "worse"] in page.rows
    assert "other learned: 100, 62.5" in page.text
    assert "planted learned: 0.25, 50" in page.text


def test_a_mean_of_seeds_has_the_interval_of_few_values() -> None:
    (x, mean, half), = over_seeds([[(0, 1.0, 9.0), (1, 5.0, None)], [(0, 3.0, None)]])
    assert (x, mean, half) == (0, 2.0, pytest.approx(12.706))
    many = over_seeds([[(0, float(value), None)] for value in (0, 2) * 8])
    assert many[0][2] == pytest.approx(1.96 * (16 / 15) ** 0.5 / 4)


def test_names_in_a_report_stay_names(tmp_path: Path) -> None:
    write_run_report([hostile(tmp_path / "run")], tmp_path / "report.html")
    page = Page(tmp_path / "report.html")
    assert not {"img", "script"} & set(page.tags)
    assert escape(HOSTILE) in page.source
    with pytest.raises(EsperError, match="there is no run in"):
        write_run_report([tmp_path / "none"], tmp_path / "other.html")
