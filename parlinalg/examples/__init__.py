"""Configurations that come with parlinalg: `parlinalg train NAME` runs them."""
