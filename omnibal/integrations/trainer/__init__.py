"""What a transformers.Trainer needs for balanced steps."""
