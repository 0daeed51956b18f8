"""Dataset formats: annotation files and images on disk as samples for training, and their lengths."""
