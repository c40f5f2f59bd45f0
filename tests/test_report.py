"""Views: what the report of a proof counts and shows, that it stands alone; the live panel; the picture."""

import io
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from rich.console import Console

from esper.karn import panel, summary, write_report
from esper.karn.charts import LETTER, LINE, NARROW, curves, front, scatter, ticks
from esper.karn.growth import Frame, growth_svg
from esper.karn.live import bar, sparkline
from esper.karn.report import SECTIONS, seeds_of
from esper.leyline import EsperError, SeedStage
from esper.nissa import TABLES, Store

HOSTILE = '<script>alert("x")</script>'
VOID = {"meta"}
ARMS = {"no growth": (0.0, 0.60, 0, 1.0), "random": (-0.01, 0.62, 900, 1.9),
        "learned": (0.0712, 0.70, 300, 1.4)}
"""gain, score, params, FLOPs: random costs more than learned and scores less"""
LIVES = [(0, 0, "GERMINATE", 0, "norm"), (0, 2, "PRUNE", 0, None), (0, 3, "GERMINATE", 0, "mixer"),
         (0, 9, "FOSSILIZE", 0, None), (1, 4, "GERMINATE", 1, "norm")]
"""In one slot a seed is pruned and the next one kept; a seed in another scenario is never finished."""


