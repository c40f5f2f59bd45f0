"""The page as a browser shows it: Chromium without a network, on planted runs. Needs playwright and a `chromium` of the system."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from esper.karn import compare, open_run, serving
from esper.karn.serving import Dashboard, serve
from esper.nissa import Store, read
from tests.planted import BIRTH, held, plant
from tests.test_page import HOSTILE, hostile

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on this machine")
CUT = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", CUT])
        yield found
        found.close()


class Tab:
    """A page of a dashboard, with all that went wrong in it and all it asked for."""

    def __init__(self, browser: Any, dashboard: Dashboard, chosen: str = "", scheme: str = "light", width: int = 1280) -> None:
        self.context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
        self.page = self.context.new_page()
        self.page.set_default_timeout(8000)
        self.errors: list[str] = []
        self.asked: list[str] = []
        self.size = 0
        self.page.on("console", lambda message: self.errors.append(message.text) if message.type in ("error", "warning") else None)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.on("response", lambda answer: self.count(answer))
        self.page.goto(f"{dashboard.url}#{chosen}")
        self.see("#live", "● live")

    def count(self, answer: Any) -> None:
        if "/api/" not in answer.url:
            self.size += int(answer.headers.get("content-length", 0))

    def see(self, where: str, what: str) -> None:
        self.page.locator(where).filter(has_text=what).first.wait_for()

    def text(self, where: str) -> str:
        return re.sub(r"\s+", " ", self.page.locator(where).first.inner_text())

    def seed(self, row: int, slot: int, stage: str) -> None:
        """Wait for it."""
        self.page.locator(f".tile[data-row='{row}'] g.seed.{stage}:nth-of-type({slot + 1})").wait_for(state="attached")

    def tile(self, row: int) -> Any:
        return self.page.locator(f".tile[data-row='{row}']")

    def close(self) -> None:
        self.context.close()
        assert self.errors == []
        assert all(url.startswith("http://127.0.0.1:") or url.startswith("data:") for url in self.asked)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("browser")
    return [plant(folder / "planted"), plant(folder / "other", 0.05, seed=6)]


@pytest.fixture(scope="module")
def served(folders: list[Path]) -> Iterator[Dashboard]:
    with serve(folders) as dashboard:
        yield dashboard


def test_every_page_loads_small_and_without_a_network(browser: Any, served: Dashboard) -> None:
    tab = Tab(browser, served)
    assert tab.size < 250_000
    assert tab.text("#state").startswith("stopped · round 3 of 4")
    assert "+4.00 points +3.02 to +4.98" in tab.text(".figures")
    assert tab.page.locator("canvas").count() == 2
    assert "starved slot gradient 1 - 2" in tab.text("section.table")
    for name, shown in {"tamiyo": "attention", "rewards": "reward gain", "compare": "better", "population": "host 3"}.items():
        tab.page.click(f"[data-page={name}]")
        tab.see("main", shown)
        assert tab.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    tab.close()


def test_time_is_a_slider_and_a_click_leads_to_a_decision_and_why(browser: Any, served: Dashboard, folders: list[Path]) -> None:
    tab = Tab(browser, served, "page=population")
    for epoch, born, kept in ((1, "dormant", "training"), (2, "dormant", "blending"), (4, "training", "fossilized"), (3, "training", "holding")):
        tab.page.locator("#epoch").fill(str(epoch))
        tab.see(".slider", f"epoch {epoch} of 4")
        tab.seed(0, 0, kept)
        tab.seed(BIRTH["row"], BIRTH["slot"], born)
    tab.tile(BIRTH["row"]).click()
    tab.page.locator(".decision").nth(BIRTH["epoch"] - 1).click()
    tab.see("#why", "GERMINATE norm in tail")
    query = ("SELECT 100 * chance, 100 * value, (SELECT 100 * sum(reward) FROM step WHERE round = 2 AND row = 2 AND epoch >= 3) "
             "FROM step WHERE round = 2 AND row = 2 AND epoch = 3")
    chance, value, followed = read(folders[0] / "run.db", query)[0]
    said = tab.text("#why")
    assert f"how surely {chance:.2f} %: op 50.00 %, slot 50.00 %, blueprint 50.00 %" in said
    assert f"expected from here on {value:+.2f} points what followed {followed:+.2f} points" in said
    assert "score 62.50 %, twin 50.00 %; 10 parameters grown" in said
    assert "what became of the seed unfinished It saw, after epoch 2: no seed" in said
    tab.tile(0).click()
    tab.page.locator("#detail tr.pick", has_text="FOSSILIZE").click()
    tab.see("#why", "FOSSILIZE in stem")
    assert "stem: mixer, HOLDING, alpha 1.00, brings +3.12 ± 1.56 points" in tab.text("#why")
    assert "epoch=4" in tab.page.url
    tab.page.locator("tr.pick", has_text="norm").last.click()
    tab.see("#detail", "Host 2, round 2, epoch 3")
    tab.page.locator("#round").fill("1")
    tab.see("#detail", "Host 2, round 1")
    assert "rolled" in tab.tile(1).get_attribute("class")
    assert "dim" in tab.tile(0).locator(".name > span").last.get_attribute("class")
    tab.close()


def test_networks_grow_when_asked(browser: Any, served: Dashboard) -> None:
    tab = Tab(browser, served, "page=population&epoch=1")
    tab.page.click("#play")
    tab.see(".slider", "epoch 4 of 4")
    tab.seed(0, 0, "fossilized")
    tab.close()


def test_a_comparison_shows_what_the_table_says(browser: Any, served: Dashboard, folders: list[Path]) -> None:
    tab = Tab(browser, served, "page=compare")
    tab.see("main", "better")
    with open_run(folders[0]) as first, open_run(folders[1]) as other:
        difference = compare([first, other]).rows[1][8]
    assert f"other 6 3 +8.00 +6.87 +9.13 4 +8.00 {difference:+.2f} {difference:+.2f} {difference:+.2f} better" in tab.text("main table")
    tab.page.select_option("#run", "1")
    tab.page.click("[data-page=overview]")
    assert tab.page.title() == "other: Esper"
    tab.close()


def test_a_new_round_appears_without_being_asked_for(browser: Any, tmp_path: Path) -> None:
    store = Store(plant(tmp_path / "run") / "run.db")
    with serve([tmp_path / "run"]) as dashboard:
        tab, old = Tab(browser, dashboard), Tab(browser, dashboard, "page=population&round=1")
        store.write("step", {"round": 3, "epoch": [1, 1], "row": [0, 9], "op": "WAIT", "score": 0.5, "twin": 0.25})
        store.write("round", {"round": 3, "utility": 0.08, "utility_error": 0.005, "seconds": 10.0})
        store.commit()
        tab.see("#state", "finished · round 4 of 4")
        tab.see(".figures", "+8.00 points")
        tab.page.click("[data-page=population]")
        tab.see(".tile", "host 9")
        assert "+25.00" in tab.tile(9).inner_text()
        old.see("#state", "round 4 of 4")
        assert old.tile(9).count() == 0, "who looks at a round stays with it"
        tab.close()
        old.close()
    store.close()


def test_a_page_rests_between_drawings_and_a_hidden_one_does_nothing(browser: Any, tmp_path: Path) -> None:
    store = Store(plant(tmp_path / "run") / "run.db")

    def news(number: int) -> None:
        store.write("round", {"round": number, "utility": 0.5})
        store.commit()
        tab.page.wait_for_timeout(1200)

    def asked() -> int:
        return sum("/api/panels" in url for url in tab.asked)

    with serve([tmp_path / "run"]) as dashboard:
        pause = b"PAUSE = 8000, TIMES = 200"
        assert pause in dashboard.assets["app.js"]
        dashboard.assets["app.js"] = dashboard.assets["app.js"].replace(pause, b"PAUSE = 6000, TIMES = 0")
        tab = Tab(browser, dashboard)
        chart = tab.page.locator("section", has_text="does not train on").element_handle()
        first = asked()
        for number in (3, 4, 5):
            news(number)
        assert asked() == first + 1, "the others wait for their turn"
        assert chart.evaluate("node => node.isConnected"), "what did not change is not drawn again"
        tab.page.evaluate("Object.defineProperty(document, 'hidden', { value: true, configurable: true })")
        tab.page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
        before = len(tab.asked)
        news(6)
        tab.page.wait_for_timeout(4000)
        assert len(tab.asked) == before, "its turn came meanwhile"
        tab.page.evaluate("Object.defineProperty(document, 'hidden', { value: false })")
        tab.page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
        tab.see("#state", "round 7 of 4")
        tab.close()
    store.close()


def test_a_trainer_that_is_killed_is_told_though_nothing_is_written(browser: Any, tmp_path: Path) -> None:
    folder = plant(tmp_path / "run")
    with held(folder) as trainer, serve([folder]) as dashboard:
        tab = Tab(browser, dashboard)
        tab.see("#state", "running · round 3 of 4")
        trainer.kill()
        tab.see("#state", "stopped · round 3 of 4")
        tab.see(".figures", "stopped")
        tab.close()


def test_names_are_text(browser: Any, tmp_path: Path) -> None:
    with serve([hostile(tmp_path / HOSTILE.replace("/", ""))]) as dashboard:
        tab = Tab(browser, dashboard, "page=population&row=1&epoch=1")
        tab.see("#why", HOSTILE)
        for page in ("overview", "tamiyo", "compare"):
            tab.page.click(f"[data-page={page}]")
            tab.see("main", HOSTILE)
            assert tab.page.locator("img").count() == 0
        assert tab.page.evaluate("window.hacked") is None
        tab.close()


def test_strangers_see_nothing(browser: Any, served: Dashboard) -> None:
    context = browser.new_context()
    page = context.new_page()
    for end in ("", "?token=wrong", "app.js", "api/runs"):
        assert page.goto(f"http://127.0.0.1:{served.port}/{end}").status == 403
    context.close()


def test_light_and_dark_are_the_readers_choice_and_a_phone_is_wide_enough(browser: Any, served: Dashboard) -> None:
    paper = "getComputedStyle(document.body).backgroundColor"
    shades = {}
    for scheme in ("light", "dark"):
        tab = Tab(browser, served, "page=population&row=0", scheme, width=390)
        tab.see("#why", "FOSSILIZE")
        assert tab.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        shades[scheme] = tab.page.evaluate(paper)
        tab.page.click("#theme")
        shades[f"not {scheme}"] = tab.page.evaluate(paper)
        tab.page.reload()
        tab.see("#why", "FOSSILIZE")
        assert tab.page.evaluate(paper) == shades[f"not {scheme}"], "it is remembered"
        tab.close()
    assert shades["light"] == shades["not dark"] != shades["dark"] == shades["not light"]


def test_what_cannot_be_shown_is_said(browser: Any, served: Dashboard) -> None:
    tab = Tab(browser, served, "run=7&page=population")
    tab.see("#error", "there is no run 7; there are 2, from 0")
    assert len(tab.errors) == 1
    assert "400" in tab.errors.pop()
    tab.page.goto(f"{served.url}#page=nonsense&row=-3&epoch=x")
    tab.see("main", "Is it alive")
    tab.close()


def test_an_open_list_of_runs_is_left_alone(browser: Any, served: Dashboard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "BEAT", 0.3)
    tab = Tab(browser, served)
    tab.page.evaluate("document.querySelector('#run option').dataset.mark = 'x'")
    with tab.page.expect_response("**/api/runs*"):  # of the next sign of life
        pass
    tab.page.wait_for_timeout(200)
    assert tab.page.evaluate("document.querySelector('#run option').dataset.mark") == "x"
    tab.close()
