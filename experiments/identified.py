"""Does a controller know more than a regression that identifies the kind and then follows a plan?

    python -m experiments.identified --family mlp --episodes 9600 --scenarios 512

Tunes "identify, then plan" with as many episodes as the shipped controller of a family had, choosing among the plans that the
committed proof's search found; then both play the same validation scenarios. The test split stays closed. Writes
experiments/results/identified-FAMILY.json.
"""

import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from esper.simic.proof.baselines import LEVELS, Tuned, play_identified, play_plans, schedule
from esper.simic.proof.evaluator import Evaluator
from esper.simic.proof.identify import identify
from esper.simic.proof.plans import Plan, Survey
from esper.simic.proof.proving import SPARE
from esper.tamiyo import Learned, Wait
from esper.tamiyo.minds import read_mind
from experiments.shared import env_of, parser, write


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--family", default="mlp")
    options.add_argument("--episodes", type=int, default=9600)
    options.add_argument("--scenarios", type=int, default=512)
    chosen = options.parse_args()
    torch.set_num_threads(1)
    member = next(each for each in read_mind("tamiyo-small") if each.about["family"] == chosen.family)
    env = env_of(member)
    tuned = Tuned.load(Path(__file__).parent / "proof" / chosen.family / "controls.json")
    blind, looking = Evaluator(replace(env, previews=None)), Evaluator(env)
    plans = [Plan((None,) * len(tuned.fixed.seeds)), tuned.fixed, *tuned.visible, *itertools.chain(*tuned.oracle)]
    found = identify(Survey(blind, 256, lambda *told: None), chosen.episodes, tuned.fixed, plans, lambda *told: print(*told, flush=True))
    tuned = replace(tuned, identification=found)
    drawn = env.family.scenarios(chosen.scenarios, "validation", SPARE)
    none = blind.play(Wait(), drawn).utility()
    mind = Learned(member.controller.bound_to(env.spec), greedy=True)
    played = {"tamiyo-small": looking.play(mind, drawn, previews=True), "identify, then plan": play_identified(blind, tuned, drawn),
              **{level: play_plans(blind, schedule(tuned, level, env.family, drawn), drawn) for level in LEVELS[1:]}}

    def told(values: Tensor) -> dict[str, float]:
        return {"points": 100 * float(values.mean()), "error": 100 * float(values.std()) / math.sqrt(len(values))}

    result: dict[str, Any] = {"family": chosen.family, "episodes": found.episodes, "scenarios": chosen.scenarios, "watched": found.watched,
                              "planted meanwhile": found.first.name, "plans": [plan.name for plan in found.plans]}
    result["above no growth"] = {name: told(done.utility() - none) | {"flops": 1 + float(done.spent.mean())} for name, done in played.items()}
    result["controller less identification"] = told(played["tamiyo-small"].utility() - played["identify, then plan"].utility())
    print(result)
    write(chosen, f"identified-{chosen.family}", result)


if __name__ == "__main__":
    main()
