"""Is there anything to decide on ordinary hosts of many data sets? Plans on every training family, scored at every price.

    python -m experiments.universe_gap --scenarios 6 4

plays every plan on so many scenarios of each conv1d and each mlp family of the universe's training part, keeps the outcomes in
experiments/universe/plans-KIND.safetensors, and writes what each level of knowledge is worth to results/universe_gap.json: plans
are chosen on other data sets than they are scored on (on other runs of the same one, for the last level). 95 % intervals by a
bootstrap over sources, then runs.
"""

import functools
from pathlib import Path

import torch

from esper.simic.proof.claims import interval
from esper.simic.proof.surveyed import PlanTable, identify, levels, price_pairs
from esper.simic.proof.universal import digest_of, load_table, save_table, survey_all
from esper.tolaria import EnvConfig, find_universe
from experiments.shared import parser, write

FOLDER = Path(__file__).parent / "universe"


def table_of(kind: str, count: int, path: Path) -> tuple[PlanTable, list[tuple[float, float]]]:
    universe = find_universe(FOLDER / "small.toml")
    families = [family for family in universe.training if family.host.kind == kind]
    if not path.exists():
        sources = universe.source_of(families)
        table = survey_all(EnvConfig, families, sources, count, watch=functools.partial(print, flush=True))
        save_table(path, table, digest_of(families))
    return load_table(path, digest_of(families)), price_pairs(families[0])


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--scenarios", type=int, nargs=2, default=(6, 4), help="of each conv1d and of each mlp family")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    result: dict[str, object] = {}
    for kind, count in zip(("conv1d", "mlp"), options.scenarios, strict=True):
        table, prices = table_of(kind, count, FOLDER / f"plans-{kind}.safetensors")
        said: list[str] = []
        identify(table, prices, said.append)
        found = {}
        for name, gains in levels(table, prices).items():
            each = gains.reshape(len(prices), -1).mean(0)  # prices share their runs
            low, high = interval(each, group=table.group)
            found[name] = {"points": 100 * float(each.mean()), "low": 100 * low, "high": 100 * high}
            print(f"{kind}: {name}: {100 * each.mean():+.2f} ({100 * low:+.2f} to {100 * high:+.2f})", flush=True)
        print(f"{kind}: chosen by a regression, other data sets held out: {said[0]}")
        result[kind] = {"episodes": table.runs.shape[0] * table.runs.shape[1], "levels": found, "regression": said[0]}
    write(options, "universe_gap", result)


if __name__ == "__main__":
    main()
