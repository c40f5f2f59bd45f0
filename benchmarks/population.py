"""Measures the published figures of `esper bench population` and writes them to benchmarks/results/.

    python benchmarks/population.py

Measures CUDA hosts where CUDA is there, and CPU hosts elsewhere. Needs torch and rich, not the command.
"""

import argparse
import datetime
import json
import os
import platform
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from esper.bench import PopulationBench, run_population_bench
from esper.memory import keep_freed_memory

CPU = [{"host": "conv1d"}, {"host": "mlp"}]
CUDA = [
    {"host": "cnn", "rows": 256, "loop_rows": 64, "batch": 128, "device": "cuda", "dtype": "bfloat16", "compile": True},
    {"host": "conv1d", "rows": 256, "loop_rows": 64, "device": "cuda"},
]


def hardware(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    models = [line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line]
    return f"{models[0] if models else platform.machine()}, {os.cpu_count()} cores"


def publisher(description: str | None) -> Callable[[str, str, dict[str, Any]], None]:
    """Reads the command line; what it returns writes the result of a name and device, with date, commit and hardware."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", help="commit that is measured (default: git's HEAD)")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    head = ["git", "rev-parse", "--short", "HEAD"]
    commit = options.commit or subprocess.run(head, capture_output=True, text=True, check=True).stdout.strip()

    def publish(name: str, device: str, result: dict[str, Any]) -> None:
        origin = {"date": datetime.date.today().isoformat(), "commit": commit, "hardware": hardware(device)}
        (options.out / f"{name}.json").write_text(json.dumps(result | origin, indent=1) + "\n")

    return publish


def main() -> None:
    publish = publisher(__doc__)
    keep_freed_memory()
    for options_of_one in CUDA if torch.cuda.is_available() else CPU:
        config = PopulationBench(**options_of_one)
        result = run_population_bench(config, print)
        name = "-".join(["population", config.host, config.device, config.dtype, *["compiled"] * config.compile])
        publish(name, config.device, result)
        print(f"{name}: {result['ratio']:.1f}x, {result['samples_per_second']}, {result['structural_seconds']}", flush=True)


if __name__ == "__main__":
    main()
