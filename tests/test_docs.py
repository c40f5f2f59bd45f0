"""What README and docs say must run, exist, and be what was measured."""

import hashlib
import json
import multiprocessing
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from multiprocessing.context import ForkServerContext
from multiprocessing.forkserver import ensure_running
from pathlib import Path

import pytest
from experiments import tables
from tools.docs import api_page, stage

from esper.cli import COMMANDS as VERBS, main
from esper.nissa.glossary import glossary
from esper.simic.metrics import METRICS
from esper.simic.proof.claims import BEATEN, MATCHED
from esper.tamiyo import TRIGGERS
from esper.tamiyo.minds import read_mind
from esper.tolaria.families import FAMILIES
from tests.pasted import run_pasted

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("experiments/*.md")])


def fenced(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


BLOCKS = {f"{page.name}-{number}": block for page in PAGES for number, block in enumerate(fenced(page.read_text(), "python"))}
COMMANDS = re.findall(r"^esper .*?(?=\s*#|$)", "\n".join(block for page in PAGES for block in fenced(page.read_text(), "sh")), re.MULTILINE)


def test_the_readme_is_short() -> None:
    assert len(README) <= 8000


@pytest.fixture(scope="module")
def server() -> ForkServerContext:
    """Starts processes that have imported Esper already, and nothing else of ours."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["esper.simic.proof", "esper.door"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        ensure_running()
    return context


@pytest.mark.parametrize("name", BLOCKS)
def test_code_runs_when_pasted_alone(name: str, server: ForkServerContext, tmp_path: Path) -> None:
    process = server.Process(target=run_pasted, args=(BLOCKS[name], tmp_path))
    process.start()
    process.join()
    assert process.exitcode == 0, (tmp_path / "said").read_text()


def test_code_that_fails_is_noticed(server: ForkServerContext, tmp_path: Path) -> None:
    """Also what only warns, and names that an earlier block had."""
    for number, block in enumerate(("import esper", "esper", "import warnings\nwarnings.warn('old', stacklevel=1)")):
        (folder := tmp_path / str(number)).mkdir()
        process = server.Process(target=run_pasted, args=(block, folder))
        process.start()
        process.join()
        assert (process.exitcode == 0) == (number == 0), (folder / "said").read_text()


def test_there_is_code_to_run() -> None:
    assert len(fenced(README, "python")) >= 3
    assert len(COMMANDS) >= 2
    assert len(BLOCKS) >= 20
    unknown = {fence for page in PAGES for fence in re.findall(r"^```(\w+)$", page.read_text(), re.MULTILINE)} - {"python", "sh", "toml", "text"}
    assert not unknown, "code in another language is not tried"


def test_the_reference_is_current() -> None:
    assert (ROOT / "docs" / "api.md").read_text() == api_page(), "run python tools/docs.py api"


def test_every_page_is_in_the_navigation() -> None:
    named = set(re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    assert {str(path.relative_to(ROOT)) for path in ROOT.glob("docs/*.md")} <= named
    assert all((ROOT / page.replace("index.md", "README.md")).exists() for page in named)


@pytest.mark.skipif(find_spec("zensical") is None, reason="needs the extra docs")
def test_the_site_is_built_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    stage(tmp_path / "build" / "pages")
    subprocess.run([sys.executable, "-m", "zensical", "build", "--strict"], cwd=tmp_path, check=True)
    pages = sorted((tmp_path / "build" / "site").rglob("*.html"))
    assert len(pages) > 15
    for page in pages:
        loads = re.findall(r"<(?:script|img|iframe|source)[^>]* src=\"?https?:[^> ]*|<link[^>]* href=\"?https?:[^> ]*|url\(https?:[^)]*", page.read_text())
        assert not loads, f"{page.name} loads {loads[0]}"


def helped(verb: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What `esper VERB --help` prints; an unknown verb has no usage line of its own."""
    with pytest.raises(SystemExit) as left:
        main([*verb.split(), "--help"])
    assert left.value.code == 0
    said = capsys.readouterr().out
    assert f"usage: esper {verb} " in said
    return said


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_have_the_options_they_use(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    verb = max((v for v in VERBS if f"{command} ".startswith(f"esper {v} ")), key=len)
    said = helped(verb, capsys)
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
    for target, _, section in (link.partition("#") for link in re.findall(r"\]\((?!https?://)([^)]*)", page.read_text())):
        there = page.parent / target if target else page
        assert there.exists(), f"{page.name} links to {target}"
        heads = [re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in re.findall(r"^#+ (.*)", there.read_text(), re.M)] if section else []
        assert not section or section in heads, f"{page.name} links to {target}#{section}"


BARE = """
import os, sys
os.chdir({root!r})
os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
sys.modules.update(dict.fromkeys(["gymnasium", "mnist1d", "playwright", "ray", "textual", "tyro", "xdist"]))
import pytest, torch
torch.cuda.is_available = lambda: True
assert not pytest.main(["-q", "-p", "no:cacheprovider", "--collect-only", "-k", "cuda", *{files}])
"""


def test_the_gpu_command_names_all_tests_on_cuda_and_needs_few_packages(server: ForkServerContext, tmp_path: Path) -> None:
    (names,) = re.findall(r"pytest -k cuda tests/test_\{([\w,]+)\}\.py", (ROOT / "docs" / "architecture.md").read_text())
    files = [f"tests/test_{name}.py" for name in names.split(",")]
    on_cuda = re.compile(r"^def test_\w+\([^)]*\bdevice: str|skipif\(not torch\.cuda", re.MULTILINE)
    assert files == [f"tests/{path.name}" for path in sorted(ROOT.glob("tests/test_*.py")) if on_cuda.search(path.read_text())]
    code = BARE.format(root=str(ROOT), files=files)
    process = server.Process(target=run_pasted, args=(code, tmp_path))
    process.start()
    process.join()
    said = (tmp_path / "said").read_text()
    assert process.exitcode == 0, said
    assert files == re.findall(r"^tests/\w+\.py", said, re.MULTILINE), "every file has some"


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
