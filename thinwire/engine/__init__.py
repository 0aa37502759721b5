"""The engine's own types and the way of a gradient; knows no method, no framework, no collective."""
