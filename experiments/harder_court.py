"""With compute priced and a harder court, is the shipped controller still ahead?

    python -m experiments.harder_court --family mlp --episodes 2400 --scenarios 256

Plays a family as it ships, but with a price on extra FLOPs: half a point, or two, for as many as the bare host's training takes.
Every control is tuned on it with at least so many episodes; the shipped controller, which was trained where compute was free, plays
as it is. Validation scenarios and samples: the test split stays closed. Controls are kept in --cache as they are tuned, so that a killed command
goes on. Writes experiments/results/harder_court-FAMILY.json; with `--flop-prices 0`, where compute is free as in the family that ships,
harder_court-FAMILY-free.json.
"""

import dataclasses
import time
from pathlib import Path
from typing import Any

import torch

from esper.leyline import ActionSpec
from esper.leyline.codec import to_dict
from esper.simic.proof.baselines import Tuned, tune
from esper.simic.proof.claims import Arm, interval
from esper.simic.proof.evaluator import Evaluator
from esper.simic.proof.proving import SPARE, Contestant, EvaluationSet, Part, ProofResults
from esper.simic.workers import Workers
from esper.tamiyo import Learned, PolicyBundle
from esper.tamiyo.minds import read_mind
from esper.tolaria import EnvConfig, MorphogeneticEnv
from experiments.shared import env_of, parser, write

MIND = "tamiyo-small"


def priced(env: EnvConfig, prices: tuple[float, ...]) -> EnvConfig:
    return dataclasses.replace(env, family=dataclasses.replace(env.family, flop_prices=prices))


def compared(one: Arm, other: Arm) -> dict[str, float]:
    """In points: the mean difference and its 95 % interval."""
    ahead = one.utility - other.utility
    low, high = interval(ahead)
    return {"points": 100 * float(ahead.mean()), "low": 100 * low, "high": 100 * high}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--family", default="mlp")
    options.add_argument("--episodes", type=int, default=2400, help="that each control is tuned with, at the least")
    options.add_argument("--scenarios", type=int, default=256)
    options.add_argument("--start", type=int, default=SPARE, help="the first validation scenario")
    options.add_argument("--flop-prices", type=float, nargs="+", default=[0.005, 0.02])
    options.add_argument("--rows", type=int, default=256, help="hosts at a time")
    options.add_argument("--cache", type=Path, default=Path("harder_court-cache"))
    chosen = options.parse_args()
    torch.set_num_threads(1)
    member = next(each for each in read_mind(MIND) if each.about["family"] == chosen.family)
    env = dataclasses.replace(priced(env_of(member), tuple(chosen.flop_prices)), device=chosen.device)
    began = time.monotonic()

    def decides(spec: ActionSpec) -> PolicyBundle:
        return Learned(member.controller.bound_to(spec), greedy=True)

    def say(*told: object) -> None:
        print(f"{time.monotonic() - began:5.0f} s", *told, flush=True)

    name = f"{chosen.family}{'' if any(chosen.flop_prices) else '-free'}"
    kept = chosen.cache / f"{name}.json"
    chosen.cache.mkdir(parents=True, exist_ok=True)
    tuned = tune(Evaluator(dataclasses.replace(env, previews=None)), chosen.episodes, chosen.rows, watch=say,
                 known=Tuned.load(kept) if kept.exists() else None, keep=lambda tuned: tuned.save(kept))
    drawn = env.family.scenarios(chosen.scenarios, "validation", chosen.start)
    court = EvaluationSet(env, None, tuned, drawn, MorphogeneticEnv)
    played = court.play_all([Contestant(MIND, decides, member.about["episodes"])], Workers(), say)
    arms = ProofResults([Part(drawn, played)]).arms[MIND]
    result: dict[str, Any] = {"family": chosen.family, "flop prices": chosen.flop_prices, "scenarios": chosen.scenarios,
                              "seconds": round(time.monotonic() - began), "episodes": tuned.episodes}
    result["above no growth"] = {name: compared(arm, arms["no growth"]) | {"flops": float(arm.flops.mean()), "params": float(arm.params.mean())}
                                 for name, arm in arms.items()}
    result["controller less control"] = {name: compared(arms["learned"], arm) for name, arm in arms.items() if name != "learned"}
    result["best of K"] = {"plans in a set": [len(each) for each in to_dict(tuned)["portfolio"]["sets"]]}
    result["preview-greedy"] = to_dict(tuned)["greedy"]
    for control, each in result["controller less control"].items():
        about = result["above no growth"][control]
        print(f"{control:<28} {about['points']:+6.2f} at {about['flops']:.2f} FLOPs; controller less it "
              f"{each['points']:+6.2f} ({each['low']:+.2f} to {each['high']:+.2f})")
    write(chosen, f"harder_court-{name}", result)


if __name__ == "__main__":
    main()
