"""Learning curves of runs, and how they ended beside the heuristic, on the same validation scenarios.

    python -m experiments.curves cpu-mlp runs/mlp-0 runs/mlp-1 runs/mlp-2

Reads run stores; `esper train` with a preset makes them.
"""

from pathlib import Path
from typing import Any

import numpy as np

from esper.cli.runs import STORE, load_run
from esper.leyline import EsperError
from esper.nissa import read
from esper.simic.proof.claims import interval
from experiments.shared import parser, write


def curve(folder: Path) -> dict[str, Any]:
    store, found = folder / STORE, load_run(folder)
    if found is None:
        raise EsperError(f"{folder} holds no run")
    config, about = found
    rounds = read(store, "SELECT utility, seconds, host_epochs FROM round ORDER BY round")
    exams = read(store, "SELECT round, avg(utility) FROM exam WHERE policy = 'learned' GROUP BY round")
    last = "SELECT utility FROM exam WHERE policy = ? AND round = (SELECT max(round) FROM exam) ORDER BY scenario"
    learned, heuristic = (np.array([row[0] for row in read(store, last, name)]) for name in ("learned", "heuristic"))
    low, high = interval(learned - heuristic)
    return {"command": about["made with"]["command"], "family": config.env.family.name, "seed": config.seed,
            "minutes": sum(row[1] for row in rounds) / 60, "host_epochs": sum(row[2] for row in rounds),
            "return_by_round": [round(row[0], 5) for row in rounds], "exam_by_round": dict(exams),
            "scenarios": len(learned), "learned": float(learned.mean()), "heuristic": float(heuristic.mean()),
            "above_heuristic": float((learned - heuristic).mean()), "interval": [low, high]}


def main() -> None:
    options_of = parser(__doc__)
    options_of.add_argument("name")
    options_of.add_argument("runs", type=Path, nargs="+")
    options = options_of.parse_args()
    result = {folder.name: curve(folder) for folder in options.runs}
    for name, each in result.items():
        low, high = each["interval"]
        print(f"{name}: {100 * each['learned']:+.2f} points above no growth, {100 * each['above_heuristic']:+.2f} "
              f"({100 * low:+.2f} to {100 * high:+.2f}) above the heuristic, {each['scenarios']} scenarios, "
              f"{each['minutes']:.1f} min")
    write(options, f"curves-{options.name}", result)


if __name__ == "__main__":
    main()
