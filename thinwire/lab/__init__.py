"""The laboratory: recipes, benchmarks, emulated links, reports. `pip install "thinwire[lab]"`."""
