"""How often does a random policy take a seed from germination to fossil, with default gates?

    python -m experiments.reachability --family mnist1d --episodes 64
"""

import argparse

from esper.simic.proof.sweep import full_spec
from esper.tamiyo import Random
from esper.tolaria import FAMILIES, MorphogeneticEnv, play


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", default="mnist1d", choices=list(FAMILIES))
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    family = FAMILIES[options.family]
    for name, spec in (("default", None), ("full", full_spec(family))):
        env = MorphogeneticEnv(family, options.episodes, spec=spec, device=options.device)
        episodes = play(env, Random(0), family.scenarios(options.episodes))
        kept = (episodes.blueprint >= 0).any(1).float().mean()
        born = len({decision.scenario for decision in episodes.decisions() if decision.op == "GERMINATE"}) / len(episodes)
        print(f"{options.family}, {name} action space: germinated in {100 * born:.0f} %, fossilized in {100 * kept:.0f} % of "
              f"{options.episodes} episodes, {len(env.rollbacks)} rollbacks", flush=True)


if __name__ == "__main__":
    main()
