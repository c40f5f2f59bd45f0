"""Measures the published figures of `esper bench env` and writes them to benchmarks/results/.

    python benchmarks/env.py

Measures CUDA hosts where CUDA is there, and CPU hosts elsewhere. Needs torch and rich, not the command.
"""

import torch
from population import publisher

from esper.bench_env import EnvBench, run_env_bench
from esper.memory import keep_freed_memory

CPU = [{"host": "conv1d"}, {"host": "mlp"}]
CUDA = [{"host": "conv1d", "rows": 1024, "loop_rows": 8, "device": "cuda", "dtype": dtype} for dtype in ("float32", "bfloat16")]


def main() -> None:
    publish = publisher(__doc__)
    keep_freed_memory()
    for options_of_one in CUDA if torch.cuda.is_available() else CPU:
        config = EnvBench(**options_of_one, rounds=5)  # type: ignore[arg-type]
        result = run_env_bench(config)
        name = f"env-{config.host}-{config.device}-{config.dtype}"
        publish(name, config.device, result)
        print(f"{name}: {result['ratio']:.1f}x, {result['tight_ratio']:.1f}x, {result['host_epochs_per_second']}, evidence "
              f"{result['counterfactuals']['ratio']:.1f}x, {result['peak_memory_bytes'] / 2**30:.1f} GiB", flush=True)


if __name__ == "__main__":
    main()
