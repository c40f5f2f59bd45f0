"""What happens when a machine of a cluster is lost, and another one joins? Ray's own test cluster: two nodes on this machine.

    python -m experiments.ray_cluster      needs Ray: pip install 'esper-morph[ray]'

Four workers, two on each node. In the middle of the third round one node is killed; after the fifth a new one joins. The same run in
this process says what must come out.
"""

import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from esper.leyline.telemetry import Nowhere
from esper.simic.on_ray import RayWorkers
from esper.simic.training import Training
from esper.simic.workers import Workers
from experiments.many_workers import CONFIG, digest
from experiments.shared import parser, write

ROUNDS = 10


class Told(Nowhere):
    """Who played which shard, and how many tries it took."""

    def __init__(self) -> None:
        self.shards: list[dict[str, Any]] = []

    def write(self, table: str, columns: Mapping[str, Any]) -> None:
        self.shards += [dict(columns)] * (table == "worker")


def run(workers: Workers, watch: Any = None) -> tuple[list[str], Told]:
    sink, curve = Told(), list[str]()
    with tempfile.TemporaryDirectory() as folder:
        training = Training(replace(CONFIG, rounds=ROUNDS, rows=32), Path(folder), sink, workers=workers)

        def told(number: int) -> None:
            curve.append(digest(training))
            if watch:
                watch(number)

        training.run(watch=told)
    return curve, sink


def main() -> None:
    options = parser(__doc__).parse_args()
    from ray.cluster_utils import Cluster

    torch.set_num_threads(1)
    expected, _ = run(Workers())
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    lost = cluster.add_node(num_cpus=2)
    cluster.wait_for_nodes()

    def events(number: int) -> None:
        if number == 2:  # a moment into the next round

            def kill() -> None:
                time.sleep(0.15)
                cluster.remove_node(lost, allow_graceful=False)

            threading.Thread(target=kill).start()
        if number == 5:
            cluster.add_node(num_cpus=2)

    try:
        with RayWorkers(4, time_limit=300, address=cluster.address) as workers:
            curve, sink = run(workers, events)
    finally:
        cluster.shutdown()
    played = sorted((each["round"], each["shard"]) for each in sink.shards)
    by_round = [sorted({each["worker"].split(":")[1] for each in sink.shards if each["round"] == n}) for n in range(ROUNDS)]
    result = {"rounds": ROUNDS, "same curve as in one process": curve == expected, "curve": curve,
              "every shard once": played == [(n, s) for n in range(ROUNDS) for s in range(CONFIG.shards)],
              "given to another worker": [[each["round"], each["shard"]] for each in sink.shards if each["tries"] > 1],
              "workers by round": [len(each) for each in by_round],
              "workers that joined later": len(set(by_round[-1]) - set(by_round[0]))}
    print(result)
    write(options, "ray_cluster", result)


if __name__ == "__main__":
    main()
