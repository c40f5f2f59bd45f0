"""The door: Esper attached to a model, an optimizer and a training loop that stay the user's own."""

from esper.door.growing import Growing, Report, attach

__all__ = ["Growing", "Report", "attach"]
