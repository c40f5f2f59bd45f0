"""How a run is doing: read from its store, shown as a line or as a panel of 80 columns."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from esper.karn.charts import Z95
from esper.karn.panels import said
from esper.nissa import read

if TYPE_CHECKING:  # rich is for those who show a panel; the room is read without it
    from rich.table import Table

FUNNEL = ("GERMINATED", "BLENDING", "HOLDING", "FOSSILIZED", "PRUNED")  # a life that is kept; the way out
EIGHTHS, LEVELS = ("", *"▏▎▍▌▋▊▉"), "▁▂▃▄▅▆▇█"
BAR, CURVE = 40, 50  # columns of the bar, and of the curve at most


@dataclass(frozen=True)
class Summary:
    """The state of a run after its last complete round; utilities in points, None if not measured."""

    rounds: int
    planned: int
    rate: float  # host-epochs per second over the last ten rounds
    left: float  # seconds to go at that rate
    utility: float | None
    interval: float | None  # half the width of its 95 % interval
    exam: float | None
    ops: dict[str, float]
    entropies: dict[str, float]
    funnel: dict[str, int]
    anomalies: list[str]
    curve: list[float | None]  # the utility of every round

    @property
    def worth(self) -> str:
        doubt = "" if self.interval is None else f" ± {self.interval:.2f}"
        exam = "" if self.exam is None else f"  exam {self.exam:+.2f}"
        return ("not measured" if self.utility is None else f"{self.utility:+.2f}{doubt} points") + exam

    @property
    def pace(self) -> str:
        return f"{self.rate:,.0f} host-epochs/s  {said(self.left, 's')} left"

    def line(self) -> str:
        trouble = f"  ! {', '.join(self.anomalies)}" if self.anomalies else ""
        return f"round {self.rounds}/{self.planned}  utility {self.worth}  {self.pace}{trouble}"


def summary(path: Path, planned: int) -> Summary | None:
    """None before the first round is complete."""
    rows = read(path, "SELECT round, ifnull(seconds, 0), ifnull(host_epochs, 0), 100 * utility, "
                      "100 * utility_error FROM round ORDER BY round")
    if not rows:
        return None
    last, *_, utility, error = rows[-1]
    seconds, epochs = (statistics.fmean(row[column] for row in rows[-10:]) for column in (1, 2))
    exam = read(path, "SELECT 100 * avg(utility) FROM exam WHERE policy = 'learned' AND round = "
                      "(SELECT max(round) FROM exam WHERE policy = 'learned')")[0][0]
    ops = dict(read(path, "SELECT op, count(*) FROM step WHERE round = ? GROUP BY op", last))
    moves = dict(read(path, "SELECT target, count(*) FROM move WHERE round = ? GROUP BY target", last))
    troubles = read(path, "SELECT kind || ' ' || place FROM anomaly WHERE round = ?", last)
    return Summary(
        rounds=last + 1, planned=planned, rate=epochs / max(seconds, 1e-9), exam=exam, utility=utility,
        left=(planned - last - 1) * seconds, interval=None if error is None else Z95 * error,
        ops={op: count / sum(ops.values()) for op, count in ops.items()},
        entropies=dict(read(path, "SELECT head, entropy FROM head WHERE round = ?", last)),
        funnel={stage: moves.get(stage, 0) for stage in FUNNEL}, curve=[row[3] for row in rows],
        anomalies=[trouble for (trouble,) in troubles])


def bar(share: float, width: int = BAR) -> str:
    """As long as `width`, full at 1."""
    full, part = divmod(round(8 * width * min(max(share, 0), 1)), 8)
    return ("█" * full + EIGHTHS[part]).ljust(width, "░")


def sparkline(values: Sequence[float | None], width: int = CURVE) -> str:
    """Blocks between the least and the most of the values, or of means of neighbours if there are many."""
    size = math.ceil(len(values) / width) or 1
    parts = [[value for value in values[start:start + size] if value is not None]
             for start in range(0, len(values), size)]
    means = [statistics.fmean(part) if part else None for part in parts]
    known = [mean for mean in means if mean is not None]
    if not known:
        return ""
    low, span = min(known), max(known) - min(known) or 1.0
    blocks = [" " if mean is None else LEVELS[round(7 * (mean - low) / span)] for mean in means]
    return f"{low:+.1f} {''.join(blocks)} {max(known):+.1f}"


def panel(state: Summary) -> "Table":
    """Everything at once, within 80 columns."""
    from rich.table import Table
    from rich.text import Text

    done, ops = state.rounds / max(state.planned, 1), sorted(state.ops.items(), key=lambda item: -item[1])
    *path, pruned = (f"{stage.lower()} {count}" for stage, count in state.funnel.items())
    rows = {
        "round": (f"{state.rounds}/{state.planned}  {bar(done)}  {done:.0%}", "cyan"),
        "pace": (state.pace, ""), "utility": (state.worth, ""), "by round": (sparkline(state.curve), "cyan"),
        "decisions": ("  ".join(f"{op} {share:.0%}" for op, share in ops), ""),
        "entropies": ("  ".join(f"{head} {value:.2f}" for head, value in state.entropies.items()
                                if value is not None), ""),
        "seeds": (f"{' > '.join(path)}, {pruned}", ""),
        "anomalies": (", ".join(state.anomalies) or "none", "red" if state.anomalies else "")}
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold", max_width=69)
    for name, (told, style) in rows.items():
        table.add_row(name, Text(told, style))
    return table
