"""What README and docs say must run, exist, and be what was measured."""

import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from experiments import tables

from esper.cli import main
from esper.nissa.glossary import glossary
from esper.simic.metrics import METRICS
from esper.simic.proof.claims import BEATEN, MATCHED
from esper.tamiyo import TRIGGERS
from esper.tamiyo.minds import read_mind
from esper.tolaria.families import FAMILIES

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
CONCEPTS = (ROOT / "docs" / "concepts.md").read_text()
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("experiments/*.md")])


def fenced(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


HOSTS, DOOR, EXPORT = ((ROOT / "docs" / f"{name}.md").read_text() for name in ("hosts", "door", "export"))
BLOCKS = [block for page in (README, CONCEPTS, HOSTS, DOOR, EXPORT) for block in fenced(page, "python")]
COMMANDS = re.findall(r"^esper .*?(?=\s*#|$)", "\n".join(fenced(README, "sh")), re.MULTILINE)


def test_the_readme_is_short() -> None:
    assert len(README) <= 8000


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_code_runs_when_pasted_alone(number: int, tmp_path: Path) -> None:
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-W", "error", "-c", BLOCKS[number]], cwd=tmp_path, check=True, env=one_thread)


def test_there_is_code_to_run() -> None:
    assert len(fenced(README, "python")) >= 3
    assert len(COMMANDS) >= 2


def helped(verb: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What `esper VERB --help` prints; an unknown verb has no usage line of its own."""
    with pytest.raises(SystemExit) as left:
        main([*verb.split(), "--help"])
    assert left.value.code == 0
    said = capsys.readouterr().out
    assert f"usage: esper {verb} " in said
    return said


@pytest.mark.parametrize("command", COMMANDS)
def test_readme_commands_have_the_options_they_use(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = helped(command.split()[1], capsys)
    for option in re.findall(r"--[\w-]+", command):
        assert re.search(rf"{option}\b", said), f"{command}: no option {option}"


def test_readme_names_only_commands_that_exist(capsys: pytest.CaptureFixture[str]) -> None:
    prose = re.sub(r"```.*?```", "", README, flags=re.DOTALL)
    verbs = set(re.findall(r"`esper\s+(tasks add-data|[a-z]+)", prose))
    assert len(verbs) >= 4
    for verb in sorted(verbs):
        helped(verb, capsys)


def test_readme_names_only_make_targets_and_scripts_that_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = re.findall(r"^make (\w+)", README, re.MULTILINE)
    assert targets
    assert all(f"\n{target}:" in makefile for target in targets)
    scripts = re.findall(r"python (\S+\.py)", README)
    assert scripts
    assert all((ROOT / script).exists() for script in scripts)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?://)([^)#]*)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_tables_are_what_the_committed_json_gives() -> None:
    assert tables.stale() == []


def test_a_stale_page_is_named_with_its_first_line_that_differs(
        monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    fresh = tables.speed_page().splitlines()
    fresh[4] = "another line"
    monkeypatch.setattr(tables, "pages", lambda: {"docs/speed.md": "\n".join(fresh)})
    assert tables.main(["--check"]) == 1
    assert capsys.readouterr().out.startswith("docs/speed.md, line 5: ")


def test_the_readme_table_follows_the_proofs(monkeypatch: pytest.MonkeyPatch) -> None:
    found = tables.proofs()
    for claim in found["mlp"]["claims"]:
        claim["difference"] = 0.123
    monkeypatch.setattr(tables, "proofs", lambda: found)
    assert "| controller less oracle | +12.3 (" in tables.readme_page(README)


def test_the_glossary_is_the_table_of_metrics() -> None:
    text = (ROOT / "docs" / "controller.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| (\w+ \| .*?) \|$", text, re.MULTILINE))
    assert rows == {name: f"{metric.reducer} | {metric.help}" for name, metric in METRICS.items()}


def test_the_store_is_described_as_it_is() -> None:
    assert (ROOT / "docs" / "store.md").read_text() == glossary() + "\n"


def test_the_page_on_proofs_names_every_arm_and_claim() -> None:
    text = (ROOT / "docs" / "proof.md").read_text()
    for name in (*BEATEN, *MATCHED, "oracle", "from scratch", "wider host", "holds", "fails", "refused", *TRIGGERS):
        assert name in text, name


@pytest.mark.parametrize("family", FAMILIES)
def test_the_shipped_mind_is_the_one_that_was_proven(family: str) -> None:
    path = ROOT / "experiments" / "proof" / family / "proof.json"
    (member,) = (member for member in read_mind("tamiyo-small") if member.about["family"] == family)
    told = member.about["proof"]
    assert told["verdict"] == "holds"
    assert told["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert json.loads(path.read_text())["controllers"][told["controller"]]["sha256"] == member.about["agent sha256"]
