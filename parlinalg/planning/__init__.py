"""Predict what a program does on ranks and machines that are not here, and plan training and products by it."""
