"""From a model to one stitched callable: trace, guards, pieces, artifacts, plan."""
