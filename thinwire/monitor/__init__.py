"""What watches a training: health of residuals, equal replicas, stragglers, clipping in the wrong place."""
