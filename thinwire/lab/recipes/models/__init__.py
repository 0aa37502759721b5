"""The models that the recipes train, one file a model."""
