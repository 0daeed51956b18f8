"""What each layer of a model costs, and where the pipeline is cut."""
