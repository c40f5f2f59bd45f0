"""Measures the published figures of `esper bench rl` and writes them to benchmarks/results/.

    python benchmarks/rl.py

Measures CUDA where it is there, and the CPU elsewhere (against sb3-contrib, which must be installed for that).
"""

import statistics

import torch
from population import publisher

from esper.bench_rl import RLBench, run_rl_bench
from esper.memory import keep_freed_memory

CPU = [{"rows": 8, "steps": 128}, {"rows": 8, "steps": 128, "episode": 40}, {"rows": 32, "steps": 30}, {"rows": 256, "steps": 30}]
CUDA = [{"rows": 256, "steps": 30, "device": "cuda", "compile": compile} for compile in (False, True)]


def main() -> None:
    publish = publisher(__doc__)
    keep_freed_memory()
    for options_of_one in CUDA if torch.cuda.is_available() else CPU:
        config = RLBench(**options_of_one, updates=7)  # type: ignore[arg-type]
        result = run_rl_bench(config)
        shape = f"{config.rows}x{config.steps}" + (f"-by-{config.episode}" if config.episode else "")
        name = f"rl-{shape}-{config.device}{'-compiled' * config.compile}"
        publish(name, config.device, result)
        seconds = {learner: statistics.median(values) for learner, values in result["rounds_seconds"].items()}
        print(name, result["transitions_per_second"], seconds, result.get("ratio"), flush=True)


if __name__ == "__main__":
    main()
