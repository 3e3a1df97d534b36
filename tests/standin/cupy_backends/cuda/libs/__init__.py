"""Libraries, for the stand-in."""
