"""Conversations about images, in the files and forms that people have, as samples for training and as lengths."""
