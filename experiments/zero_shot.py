"""Does a controller lead hosts that it has never seen? Twice the slots, twice the width, half again the horizon.

    python -m experiments.zero_shot tamiyo-small --family mnist1d --device cuda

Validation scenarios that no training was examined on, and validation samples; every arm on the same scenarios.
"""

from dataclasses import replace
from pathlib import Path

from esper.cli.machine import keep_freed_memory
from esper.cli.runs import load_run
from esper.leyline import EsperError
from esper.simic.proof.claims import interval
from esper.simic.proof.evaluator import Evaluator
from esper.simic.proof.proving import SPARE
from esper.simic.training import CHECKPOINT
from esper.tamiyo import Learned, Random, Wait
from esper.tamiyo.minds import member_for, read_mind, shipped
from esper.tolaria import EnvConfig, Family, PreviewConfig, find_family
from experiments.shared import env_of, parser, write


def deeper(family: Family) -> Family:
    """Every stage twice; what is wrong with a stage is wrong with both. Extents are halved as often as before."""
    def twice(values: tuple) -> tuple:
        return tuple(value for value in values for _ in range(2))

    kinds = tuple(replace(kind, one_tap=twice(kind.one_tap), width=twice(kind.width), frozen=twice(kind.frozen))
                  for kind in family.kinds)
    host = family.host
    halvings = (host.halvings or host.stages) * (len(host.inputs) > 1)
    return replace(family, host=replace(host, widths=twice(host.widths), halvings=halvings), kinds=kinds)


def wider(family: Family) -> Family:
    return replace(family, host=replace(family.host, widths=tuple(2 * width for width in family.host.widths)))


def longer(family: Family) -> Family:
    return replace(family, horizons=tuple(horizon * 3 // 2 for horizon in family.horizons))


HOSTS = {"as trained": lambda family: family, "twice the slots": deeper, "twice the width": wider, "1.5 x the horizon": longer}


def previews_of(mind: str, family: Family) -> PreviewConfig | None:
    """As it was trained with."""
    if mind in shipped():
        return env_of(member_for(EnvConfig(family).spec, read_mind(mind))).previews
    found = load_run(Path(mind))
    if found is None:
        raise EsperError(f"{mind} is neither a shipped mind nor the folder of a run")
    return found[0].env.previews


def main() -> None:
    options_of = parser(__doc__)
    options_of.add_argument("mind", help="name of a shipped mind, or the folder of a run")
    options_of.add_argument("--family", required=True)
    options_of.add_argument("--scenarios", type=int, default=128)
    options = options_of.parse_args()
    keep_freed_memory()
    trained, result = find_family(options.family), {}
    path = options.mind if options.mind in shipped() else Path(options.mind) / CHECKPOINT
    previews = previews_of(options.mind, trained)
    for name, changed in HOSTS.items():
        family = changed(trained)
        evaluator = Evaluator(EnvConfig(family, previews=previews, device=options.device))
        spec, drawn = evaluator.config.spec, family.scenarios(options.scenarios, "validation", SPARE)
        learned = evaluator.play(Learned.load(path, spec, options.device, greedy=True), drawn, previews=True)
        result[name] = {"slots": spec.slots, "host parameters": family.host.cost.params, "horizons": family.horizons,
                        "grown parameters": float(learned.params.float().mean())}
        for control, policy in (("no growth", Wait()), ("random", Random())):
            difference = 100 * (learned.utility() - evaluator.play(policy, drawn).utility()).double().numpy()
            result[name][f"above {control}"] = [float(difference.mean()), *interval(difference)]
        print(name, result[name], flush=True)
    write(options, f"zero-shot-{options.family}", {"mind": options.mind, "scenarios": options.scenarios, "points": result})


if __name__ == "__main__":
    main()
