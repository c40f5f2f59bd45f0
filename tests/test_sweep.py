"""Sweeps: scripts do what their names say, and outcomes show what there is to decide. Their front doors."""

from pathlib import Path

import pytest
import torch

from esper.cli import main
from esper.kasmina import Host
from esper.simic.proof import value_of_information as gaps
from esper.simic.proof.sweep import choices, full_spec, grid, head_choices, run_sweep, seed_script
from esper.tamiyo import Random
from esper.tolaria import FAMILIES, EnvConfig, Kind, MorphogeneticEnv, play
from tests.workshop import toy_data, toy_family

HARD = Kind("frozen", frozen=(True, True))
FAMILY = toy_family(kinds=(Kind("plain"), HARD), horizons=(12,), prices=(0.0, 1e-3))
CONFIG = EnvConfig(FAMILY)


@pytest.fixture
def _toys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sweeps play on made-up data."""
    data = toy_data(inputs=FAMILY.host.inputs)
    monkeypatch.setattr("esper.tolaria.env.load_task", lambda name: data)


@pytest.mark.usefixtures("_toys")
def test_every_script_ends_as_its_name_says() -> None:
    table = choices(FAMILY)
    assert next(iter(table)) == gaps.NO_GROWTH
    assert len(table) == 1 + 2 * 5 + 2 * 5 + 2
    sweep = run_sweep(CONFIG, table, 4, rows=256, preview_steps=4)
    fossils = sweep.params > 0  # [K, C]
    assert not bool(fossils[:, 0].any())
    assert bool(fossils[:, 1:].all())
    assert sweep.score.shape == (8, len(table), 2)
    assert sweep.rollbacks == 0
    single, pair = sweep.names.index("glu @0"), sweep.names.index("glu @0+1")
    assert bool((sweep.params[:, pair] > sweep.params[:, single]).all())
    early, late = sweep.names.index("mlp_heavy @0"), sweep.names.index("mlp_heavy @0 late")
    assert float(sweep.spent[:, early].mean()) > float(sweep.spent[:, late].mean())
    assert "preview mlp_heavy @0" in sweep.feature_names
    # A frozen host needs a seed; growth is worth more there than on the plain one.
    gain = (sweep.score - sweep.score[:, :1]).mean(2).amax(1)
    assert float(gain[sweep.scenarios.kind == 1].mean()) > float(gain[sweep.scenarios.kind == 0].mean()) + 0.05
    outcomes = sweep.outcomes()
    assert outcomes.chosen_on.shape == (16, len(table))
    cheap, dear = outcomes.chosen_on[:8], outcomes.chosen_on[8:]
    assert (dear[:, 1:] < cheap[:, 1:]).all()
    assert (dear[:, 0] == cheap[:, 0]).all()
    assert [level.name for level in gaps.knowledge(outcomes, repeats=2)] == list(gaps.LEVELS)


@pytest.mark.usefixtures("_toys")
def test_head_scripts_differ_in_their_head_alone_and_are_legal() -> None:
    table = head_choices(FAMILY, 0, "mlp_small")
    assert set(table) == {"style", "tempo", "alpha_target", "alpha_speed", "alpha_curve"}
    for head, scripts in table.items():
        sweep = run_sweep(CONFIG, scripts, 4, preview_steps=0)
        different = [not torch.equal(sweep.score[:, 0], sweep.score[:, i]) for i in range(1, len(scripts))]
        assert any(different), head


def test_sweeps_share_inits_between_kinds() -> None:
    scenarios, number = grid(FAMILY, 5, 12)
    assert number.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert scenarios.kind.tolist() == [0, 1] * 5
    assert torch.equal(scenarios.key[0::2], scenarios.key[1::2])
    assert len(set(scenarios.key.tolist())) == 5


def test_shipped_families_have_room_for_every_script() -> None:
    for family in FAMILIES.values():
        latest = max(line[0] for script in choices(family).values() for line in script)
        assert latest < min(family.horizons)
        assert len(family.host.slots) == 3


def test_a_script_waits_for_its_gate() -> None:
    script = seed_script(full_spec(FAMILY), 2, 1, "norm")
    assert [line[0] for line in script] == [2, 3, 4]


@pytest.mark.parametrize("words", [
    ["sweep", "--family", "cats"], ["sweep", "--inits", "2"], ["sweep", "--device", "tpu"],
    ["sweep", "--out", __file__], ["sweep", "--rows", "0"], ["sweep", "--record", "/no/where.safetensors"],
    ["replay", "nowhere.safetensors"],
])
def test_bad_options_are_one_sentence(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith(f"esper {words[0]}")
    assert err.count("\n") == 1


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A round on a task that ships with Esper."""
    kinds = (Kind("plain"), Kind("few", samples=100))
    host = Host("mlp", inputs=(64,), widths=(8, 8))
    family = toy_family(host, kinds=kinds, horizons=(3,), task="digits", batch=100)
    env = MorphogeneticEnv(family, 4)
    path = tmp_path_factory.mktemp("trace") / "round.safetensors"
    play(env, Random(1), family.scenarios(4)).save(path)
    return path


def test_replay_command(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(recorded)]) == 0
    assert "all 4 rows, 3 epochs" in capsys.readouterr().out
    assert main(["replay", str(recorded), "--row", "2"]) == 0
    assert main(["replay", str(recorded), "--row", "9"]) == 2
    assert capsys.readouterr().err == "esper replay: --row 9 is outside 0..3\n"
