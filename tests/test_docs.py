"""What the README says must run."""

import hashlib
import json
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from esper.nissa.glossary import glossary
from esper.simic.controls import LEVELS
from esper.simic.court import BEATEN, MATCHED
from esper.simic.metrics import METRICS
from esper.tamiyo import TRIGGERS
from esper.tamiyo.minds import read_mind
from esper.tolaria.families import FAMILIES

README = Path(__file__).parent.parent / "README.md"


def test_readme_code_runs(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(blocks) == 5
    grew = "assert float(trace.measured['params'].max()) > 0 and bool(world.env.population.life.germinations.any())"
    code = "\n".join([*blocks, "assert not torch.equal(logits, without) and network is not None", grew])
    one_thread = os.environ | {"OMP_NUM_THREADS": "1", "ESPER_DATA": str(tmp_path / "data")}
    subprocess.run([sys.executable, "-W", "error", "-c", code], cwd=tmp_path, check=True, env=one_thread)
    assert (tmp_path / "population.safetensors").stat().st_size > 1000


def test_readme_names_only_make_targets_that_exist() -> None:
    makefile = (README.parent / "Makefile").read_text()
    targets = re.findall(r"^make (\w+)", README.read_text(), re.MULTILINE)
    assert targets
    assert all(f"\n{target}:" in makefile for target in targets)


def test_readme_figures_are_the_committed_ones() -> None:
    text = README.read_text()
    results = sorted((README.parent / "benchmarks" / "results").glob("population-*.json"))
    assert len(results) >= 4
    for path in results:
        result = json.loads(path.read_text())
        assert f"| {result['samples_per_second']['population']:,.0f} |" in text
        origin = "{hardware}, torch {torch} | {date}, {commit} |".format(**result)
        assert f"| {result['ratio']:.1f} | {origin}" in text


def test_readme_updates_are_the_committed_ones() -> None:
    text = README.read_text()
    results = sorted((README.parent / "benchmarks" / "results").glob("rl-*.json"))
    assert len(results) == 6
    for path in results:
        result = json.loads(path.read_text())
        assert f"| {result['transitions_per_second']['esper']:,.0f} |" in text
        origin = "{hardware}, torch {torch} | {date}, {commit} |".format(**result)
        milliseconds = 1000 * statistics.median(result["rounds_seconds"]["esper"])
        assert f"| {milliseconds:,.0f} ms | {origin}" in text


def test_readme_sweeps_are_the_committed_ones() -> None:
    text = README.read_text()
    results = sorted((README.parent / "experiments" / "results").glob("sweep-*.json"))
    assert len(results) == 3
    for path in results:
        result = json.loads(path.read_text())
        gap = result["oracle_gap"]
        assert f"| `{result['family']}` | {100 * result['levels']['no growth']['utility']:.1f} |" in text
        assert f"| {100 * gap['value']:+.1f} ± {100 * gap['standard_error']:.1f} |" in text
        assert gap["value"] >= 0.03
    env = sorted((README.parent / "benchmarks" / "results").glob("env-*.json"))
    assert len(env) >= 3
    for path in env:
        result = json.loads(path.read_text())
        origin = "{hardware}, torch {torch} | {date}, {commit} |".format(**result)
        assert f"| {result['host_epochs_per_second']['environment']:,.0f} |" in text
        ratios = [result["ratio"], result["tight_ratio"]] if "tight_ratio" in result else [result["ratio"]]
        assert f"| {' | '.join(f'{ratio:.1f}' for ratio in ratios)} | {origin}" in text


def test_the_glossary_is_the_table_of_metrics() -> None:
    text = (README.parent / "docs" / "controller.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| (\w+ \| .*?) \|$", text, re.M))
    assert rows == {name: f"{reducer} | {what}" for name, (reducer, what) in METRICS.items()}


def test_the_store_is_described_as_it_is() -> None:
    assert (README.parent / "docs" / "store.md").read_text() == glossary() + "\n"


def test_the_page_on_proofs_names_every_arm_and_claim() -> None:
    text = (README.parent / "docs" / "proof.md").read_text()
    for name in (*BEATEN, *MATCHED, "oracle", "from scratch", "wider host", "holds", "fails", "refused", *TRIGGERS):
        assert name in text, name


def test_readme_tells_the_proofs_as_they_were_made() -> None:
    """Of every claim the controller that is least above its control, family beside family; commands, dates and commits."""
    text, cells = README.read_text(), dict[tuple[str, str], list[str]]()
    families = ("mlp", "mnist1d", "fashion")
    assert set(families) == set(FAMILIES)
    for family in families:
        proof = json.loads((README.parent / "experiments" / "proof" / family / "proof.json").read_text())
        assert proof["verdict"] == "holds"
        assert proof["command"] in text
        report = f"[proof.html](experiments/proof/{family}/proof.html)"
        assert f"| {proof['scenarios']} | {report} | {proof['date']}, {proof['commit']}," in text
        trained = min(each["episodes"] for each in proof["controllers"].values())
        tuned = min(row["episodes"] for row in proof["summary"] if row["arm"] in (*TRIGGERS, *LEVELS, "best rule"))
        assert f"| `{family}` | {trained:,} episodes each | {tuned:,} or more |" in text
        each = [claim for claim in proof["claims"] if claim["controller"] != "pooled"]
        assert {claim["verdict"] for claim in each} == {"holds", "reported"}
        for asked in dict.fromkeys((claim["control"], claim["asked"]) for claim in each):
            least = min((c for c in each if (c["control"], c["asked"]) == asked), key=lambda claim: claim["difference"])
            cells.setdefault(asked, []).append("{:+.1f} ({:+.1f} to {:+.1f})".format(
                *(100 * least[name] for name in ("difference", "low", "high"))))
    assert len(cells) == 15
    names = {"best rule": "best rule on what is observed",
             "best per visible condition and oracle": "half way from best per visible condition to the oracle"}
    asks = {"beats": "each must be above", "matches": "each must match it", "half": "each must reach it", "reported": "reported"}
    for (control, asked), row in cells.items():
        assert f"| {names.get(control, control)} | {asks[asked]} | {' | '.join(row)} |" in text


def test_readme_tells_of_hosts_never_seen_as_they_were_measured() -> None:
    text, cells = README.read_text(), dict[str, list[str]]()
    for family in ("mlp", "mnist1d", "fashion"):
        result = json.loads((README.parent / "experiments" / "results" / f"zero-shot-{family}.json").read_text())
        assert f"`{family}` {result['date']}, {result['commit']}" in text
        for host, points in result["points"].items():
            for mean, low, high in (points["above no growth"], points["above random"]):
                assert low > 0
                cells.setdefault(host, []).append(f"{mean:+.1f} ({low:+.1f} to {high:+.1f})")
    assert len(cells) == 4
    for host, row in cells.items():
        assert f"| {host} | {' | '.join(row)} |" in text


@pytest.mark.parametrize("family", FAMILIES)
def test_the_shipped_mind_is_the_one_that_was_proven(family: str) -> None:
    path = README.parent / "experiments" / "proof" / family / "proof.json"
    (member,) = (member for member in read_mind("tamiyo-small") if member.about["family"] == family)
    told = member.about["proof"]
    assert told["verdict"] == "holds"
    assert told["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert json.loads(path.read_text())["controllers"][told["controller"]]["sha256"] == member.about["agent sha256"]
