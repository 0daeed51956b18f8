"""What balance would bring under the trainer that a run already uses."""
