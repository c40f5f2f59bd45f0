"""Begin a run on the universe with a controller that does what a regression would choose; it then learns by itself.

    python -m experiments.clone runs/universe-0 --seed 0
    esper train --out runs/universe-0 --resume

The teacher is fitted on the outcomes of plans that `python -m experiments.universe_gap` keeps. A run's store counts neither these episodes
nor the teacher's: say so beside its results.
"""

import argparse
import time
from pathlib import Path

import torch

from esper.cli.options import Train
from esper.cli.runs import make_folder, write_description
from esper.cli.train import resolve_config
from esper.leyline.codec import to_dict
from esper.simic.cloning import clone, demonstrate
from esper.simic.config import TrainConfig
from esper.simic.proof.surveyed import Identified, Regression, identify, price_pairs
from esper.simic.proof.universal import digest_of, load_table
from esper.simic.shards import make_world
from esper.simic.training import CHECKPOINT
from esper.tolaria import MorphogeneticEnv
from experiments.universe_gap import FOLDER

FIRST = 1 << 21  # of the scenarios that the teacher plays: none that a run meets


def teachers(config: TrainConfig) -> dict[str, Regression]:
    """kind of host -> what chooses its plans."""
    assert config.universe is not None
    found = {}
    for family in config.universe.training:
        if family.host.kind not in found:
            mine = [each for each in config.universe.training if each.host.kind == family.host.kind]
            table = load_table(FOLDER / f"plans-{family.host.kind}.safetensors", digest_of(mine))
            found[family.host.kind] = identify(table, price_pairs(family), print)
    return found


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("out", type=Path)
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--scenarios", type=int, nargs=2, default=(24, 8), help="of each conv1d and of each mlp family")
    arguments.add_argument("--passes", type=int, default=30)
    options = arguments.parse_args()
    if (options.out / CHECKPOINT).exists():
        raise SystemExit(f"{options.out} holds a run already; choose another folder")
    torch.set_num_threads(1)
    config = resolve_config(Train(options.out, universe=FOLDER / "small.toml", preset="cpu", config=FOLDER / "train.toml",
                                  seed=options.seed))
    assert config.universe is not None
    chosen, agent, lessons, began = teachers(config), config.agent(), [], time.perf_counter()
    counts = dict(zip(("conv1d", "mlp"), options.scenarios, strict=True))
    for family in config.universe.training:
        world = make_world(config.env_of(family), counts[family.host.kind], config.reward, config.score, MorphogeneticEnv)
        first = FIRST * (1 + options.seed) + sum(lesson.valid.shape[1] for lesson in lessons)
        scenarios = family.scenarios(world.env.rows, "train", first)
        lessons.append(demonstrate(agent, world, Identified(chosen[family.host.kind]), scenarios))
    gain = torch.cat([lesson.returns[0] for lesson in lessons])
    print(f"the teacher: {100 * gain.mean():+.2f} points above no growth in {len(gain)} episodes, {time.perf_counter() - began:.0f} s")
    curve = clone(agent, lessons, options.passes)
    print(f"negative log-probability of its decisions: {curve[0]:.3f} -> {curve[-1]:.3f}, {time.perf_counter() - began:.0f} s")
    make_folder(options.out)
    write_description(options.out, config)
    agent.save(options.out / CHECKPOINT, run=config.identity, env=to_dict(config.env))


if __name__ == "__main__":
    main()
