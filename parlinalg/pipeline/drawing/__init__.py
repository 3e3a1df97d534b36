"""Timelines of schedules, simulated and measured: as text, SVG, PNG and a trace for Chrome.  Pure, but for the PNG."""

from parlinalg.pipeline.drawing.chrome import chrome
from parlinalg.pipeline.drawing.lanes import Box, Lane, lanes
from parlinalg.pipeline.drawing.png import png
from parlinalg.pipeline.drawing.staircase import staircase
from parlinalg.pipeline.drawing.svg import overlay, svg

__all__ = ["Box", "Lane", "chrome", "lanes", "overlay", "png", "staircase", "svg"]
