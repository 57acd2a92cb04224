"""What a run is like: curvature, profiles."""
