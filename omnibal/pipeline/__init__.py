"""Where the pipeline is cut, and what a step of it takes."""
