"""The door: Esper attached to a model, an optimizer and a training loop that stay the user's own."""

from esper.door.callbacks import lightning_callback, trainer_callback
from esper.door.depths import Depth, Depths, depths
from esper.door.evidence import Report
from esper.door.export import Written, export
from esper.door.grow import Grown, grow
from esper.door.growing import Growing, attach

__all__ = ["Depth", "Depths", "Growing", "Grown", "Report", "Written", "attach", "depths", "export", "grow",
           "lightning_callback", "trainer_callback"]
