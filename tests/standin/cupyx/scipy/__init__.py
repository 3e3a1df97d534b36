"""`cupyx.scipy`, of which the stand-in has `linalg`."""
