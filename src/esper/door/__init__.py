"""The door: Esper attached to a model, an optimizer and a training loop that stay the user's own."""

from esper.door.evidence import Report
from esper.door.export import Written, export
from esper.door.grow import Grown, grow
from esper.door.growing import Growing, attach

__all__ = ["Growing", "Grown", "Report", "Written", "attach", "export", "grow"]
