"""The ten questions of docs/eyes.md, clicked through on runs that were really trained: what the page says is what SQL says."""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from esper.cli import main
from esper.karn.panels import said
from esper.karn.serving import Dashboard, serve
from esper.nissa import read
from tests.test_browser import CHROMIUM, Tab, browser

__all__ = ["browser"]  # a fixture
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on this machine")
DOCS = Path(__file__).parent.parent / "docs" / "eyes.md"
Rows = list[tuple[Any, ...]]
Ask = Callable[..., Rows]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """As `esper train` makes them, but short."""
    folders = [tmp_path_factory.mktemp("asked") / f"seed{seed}" for seed in (1, 2)]
    for seed, folder in enumerate(folders, 1):
        assert main(["train", "--family", "mlp", "--preset", "quick", "--rounds", "2", "--rows", "8", "--seed", str(seed), "--out", str(folder)]) == 0
    return folders


@pytest.fixture(scope="module")
def served(runs: list[Path]) -> Iterator[Dashboard]:
    with serve(runs) as dashboard:
        yield dashboard


def points(values: list[float]) -> str:
    """A mean with its 95 % interval as a legend has it."""
    mean, half = 100 * statistics.fmean(values), 196 * statistics.stdev(values) / math.sqrt(len(values))
    return f"{said(mean, 'points')} ({said(mean - half, 'points')} to {said(mean + half, 'points')})"


def turn(tab: Tab, page: str) -> None:
    tab.page.click(f"[data-page={page}]")
    tab.page.locator(f"[data-page={page}].chosen").wait_for()
    tab.see("main", {"overview": "Is it alive", "population": "host 0", "tamiyo": "What does it do", "compare": "verdict"}[page])


def decided(tab: Tab, slots: list[str], decision: tuple[Any, ...]) -> None:
    """The box of reasons is about this one: (op, slot, blueprint, chance, value)."""
    op, slot, blueprint, chance, value = decision
    tab.see("#why h3", " ".join(str(part) for part in (op, blueprint, f"in {slots[slot]}") if part))
    assert f"how surely {said(chance, '%')} %" in tab.text("#why")
    assert f"expected from here on {said(value, 'points')} points" in tab.text("#why")


DECISION = "SELECT op, slot, blueprint, 100 * chance, 100 * value, epoch, row FROM step WHERE round = (SELECT max(round) FROM step) "


def what_grew(tab: Tab, ask: Ask, slots: list[str]) -> None:
    born = ask(DECISION + "AND op = 'GERMINATE' ORDER BY row != 5, row, epoch")
    row = born[0][-1]  # host 5, if anything grew in it
    turn(tab, "population")
    tab.tile(row).click()
    tab.see("#detail h2", f"Host {row}, ")
    lived = ask("SELECT slot, epoch, blueprint, stage, alpha FROM seed WHERE row = ? AND round = (SELECT max(round) FROM seed)", row)
    for slot, epoch, blueprint, stage, alpha in lived:
        cell = tab.page.locator(f".strip tr:nth-child({slot + 1}) td:nth-of-type({epoch})")
        assert cell.get_attribute("title") == f"{blueprint or 'no seed'}, {stage}, alpha {said(alpha, 'alpha')}"
    assert tab.page.locator(".strip .cell:not([title=empty])").count() == len(lived)
    for *decision, epoch, _ in (each for each in born if each[-1] == row):
        tab.page.locator(".decision").nth(epoch - 1).click()
        decided(tab, slots, tuple(decision))


def does_it_pay(tab: Tab, ask: Ask, slots: list[str]) -> None:
    turn(tab, "overview")
    for policy in ("learned", "heuristic"):
        values = [each for (each,) in ask("SELECT utility FROM exam WHERE policy = ? AND round = "
                                          "(SELECT max(round) FROM exam WHERE policy = ?)", policy, policy)]
        assert f"{policy} {points(values)}" in tab.text("section:has-text('does not train on')")
    assert "Not measured here" in tab.text("section:has-text('best plans')")


def never_used(tab: Tab, ask: Ask, slots: list[str]) -> None:
    turn(tab, "tamiyo")
    used = {each for (each,) in ask("SELECT DISTINCT blueprint FROM step WHERE round > (SELECT max(round) - 10 FROM step)")}
    known = {each for (each,) in ask("SELECT json_each.value FROM fact, json_each(fact.value) WHERE fact.name = 'blueprints'")}
    assert set(tab.page.locator(".bar.never b").all_inner_texts()) - {"WAIT"} == known - used


def entropies(tab: Tab, ask: Ask) -> None:
    turn(tab, "tamiyo")
    for head, share in ask("SELECT head, 100 * entropy FROM head WHERE round = (SELECT max(round) FROM head)"):
        assert f"{head} {said(share, '%')}" in tab.text("section:has-text('stopped exploring') figcaption")


def is_it_stuck(tab: Tab, ask: Ask, slots: list[str]) -> None:
    turn(tab, "overview")
    (gain, error), = ask("SELECT 100 * utility, 196 * utility_error FROM round ORDER BY round DESC LIMIT 1")
    ends = [said(each, "points") for each in (gain, gain - error, gain + error)]
    assert "gain {} ({} to {})".format(*ends) in tab.text("section:has-text('Does the controller learn') figcaption")
    entropies(tab, ask)