class Page(HTMLParser):
    """Text, tags and attributes of a page; tags must balance."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.rows: list[list[str]] = []
        self.text = ""
        self.source = path.read_text(encoding="utf-8")
        self.feed(self.source)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        self.open += [] if tag in VOID else [tag]
        if tag in ("tr", "td"):
            self.rows.append([]) if tag == "tr" else self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
        if "td" in self.open:
            self.rows[-1][-1] += data


def proof(path: Path, controllers: tuple[str, ...] = ("a", "b")) -> Path:
    """A store as a proof leaves it, with three scenarios."""
    store = Store(path)
    arms = [("all", "no growth"), ("all", "random"), *((name, "learned") for name in controllers)]
    for controller, arm in arms:
        store.write("arm", {
            "controller": controller, "arm": arm, "scenario": [0, 1, 2], "kind": ["blind", "frozen", "blind"],
            "price": [0.0, 2e-5, 2e-5], "flop_price": 0.01, "horizon": 12, "utility": 0.5, "score": 0.6,
            "params": 10, "flops": 1.1})
    for name in controllers:
        columns = zip(("scenario", "epoch", "op", "slot", "blueprint"), zip(*LIVES, strict=True), strict=True)
        store.write("decision", {"controller": name, "arm": "learned", **dict(columns)})
    for name in (*controllers, "pooled"):
        gain, score, params, flops = zip(*ARMS.values(), strict=True)
        store.write("summary", {
            "controller": name, "arm": list(ARMS), "gain": gain, "low": [g - 0.01 for g in gain],
            "high": [g + 0.01 for g in gain], "middle": gain, "utility": 0.5, "score": score,
            "params": params, "flops": flops, "episodes": [0, 0, 4096]})
        store.write("claim", {
            "controller": name, "control": ["random", "gap"], "asked": "beats", "n": [256, 0],
            "difference": [0.03217, None], "low": [0.0101, None], "high": [0.0502, None],
            "improvement": [0.81, None], "needed": [64, 0], "verdict": ["holds", "refused"],
            "reason": ["", "gap was never played"]})
    store.commit()
    store.close()
    return path


def run(path: Path) -> Path:
    store = Store(path)
    store.write("round", {"round": [0, 1], "seconds": [30.0, 31.5], "host_epochs": [1000, 1500],
                          "utility": [0.01, 0.05], "utility_error": [0.002, None]})
    store.write("exam", {"round": [1, 2, 2, 2, 2], "policy": ["learned"] * 4 + ["heuristic"],
                         "scenario": [0, 0, 1, 2, 0], "utility": [0.01, 0.02, 0.03, 0.07, 0.9]})
    store.commit()
    store.close()
    return path


@pytest.fixture
def page(tmp_path: Path) -> Page:
    runs = {"a": run(tmp_path / "a.db"), "b": tmp_path / "gone.db"}
    facts = {"family": "mnist1d", "verdict": "refused", "reason": "2 of 4 claims",
             "command": "esper prove <family>", "n": 3}
    write_report(proof(tmp_path / "proof.db"), runs, facts, tmp_path / "page.html")
    return Page(tmp_path / "page.html")


def test_the_page_is_whole_and_stands_alone(page: Page) -> None:
    assert not re.findall(r"https?:|//\w|@import|url\(", page.source)
    assert not {"script", "link", "img", "iframe"} & set(page.tags)
    assert all(section in page.text for section in SECTIONS)
    assert "The proof is refused: 2 of 4 claims." in page.text
    assert "esper prove <family>" in page.text
    assert "nan" not in page.source.lower()
    titles = {value for name, value in page.attributes if name == "title"}
    assert {TABLES["summary"]["gain"].help + " [score]", TABLES["claim"]["needed"].help} <= titles


@pytest.mark.parametrize(("verdict", "title", "samples"), [
    ("holds", "Proof", "on the test split."),
    ("rehearsal", "Rehearsal", "on validation samples; the test split stayed closed."),
    ("demo", "Demo", "on validation samples; the test split stayed closed.")])
def test_a_page_says_what_was_measured(verdict: str, title: str, samples: str, tmp_path: Path) -> None:
    write_report(proof(tmp_path / "proof.db"), {}, {"verdict": verdict}, tmp_path / "page.html")
    page = Page(tmp_path / "page.html")
    assert f"{title}: proof.db" in page.text
    assert f"Accuracies are of delivered networks {samples}" in page.text
    assert page.source.count("test split") == 1, "no tooltip says otherwise"


def test_numbers_are_in_points(page: Page) -> None:
    assert ["learned", "+7.12", "+6.12 … +8.12", "+7.12", "70.0", "300", "1.40", "4,096"] in page.rows
    assert [row[0] for row in page.rows if len(row) == 8] == ["learned", "no growth", "random"]  # by gain
    assert ["beats", "random", "256", "+3.22", "+1.01 … +5.02", "0.81", "64", "holds", ""] in page.rows
    assert ["beats", "gap", "0", "", "", "", "0", "refused", "gap was never played"] in page.rows
    assert "beats gap: no evidence" in page.text


def test_a_seed_is_kept_if_its_own_life_ends_in_a_fossil(tmp_path: Path, page: Page) -> None:
    seeds = seeds_of(tmp_path / "proof.db")[:3]
    assert [(seed.blueprint, seed.kind, seed.epoch, seed.fate) for seed in seeds] == [
        ("norm", "blind", 0, "pruned"), ("mixer", "blind", 3, "kept"), ("norm", "frozen", 4, "unfinished")]
    assert "pooled: 6 germinated, 2 kept" in page.text
    assert "a: 3 germinated, 1 kept" in page.text
    assert page.text.count("3 → 1 · 1 · 1") == 2
    assert "4 episodes, 2 kept" in page.text  # blind, both controllers
    assert "mixer in slot 0: 2" in page.text
    assert "norm in slot" not in page.text


def test_training_is_shown_where_it_is_known(page: Page, tmp_path: Path) -> None:
    assert "gone.db" in page.text
    assert ["learned (a)", "2", "2,500", "62", "4,096", "1.40"] in page.rows
    assert ["learned (b)", "", "", "", "4,096", "1.40"] in page.rows
    assert ["all controllers", "", "", "", "8,192", ""] in page.rows  # no sum where a part is missing
    assert "previews and examinations are not counted" in page.text
    write_report(tmp_path / "proof.db", {}, {}, tmp_path / "bare.html")
    assert "Without run stores" in Page(tmp_path / "bare.html").text


def test_an_interval_is_the_real_one_or_none(page: Page) -> None:
    drawn = page.source.partition("<h2>Learning curves</h2>")[2]
    dots = re.findall(r"<title>(a, [^<]+)", drawn)
    rounds = ["a, 0: 1.00 ± 0.39", "a, 1: 5.00"]
    assert dots == [*rounds, "a, 1: 1.00", "a, 2: 4.00 ± 2.99"]  # 1.96 * 2.6458 / 3 ** 0.5
    assert len(re.findall(r'<line [^>]+class="c1"', drawn)) == 2, "two of the four have one"
    assert "<polygon" not in drawn


def test_neighbours_with_intervals_share_a_band() -> None:
    drawn = curves({"a": ("c1", [(0, 1, 0.5), (1, 1, 0.5), (2, 1, None), (3, 0, 1)])}, "rounds", "points")
    assert [len(band.split()) for band in re.findall(r'<polygon points="([^"]+)', drawn)] == [4]


def test_no_controller_is_lost_among_many(tmp_path: Path) -> None:
    names = [f"mind {number}" for number in range(8)]
    runs = {name: run(tmp_path / f"{name}.db") for name in names}
    write_report(proof(tmp_path / "proof.db", tuple(names)), runs, {}, tmp_path / "page.html")
    page = Page(tmp_path / "page.html")
    assert all(page.text.count(f"{name}, 0: 1.00 ± 0.39") == 1 for name in names)
    looks = dict(re.findall(r'<li><i class="([^"]+)"></i>(mind \d)', page.source))
    assert len(looks) == len(names), "no two look alike"


def test_hostile_names_stay_names(tmp_path: Path) -> None:
    runs = {HOSTILE: tmp_path / f"{HOSTILE[:8]}.db"}
    facts = dict.fromkeys(("family", "verdict", "reason", HOSTILE), HOSTILE)
    write_report(proof(tmp_path / "proof.db", (HOSTILE, "b")), runs, facts, tmp_path / "page.html")
    page = Page(tmp_path / "page.html")
    assert "script" not in page.tags
    assert f"learned ({HOSTILE})" in page.text
    assert page.text.count(HOSTILE) > 5


def test_a_proof_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(EsperError, match="no run store"):
        write_report(tmp_path / "proof.db", {}, {}, tmp_path / "page.html")
    assert not list(tmp_path.iterdir())


def test_the_front_leaves_out_what_is_dominated() -> None:
    dots = {name: (params, score) for name, (_, score, params, _) in ARMS.items()}
    assert front(dots) == ["no growth", "learned"]
    assert front({"dear": (2, 0.5), "cheap": (1, 0.5), "dearer": (2, 0.4)}) == ["cheap"]
    drawn = scatter(dots, "params", "score", "learned")
    hollow = re.findall(r'class="c\d hollow"><title>([^:]+)', drawn)
    assert hollow == ["random"]


@pytest.mark.parametrize("width", [NARROW, 2 * NARROW, 5 * NARROW])
def test_labels_do_not_meet_at_any_width(width: int) -> None:
    dots = {f"from scratch, equal {number}": (1 + 0.02 * (number * 7 % 5), 0.7 + 0.003 * (number * 5 % 7))
            for number in range(9)}
    dots["no growth"] = 0.0, 0.5
    boxes = []
    for text in re.findall(r"<text [^>]+>(?:from|no) [^<]+", scatter(dots, "cost", "score", "")):
        form = r'<text x="(.+)%" y="(.+)" dx="(.+?)"( text-anchor="end")?>(.+)'
        x, y, dx, end, words = re.fullmatch(form, text).groups()
        start = float(x) * width / 100 + float(dx) - (LETTER * len(words) if end else 0)
        boxes.append((start, float(y), start + LETTER * len(words), float(y) + LINE - 0.2))  # rounded
    assert len(boxes) == len(dots)
    for place, a in enumerate(boxes):
        assert not [b for b in boxes[:place] if a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]]


@pytest.mark.parametrize("values", [
    [], [0.0], [3.0, 3.0], [-1e-4, 2e-4], [0.1, 0.7, 0.30000000000000004], [12.0, 98765.0]])
def test_ticks_enclose_what_is_drawn(values: list[float]) -> None:
    marks = ticks(values)
    assert 2 <= len(marks) <= 7
    assert all(marks[0] - 1e-12 <= value <= marks[-1] + 1e-9 for value in values)


def shown(path: Path, planned: int) -> list[str]:
    """The lines of the panel on a narrow terminal."""
    state, console = summary(path, planned), Console(width=80, file=io.StringIO(), record=True)
    assert state is not None
    console.print(panel(state))
    return [line.rstrip() for line in console.export_text().splitlines()]


@pytest.mark.parametrize("rounds", [1, 3, 777])
def test_the_panel_has_a_bar_and_a_curve_within_80_columns(rounds: int, tmp_path: Path) -> None:
    numbers, store = list(range(rounds)), Store(tmp_path / "run.db")
    store.write("round", {"round": numbers, "seconds": 40.0, "host_epochs": 10**7, "utility_error": 0.01,
                          "utility": [number / 100 for number in numbers]})
    store.write("step", {"round": rounds - 1, "epoch": 1, "row": [0, 1, 2], "op": ["WAIT", "WAIT", "PRUNE"]})
    store.write("head", {"round": rounds - 1, "head": ["op", "slot"], "entropy": [0.5, None]})
    store.commit()
    lines = shown(store.path, 2000)
    assert max(map(len, lines)) <= 80
    said = {line[:11].strip(): line[11:] for line in lines}
    names = ["round", "pace", "utility", "by round", "decisions", "entropies", "seeds", "anomalies"]
    assert list(said) == names
    assert said["round"] == f"{rounds}/2000  {bar(rounds / 2000)}  {rounds / 2000:.0%}"
    assert said["utility"] == f"{rounds - 1:+.2f} ± 1.96 points"
    low, curve, high = said["by round"].split()
    assert float(low) <= float(high)
    assert list(curve) == sorted(curve), "it rises"
    assert said["decisions"] == "WAIT 67%  PRUNE 33%"
    assert said["entropies"] == "op 0.50"


def test_what_was_not_measured_is_not_shown_as_a_number(tmp_path: Path) -> None:
    store = Store(tmp_path / "run.db")
    assert summary(store.path, 2) is None
    store.write("round", {"round": [0, 1], "utility": [0.01, float("nan")]})
    store.commit()
    state = summary(store.path, 2)
    assert state is not None
    assert (state.utility, state.interval, state.curve) == (None, None, [1.0, None])
    assert state.line().startswith("round 2/2  utility not measured  0 host-epochs/s")
    assert any(line.split() == ["utility", "not", "measured"] for line in shown(store.path, 2))


def test_bars_and_curves_are_drawn_in_eighths() -> None:
    assert [bar(share, 4) for share in (0, 0.5, 0.53, 1, 7)] == ["░░░░", "██░░", "██▏░", "████", "████"]
    assert sparkline([0, None, 7, 3.5]) == "+0.0 ▁ █▅ +7.0"
    assert sparkline([1, 3, 5, 7], width=2) == "+2.0 ▁█ +6.0"
    assert sparkline([None]) == sparkline([]) == ""


def test_the_picture_draws_every_seed_once() -> None:
    seeds = [SeedStage.DORMANT, SeedStage.TRAINING, SeedStage.BLENDING, SeedStage.FOSSILIZED]
    frame = Frame(torch.tensor([seeds]), torch.tensor([[-1, 0, 1, 1]]), torch.tensor([[0, 0, 0.5, 1]]))
    root = ET.fromstring(growth_svg([frame] * 3, ["norm", HOSTILE], "a & b", ["blind"]))
    boxes = [each.attrib for each in root.iter("{http://www.w3.org/2000/svg}rect")]
    assert sorted(each["opacity"] for each in boxes if "opacity" in each) == ["0.57"] * 3 + ["1.00"] * 3
    assert sum(each["fill"] == "none" for each in boxes) == 3 + 1, "outlined in every epoch and in the legend"
    told = [each.text for each in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"a & b", "blind", "norm", HOSTILE, "incubating", "fossilized"} <= set(told)


def test_the_room_opens_without_rich() -> None:
    missing = "dict.fromkeys(('rich', 'tyro', 'sklearn', 'mnist1d'))"
    code = f"import sys; sys.modules.update({missing}); import esper.karn.growth"
    subprocess.run([sys.executable, "-c", code], check=True)
