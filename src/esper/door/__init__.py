"""The door: Esper attached to a model, an optimizer and a training loop that stay the user's own."""

from esper.door.callbacks import lightning_callback, trainer_callback
from esper.door.evidence import Report
from esper.door.export import Written, export
from esper.door.grow import Grown, grow
from esper.door.growing import Growing, attach
from esper.door.shallow import Shallow, start_shallow

__all__ = ["Growing", "Grown", "Report", "Shallow", "Written", "attach", "export", "grow",
           "lightning_callback", "start_shallow", "trainer_callback"]
