"""How a run is doing: read from its store, shown as a line or as a panel of 80 columns."""

from dataclasses import dataclass
from pathlib import Path

from rich.console import Group
from rich.table import Table
from rich.text import Text

from esper.nissa import read

FUNNEL = ("GERMINATED", "BLENDING", "HOLDING", "FOSSILIZED", "PRUNED")
"""A life that is kept, and the way out."""


@dataclass(frozen=True)
class Summary:
    """The state of a run after its last complete round; utilities in points."""

    rounds: int
    planned: int
    rate: float
    """Host-epochs per second over the last ten rounds."""
    left: float
    """Seconds to go at that rate."""
    utility: float
    interval: float | None
    """Half the width of its 95 % interval, if it was measured."""
    exam: float | None
    ops: dict[str, float]
    entropies: dict[str, float]
    funnel: dict[str, int]
    anomalies: list[str]

    def line(self) -> str:
        exam = "" if self.exam is None else f"  exam {self.exam:+.2f}"
        trouble = f"  ! {', '.join(self.anomalies)}" if self.anomalies else ""
        doubt = "" if self.interval is None else f" ± {self.interval:.2f}"
        return (f"round {self.rounds}/{self.planned}  utility {self.utility:+.2f}{doubt}{exam}  "
                f"{self.rate:,.0f} host-epochs/s  {self.left / 60:.0f} min left{trouble}")


def summary(path: Path, planned: int) -> Summary | None:
    """None before the first round is complete."""
    rows = read(path, "SELECT round, seconds, host_epochs, utility, utility_error FROM round ORDER BY round DESC LIMIT 10")
    if not rows:
        return None
    last, seconds, epochs = rows[0][0], sum(row[1] for row in rows), sum(row[2] for row in rows)
    exam = read(path, "SELECT 100 * avg(utility) FROM exam WHERE policy = 'learned' AND round = "
                      "(SELECT max(round) FROM exam WHERE policy = 'learned')")[0][0]
    ops = read(path, "SELECT op, count(*) FROM step WHERE round = ? GROUP BY op", last)
    total = sum(count for _, count in ops) or 1
    moves = dict(read(path, "SELECT target, count(*) FROM move WHERE round = ? GROUP BY target", last))
    entropies = dict(read(path, "SELECT head, entropy FROM head WHERE round = ?", last))
    open_now = read(path, "SELECT kind || ' ' || place FROM anomaly WHERE round = ?", last)
    return Summary(last + 1, planned, epochs / max(seconds, 1e-9), (planned - last - 1) * seconds / len(rows), 100 * rows[0][3],
                   None if rows[0][4] is None else 196 * rows[0][4], exam, {op: count / total for op, count in ops}, entropies,
                   {stage: moves.get(stage, 0) for stage in FUNNEL}, [row[0] for row in open_now])


def panel(state: Summary) -> Group:
    """Everything at once, within 80 columns."""
    table = Table(show_header=False, box=None, padding=(0, 1), width=78)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    ops = sorted(state.ops.items(), key=lambda item: -item[1])
    table.add_row("decisions", "  ".join(f"{op} {share:.0%}" for op, share in ops))
    table.add_row("entropies", "  ".join(f"{head} {value:.2f}" for head, value in state.entropies.items() if value is not None))
    *path, pruned = (f"{stage.lower()} {count}" for stage, count in state.funnel.items())
    table.add_row("seeds", f"{' > '.join(path)}, {pruned}")
    table.add_row("anomalies", ", ".join(state.anomalies) or "none")
    return Group(Text(state.line(), overflow="fold"), table)
