"""Minds that ship: written whole, found by name, each host led by the member that knows its seeds."""

from pathlib import Path

import pytest
import torch

from esper.kasmina import blueprints_for
from esper.leyline import ActionSpec, EsperError, StateFormatError
from esper.tamiyo import Controller, Learned, NetworkConfig, minds
from esper.tamiyo.minds import Member, member_for, read_mind, shipped, write_mind
from esper.tolaria import find_family

SMALL = NetworkConfig(16, 8, 6, 12)


def fresh(*blueprints: str) -> Controller:
    return Controller.fresh(ActionSpec.decisive(3, ("noop", *blueprints)), SMALL)


@pytest.fixture
def mind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Controller]:
    monkeypatch.setattr(minds, "FOLDER", tmp_path)
    made = [fresh("norm", "conv"), fresh("norm", "glu", "low_rank")]
    write_mind(tmp_path / "two.safetensors", [Member(each, {"family": str(n)}) for n, each in enumerate(made)])
    return made


def test_members_come_back_as_they_were(mind: list[Controller]) -> None:
    assert list(shipped()) == ["two"]
    for member, made, number in zip(read_mind("two"), mind, "01", strict=True):
        assert member.about == {"family": number}
        assert member.controller.header() == made.header()
        for name, tensor in made.tensors().items():
            assert torch.equal(member.controller.tensors()[name], tensor)


def test_a_host_is_led_by_the_member_that_knows_its_seeds(mind: list[Controller]) -> None:
    members = read_mind("two")
    for blueprints, number in (("conv", 0), ("glu", 1), ("low_rank", 1), ("conv", 0)):
        assert member_for(ActionSpec.decisive(5, ("noop", "my own", blueprints)), members) is members[number]
    policy = Learned.load("two", ActionSpec.decisive(5, ("noop", "glu", "my own")))
    assert torch.equal(policy.controller.network.trunk_op, mind[1].network.trunk_op)
    told = "conv, glu, low_rank, norm; of these this host offers 0, and 1 others: train"
    with pytest.raises(EsperError, match=told):
        member_for(ActionSpec.decisive(3, ("noop", "my own")), members)
    with pytest.raises(EsperError, match="glu, low_rank, norm; of these this host offers 1, and 3 others: train"):
        member_for(ActionSpec.decisive(3, ("noop", "norm", "a", "b", "c")), members[1:])  # norm is everywhere
    with pytest.raises(EsperError, match="it cannot act in a space of"):
        Learned.load("two", ActionSpec.full(3, ("noop", "glu")))


def test_other_files_are_refused_in_a_sentence(mind: list[Controller], tmp_path: Path) -> None:
    with pytest.raises(StateFormatError, match="cannot read a mind from"):
        read_mind(tmp_path / "three")
    whole = (tmp_path / "two.safetensors").read_bytes()
    (tmp_path / "half.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(StateFormatError, match="cannot read a mind from"):
        read_mind("half")


def test_the_shipped_mind_leads_the_hosts_it_was_trained_on_and_refuses_others() -> None:
    members = read_mind("tamiyo-small")
    trained = {find_family(member.about["family"]).host.kind: member for member in members}
    assert set(trained) == {"mlp", "conv1d", "cnn"}
    for kind, leader in trained.items():  # a cnn's seeds are some of a conv1d's
        spec = ActionSpec.decisive(4, blueprints_for(kind))
        assert member_for(spec, members) is leader
        Learned.load("tamiyo-small", spec)
    with pytest.raises(EsperError, match="train a controller for it"):
        member_for(ActionSpec.decisive(3, blueprints_for("conv1d")), [trained["mlp"]])
