"""Readers of the standard public formats of the data sets, and what they have in common."""
