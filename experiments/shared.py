"""What every experiment's command line and result file have in common."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from esper.leyline.provenance import provenance
from esper.leyline.storage import atomic_write
from esper.tamiyo.minds import Member
from esper.tolaria import EnvConfig, PreviewConfig, find_family


def parser(description: str | None) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--device", default="cpu")
    made.add_argument("--commit", default="", help="commit that is measured (default: git's HEAD)")
    made.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    return made


def write(options: argparse.Namespace, name: str, result: dict[str, Any]) -> None:
    """One JSON file, with where and when it was measured in front."""
    options.out.mkdir(parents=True, exist_ok=True)
    words = ["python", "-m", f"experiments.{Path(sys.argv[0]).stem}", *sys.argv[1:]]
    stamp = provenance(options.device, options.commit) | {"command": " ".join(words)}
    atomic_write(options.out / f"{name}.json", json.dumps(stamp | result, indent=1) + "\n")


def env_of(member: Member) -> EnvConfig:
    """What a member of a shipped mind was trained in, on the CPU."""
    run = member.about["run"]["config"]
    previews = PreviewConfig(run["preview_every"], run["preview_steps"]) if run["preview_every"] else None
    return EnvConfig(find_family(member.about["family"]), previews=previews)
