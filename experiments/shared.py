"""What every experiment's command line and result file have in common."""

import argparse
import datetime
import json
import subprocess
from pathlib import Path

import torch


def parser(description: str | None) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--device", default="cpu")
    made.add_argument("--commit", help="commit that is measured (default: git's HEAD)")
    made.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    return made


def write(options: argparse.Namespace, name: str, result: dict[str, object]) -> None:
    """One JSON file, with where and when it was measured in front."""
    head = ["git", "rev-parse", "--short", "HEAD"]
    commit = options.commit or subprocess.run(head, capture_output=True, text=True, check=True).stdout.strip()
    origin = {"date": datetime.date.today().isoformat(), "commit": commit, "torch": torch.__version__,
              "hardware": torch.cuda.get_device_name() if options.device == "cuda" else "CPU"}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"{name}.json").write_text(json.dumps(origin | result, indent=1) + "\n")