def which_is_better(tab: Tab, ask: Ask, slots: list[str], other: Ask) -> None:
    turn(tab, "compare")
    query = "SELECT scenario, utility FROM exam WHERE policy = 'learned' AND round = (SELECT max(round) FROM exam) ORDER BY 1"
    first, second = dict(ask(query)), dict(other(query))
    assert first.keys() == second.keys()
    paired = [second[each] - first[each] for each in first]
    mean, half = 100 * statistics.fmean(paired), 196 * statistics.stdev(paired) / math.sqrt(len(paired))
    verdict = "better" if mean > half else "worse" if mean < -half else "may be luck"
    numbers = " ".join(said(each, "points") for each in (mean, mean - half, mean + half))
    assert tab.text("main table tbody tr:last-child").endswith(f"{numbers} {verdict}")


def did_it_break(tab: Tab, ask: Ask, slots: list[str]) -> None:
    turn(tab, "overview")
    trouble = ask("SELECT closed FROM incident")
    opened = sum(closed is None for (closed,) in trouble)
    assert ("open incident" in tab.text("#state")) == bool(opened)
    assert f"open incidents {opened}" in tab.text(".figures")
    assert tab.page.locator("section:has-text('What went wrong') tbody tr").count() == len(trouble)
    back, = ask("SELECT count(DISTINCT row) FROM step WHERE rolled_back AND round = (SELECT max(round) FROM step)")[0]
    turn(tab, "population")
    assert tab.page.locator(".tile.rolled").count() == back


def what_did_it_cost(tab: Tab, ask: Ask, slots: list[str]) -> None:
    turn(tab, "overview")
    (rounds, seconds, epochs, episodes), = ask("SELECT count(*), sum(seconds), sum(host_epochs), sum(episodes) FROM round")
    (params, spent), = ask("SELECT avg(params), 100 * avg(spent) FROM exam WHERE policy = 'learned' AND round = (SELECT max(round) FROM exam)")
    assert tab.text("section:has-text('What did training cost') dl") == (
        f"rounds {rounds} time {said(seconds, 's')} host epochs {epochs} episodes {episodes} "
        f"parameters grown {said(params)} extra FLOPs {said(spent, '%')} %")


def when_and_why(tab: Tab, ask: Ask, slots: list[str]) -> None:
    turn(tab, "population")
    born, = ask("SELECT count(*) FROM step WHERE op = 'GERMINATE' AND round = (SELECT max(round) FROM step)")[0]
    lives = tab.page.locator("section:has-text('Which seeds were born') tbody tr")
    assert lives.count() == born
    ends = ask(DECISION + "AND op IN ('FOSSILIZE', 'PRUNE') AND slot IS NOT NULL ORDER BY row, slot, epoch")
    for *decision, epoch, row in ends[:1]:
        cells = [str(row), slots[decision[1]]]
        lives.filter(has_text="kept" if decision[0] == "FOSSILIZE" else "pruned").filter(
            has=tab.page.locator(f"td:first-child:text-is('{cells[0]}')")).filter(has_text=cells[1]).first.click()
        tab.see("#detail h2", f"Host {row}, ")
        assert f"epoch={epoch}" in tab.page.url
        decided(tab, slots, tuple(decision))


def is_it_certain(tab: Tab, ask: Ask, slots: list[str]) -> None:
    entropies(tab, ask)
    what_grew(tab, ask, slots)  # how surely, for each decision


def is_it_alive(tab: Tab, ask: Ask, slots: list[str]) -> None:
    (done, planned), = ask("SELECT count(*), (SELECT value FROM fact WHERE name = 'rounds') FROM round")
    assert tab.text("#state").startswith(f"finished · round {done} of {planned} · ")
    assert tab.text("#state").split(" · ")[2].endswith(" ago")


QUESTIONS: Mapping[str, Callable[..., None]] = {
    "What grew in host 5, and why?": what_grew, "Does it pay?": does_it_pay, "Which blueprint is never used?": never_used,
    "Is learning stuck?": is_it_stuck, "Which run is better, and is that luck?": which_is_better, "Did anything break?": did_it_break,
    "What did it cost?": what_did_it_cost, "When was a seed kept or pruned, and why?": when_and_why,
    "Is the controller certain?": is_it_certain, "Is it still alive?": is_it_alive}


@pytest.mark.parametrize("question", QUESTIONS)
def test_the_page_answers(question: str, browser: Any, served: Dashboard, runs: list[Path]) -> None:
    asks: list[Ask] = [lambda query, *values, run=run: read(run / "run.db", query, *values) for run in runs]
    slots = [each for (each,) in asks[0]("SELECT json_each.value FROM fact, json_each(fact.value) WHERE fact.name = 'slots'")]
    tab = Tab(browser, served)
    answer = QUESTIONS[question]
    answer(tab, asks[0], slots, *asks[1:] if answer is which_is_better else ())
    tab.close()


def test_every_question_of_the_docs_is_asked() -> None:
    table = DOCS.read_text().partition("## Ten questions")[2].partition("\n## ")[0]
    asked = [line.split(" | ")[0].removeprefix("| ") for line in table.splitlines() if line.startswith("| ")]
    assert asked == ["question", *QUESTIONS]
