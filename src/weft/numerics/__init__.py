"""What large batches need: rates that grow with the number of workers, and steps that are scaled layer by layer."""

from weft.numerics.lamb import Lamb
from weft.numerics.lars import Lars
from weft.numerics.linear_scaling import LinearScaling

__all__ = ["Lamb", "Lars", "LinearScaling"]
